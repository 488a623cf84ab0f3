"""Content types and headers that keep browsers from running responses of functions in this origin.

Functions answer from the origin of the dashboard, and a tenant controls their responses. Calls are
answered with types that no browser executes; everything that a function returns carries `nosniff`
and a sandbox.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from pilotlight.protocol import (
    CONTENT_JSON,
    CONTENT_NDJSON,
    CONTENT_PICKLE,
    CONTENT_PICKLE_STREAM,
    CONTENT_PROBLEM,
    CONTENT_SSE,
)

OPAQUE: Final = b"application/octet-stream"
GUARD: Final = ((b"x-content-type-options", b"nosniff"), (b"content-security-policy", b"sandbox"))
"""Sent with every response that a function influences, and with the platform's own responses that
repeat input of callers and functions."""
GUARD_LINES: Final = b"".join(b"%b: %b\r\n" % line for line in GUARD)
_TYPES: Final = frozenset(
    {
        CONTENT_JSON,
        CONTENT_NDJSON,
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
