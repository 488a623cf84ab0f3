"""Content types of call bodies (JSON, pickle or tensors), and the callers whose pickles are
accepted.

A caller that sends a pickle runs code in the function's worker, with its environment and its
secrets. Pickles are therefore accepted only from callers of the function's own tenant. Only this
module decides that; `access.grants.AccessGrant` holds the decision for a caller and a function, and
a worker refuses a pickle without the header that states it (HEADER_TRUSTED_PICKLE).

Functions answer from the origin of the dashboard, and a tenant controls their responses. Calls are
answered with types that no browser executes; everything that a function returns carries `nosniff`
and a sandbox."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from pilotlight import errors
from pilotlight.protocol import (
    CONTENT_BYTES,
    CONTENT_JSON,
    CONTENT_NDJSON,
    CONTENT_NPY,
    CONTENT_PICKLE,
    CONTENT_PICKLE_STREAM,
    CONTENT_PROBLEM,
    CONTENT_SSE,
    CONTENT_TENSORS,
    HEADER_TRUSTED_PICKLE,
    is_pickle,
)

JSON: Final = CONTENT_JSON.encode()
PICKLE: Final = CONTENT_PICKLE.encode()
TENSORS: Final = CONTENT_TENSORS.encode()
"""What the activator makes of other bodies; callers cannot send it."""
BINARY_TYPES: Final = frozenset({CONTENT_BYTES.encode(), CONTENT_NPY.encode()})
"""Types of bodies that are one argument, for functions that take one."""
TRUSTED_LINE: Final = b"\r\n%b: 1" % HEADER_TRUSTED_PICKLE.encode()
"""Header line of a request to a worker whose body is a pickle that was accepted."""
CONTENT_TYPE: Final = b"content-type"
_PICKLES: Final = frozenset({CONTENT_PICKLE, CONTENT_PICKLE_STREAM})


class Payload(NamedTuple):
    """What a caller sends with a call: a body, its type (JSON, PICKLE or TENSORS), the `Accept`
    header."""

    body: bytes
    content_type: bytes = JSON
    accept: bytes = b""


def payload_type(given: bytes | None) -> bytes:
    """Return JSON or PICKLE (these objects, to compare by identity) for the Content-Type of a
    request (None = it has none).

    A body of any other type counts as JSON and is forwarded as JSON, so that a worker parses it as
    JSON only."""
    if given is None or given == JSON:
        return JSON
    return PICKLE if is_pickle(given) else JSON


def binary_type(given: bytes | None) -> bytes:
    """Return the one of BINARY_TYPES that a request's Content-Type is; b"" for any other."""
    if given is None or given == JSON:
        return b""
    name = given.partition(b";")[0].strip().lower()
    return name if name in BINARY_TYPES else b""


def accepts_pickles(caller: str, owner: str) -> bool:
    """Whether a caller of tenant `caller` ("" = anonymous) may send pickles to a function of tenant
    `owner`."""
    return caller != "" and caller == owner


def checked_type(given: bytes | None, *, accepts: bool) -> bytes:
    """Return `payload_type(given)`. Raises UnsupportedMediaType for a pickle unless `accepts`."""
    found = payload_type(given)
    if found is PICKLE and not accepts:
        raise not_accepted()
    return found


def stored_type(stored: bytes, *, accepts: bool) -> bytes:
    """Return the type of a body in the journal, which may be TENSORS. Raises as `checked_type`."""
    return TENSORS if stored == TENSORS else checked_type(stored, accepts=accepts)


def not_accepted() -> errors.UnsupportedMediaType:
    """Return the error for a pickle sent to a function of another tenant."""
    return errors.UnsupportedMediaType(
        f"calls to another tenant's function must use JSON, because pickles are accepted only from "
        f"callers of the function's own tenant: send the arguments as {CONTENT_JSON}",
        parameter="content-type",
    )


def answered_type(sent: bytes, answered: str) -> str:
    """Return the content type that a record stores for a response: a pickle only where the call was
    `sent` as one.

    A worker runs its tenant's code, which can return any type, and clients unpickle a response of
    type pickle."""
    if sent is not PICKLE and answered.partition(";")[0].strip().lower() in _PICKLES:
        return OPAQUE.decode()
    return answered


OPAQUE: Final = CONTENT_BYTES.encode()
GUARD: Final = ((b"x-content-type-options", b"nosniff"), (b"content-security-policy", b"sandbox"))
"""Sent with every response that a function influences, and with the platform's own responses that
repeat input of callers and functions."""
GUARD_LINES: Final = b"".join(b"%b: %b\r\n" % line for line in GUARD)
_TYPES: Final = frozenset(
    {
        CONTENT_JSON,
        CONTENT_NDJSON,
        CONTENT_NPY,
        CONTENT_PICKLE,
        CONTENT_PICKLE_STREAM,
        CONTENT_PROBLEM,
        CONTENT_SSE,
        OPAQUE.decode(),
        "image/avif",
        "image/gif",
        "image/jpeg",
        "image/png",
        "image/webp",
        "text/plain",
    }
)
_KINDS: Final = ("audio/", "video/")


@lru_cache(maxsize=1024)
def call_type(given: bytes) -> bytes:
    """Return the Content-Type of a call's response: the function's where it is allowed, else
    OPAQUE."""
    name = given.partition(b";")[0].strip().lower().decode("latin-1")
    is_one = name in _TYPES or (name.startswith(_KINDS) and b"," not in given)
    return given if is_one else OPAQUE
