"""What a row has of a call's arguments and result: scrubbed first, then hashed, summarized, and
written as text. Runs in the writer process only."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from pilotlight.spec.prediction_log import REST, SCRUBBED, Content
from pilotlight.validation.json_documents import parse_document, replace_values
from pilotlight.validation.json_paths import parse_path

HASH_BYTES: Final = 16
MAX_MEMBERS: Final = 64
"""Members of the object at the top that a summary describes."""
MAX_NAME_CHARS: Final = 64

_paths = lru_cache(maxsize=1024)(parse_path)


def input_columns(
    body: bytes,
    *,
    content: Content,
    scrub: Sequence[str],
    parameters: Sequence[str],
    key: bytes,
) -> dict[str, str | None]:
    """Return `feature_hash`, `input_summary` and `input` of JSON arguments; all None for a body
    that is no JSON.

    Arguments by position are named first, so that a path finds them either way. `key`: of the hash,
    without which arguments cannot be found by trying out values."""
    found, document = parse_body(body, scrub, parameters)
    if not found:
        return dict.fromkeys(("feature_hash", "input_summary", "input"))
    text = _text(document, sort_keys=True).encode()
    digest = hashlib.blake2b(text, key=key, digest_size=HASH_BYTES).hexdigest()
    summary, whole = _texts(document, content)
    return {"feature_hash": digest, "input_summary": summary, "input": whole}


def output_columns(body: bytes, *, content: Content, scrub: Sequence[str]) -> dict[str, str | None]:
    """Return `output_summary` and `output` of a JSON result; both None for a body that is no
    JSON."""
    found, document = parse_body(body, scrub, ()) if content is not Content.NONE else (False, None)
    summary, text = _texts(document, content) if found else (None, None)
    return {"output_summary": summary, "output": text}


def scrub_document(document: Any, paths: Sequence[str]) -> Any:
    """Return the document with the values at these JSON paths replaced. May change it in place."""
    return replace_values(document, map(_paths, paths), SCRUBBED)


def summarize(document: Any) -> dict[str, Any]:
    """Describe a value without its text: types, lengths, numbers, and the names of the members of
    an object at the top."""
    described = _describe(document)
    if isinstance(document, Mapping):
        described["members"] = {
            name[:MAX_NAME_CHARS]: _describe(value)
            for name, value in list(document.items())[:MAX_MEMBERS]
        }
    return described


def parse_body(body: bytes, scrub: Sequence[str], parameters: Sequence[str]) -> tuple[bool, Any]:
    """Return whether the body is JSON, and its scrubbed value. Arguments by position are named."""
    try:
        document = parse_document(body)
        if parameters and isinstance(document, list):
            document = _named(scrub_document(document, scrub), parameters)
        return True, scrub_document(document, scrub)
    except (ValueError, RecursionError):
        return False, None


def _named(document: Any, parameters: Sequence[str]) -> Any:
    """Name arguments by position. Those of `*args` are the member REST."""
    if not isinstance(document, list):
        return document
    rest = document[len(parameters) :]
    return {**dict(zip(parameters, document, strict=False)), **({REST: rest} if rest else {})}


def _texts(document: Any, content: Content) -> tuple[str | None, str | None]:
    if content is Content.NONE:
        return None, None
    return _text(summarize(document)), _text(document) if content is Content.FULL else None


def _text(value: Any, *, sort_keys: bool = False) -> str:
    """Encode a value. Half of a surrogate pair, which JSON escapes can express, becomes "?"."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=sort_keys, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


def _describe(value: Any) -> dict[str, Any]:
    match value:
        case None:
            return {"type": "null"}
        case bool():
            return {"type": "boolean", "value": value}
        case int() | float():
            return {"type": "number", "value": value}
        case str():
            return {"type": "string", "chars": len(value)}
        case list():
            return {"type": "array", "items": len(value), **_describe_numbers(value)}
        case _:
            return {"type": "object", "items": len(value)}


def _describe_numbers(values: list[Any]) -> dict[str, float]:
    """Return minimum, maximum and mean of a list of numbers; nothing for another list."""
    if not values or not all(type(value) in (int, float) for value in values):
        return {}
    try:
        mean = math.fsum(values) / len(values)
    except OverflowError:
        return {}
    found = {"min": min(values), "max": max(values), "mean": mean}
    return found if all(math.isfinite(value) for value in found.values()) else {}
