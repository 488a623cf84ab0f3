"""Collections, which are dicts and queues: their bounds, and how a Python key becomes text."""

from __future__ import annotations

import base64
import json
from enum import StrEnum
from typing import Any

from pilotlight.errors import InvalidInput

MAX_KEY_BYTES = 256
"""Of a key of a dict, or a partition of a queue, as UTF-8: it is part of an index."""
MAX_VALUE_BYTES = 1024 * 1024
"""Of one value. Larger ones belong into a volume, with their path as the value."""
MAX_REQUEST_VALUES = 500
"""Keys or values of one request: the controller reads 10,000 JSON values."""
MAX_REQUEST_BYTES = 2 * MAX_VALUE_BYTES
"""Of one request as JSON: a value of MAX_VALUE_BYTES in base64, and what is around it."""
MAX_WAIT_S = 30.0
"""The longest that one request waits for a value of a queue: below the idle timeouts of common
proxies (30 to 60 s)."""
INTERNAL_COLLECTIONS = "/internal/collections"
"""Prefix of the paths by which activators pass on what functions ask."""
_PLAIN = (str, int, float, bool, type(None))


class CollectionKind(StrEnum):
    """What a collection is."""

    DICT = "dict"
    QUEUE = "queue"

    @property
    def path(self) -> str:
        """Where the API has collections of this kind."""
        return f"/v1/{self}s"


def encode_key(key: object) -> str:
    """Return the text of a key: its JSON, with a tuple as an array, and bytes as {"bytes": base64}.
    `1`, `1.0` and `True` are three keys. Raises InvalidInput for other types, and for a text of
    more than MAX_KEY_BYTES."""
    try:
        text = json.dumps(_to_json(key), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return check_key(text)
    except (ValueError, RecursionError) as e:
        raise InvalidInput(f"a key of type {type(key).__name__} has no JSON: {e}") from e


def decode_key(text: str) -> Any:
    """Return the key of a text that `encode_key` made."""
    return _from_json(json.loads(text))


def check_key(text: str) -> str:
    """Return a key's text, or a partition. Raises InvalidInput."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as e:
        raise InvalidInput("a key must be valid Unicode, without lone surrogates") from e
    if size > MAX_KEY_BYTES or "\0" in text:
        raise InvalidInput(
            f"key {text[:40]!r}…: {size} bytes of UTF-8, and at most {MAX_KEY_BYTES} are allowed, "
            f"none of them zero: use a digest of it as the key, and put the rest into the value",
            parameter="key",
            limit_bytes=MAX_KEY_BYTES,
        )
    return text


def _to_json(key: object) -> Any:
    if type(key) in _PLAIN:
        return key
    if isinstance(key, tuple):
        return [_to_json(part) for part in key]
    if isinstance(key, bytes):
        return {"bytes": base64.b64encode(key).decode()}
    raise InvalidInput(
        f"a key of type {type(key).__name__} is not supported: use str, int, float, bool, None, "
        f"bytes, or a tuple of these",
        parameter="key",
    )


def _from_json(found: Any) -> Any:
    if isinstance(found, list):
        return tuple(map(_from_json, found))
    return base64.b64decode(found["bytes"]) if isinstance(found, dict) else found
