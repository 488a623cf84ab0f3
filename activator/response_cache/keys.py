"""Keys of the response cache, and what a request says of it.

Two calls are equal if function, revision, generation of the traffic, method, tenant of the caller,
content types and arguments are. A rollout or a rollback begins a new generation, so that neither
sees answers of an earlier one.

Arguments in JSON are compared as values: without the order of members and the white space, and with
one spelling of each number. `1` and `1.0` differ, because a function can tell them apart. Pickles,
larger bodies and numbers beyond a float are compared byte by byte, so that the work is bounded."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from typing import Final

from activator.calls.call import Call
from activator.calls.response_store import key_of
from activator.http.payloads import JSON

MAX_CANONICAL_BYTES: Final = 16_384
"""Largest JSON that is compared by its values: parsing and writing it take at most half a
millisecond."""
MAX_DIRECTIVES_BYTES: Final = 256
"""Longest `Cache-Control` that is read; a longer one is treated as `no-store`."""


class CacheControl(enum.Enum):
    """What a caller's `Cache-Control` permits (RFC 9111 §5.2.1). REFRESH (`no-cache`): run it, and
    store the answer. BYPASS (`no-store`): neither."""

    USE = "use"
    REFRESH = "no-cache"
    BYPASS = "no-store"


def cache_control(headers: Mapping[bytes, bytes]) -> CacheControl:
    """Return what the headers of a request permit; other directives are ignored."""
    given = headers.get(b"cache-control", b"")
    if not given:
        return CacheControl.USE
    if len(given) > MAX_DIRECTIVES_BYTES or forbids_storing(given):
        return CacheControl.BYPASS
    return CacheControl.REFRESH if b"no-cache" in _directives(given) else CacheControl.USE


def forbids_storing(value: bytes) -> bool:
    """Whether a `Cache-Control` has `no-store`."""
    return b"no-store" in _directives(value)


def _directives(value: bytes) -> list[bytes]:
    return [one.strip().lower() for one in value.split(b",")]


def cache_key(call: Call) -> bytes:
    """Return the key of a call."""
    target = call.target
    return key_of(
        call,
        b"call",
        target.revision.encode(),
        b"%d" % target.generation,
        canonical(call.body, is_json=call.content_type == JSON),
    )


def canonical(body: bytes, *, is_json: bool) -> bytes:
    """Return bytes that are equal for equal arguments: they begin with `v` where values are
    compared, and with `b` where bytes are."""
    if is_json and len(body) <= MAX_CANONICAL_BYTES:
        try:
            return b"v" + _write(_parse(body.decode())).encode()
        except (ValueError, RecursionError):
            pass  # not JSON, too deep, or with a number that has no canonical form
    return b"b" + body


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


_parse = json.JSONDecoder(parse_constant=_refuse_constant).decode
_write = json.JSONEncoder(sort_keys=True, allow_nan=False, separators=(",", ":")).encode
