"""Object keys: plain names separated by `/`, so that no key leaves its store."""

from __future__ import annotations

import re

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_key(name: str) -> bool:
    """Whether `name` is a valid key."""
    return _KEY.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return the key. Raises ValueError if it is invalid."""
    if not is_key(key):
        raise ValueError(f"{key!r} is not a valid key: use plain names separated by /")
    return key


def blob_key(digest: str) -> str:
    """The key of a blob: `<first two digits>/<digest>`. Raises ValueError for an invalid
    digest."""
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is not a blob name: expected the 64 hex digits of its hash")
    return f"{digest[:2]}/{digest}"
