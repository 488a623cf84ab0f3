"""What an object may be called: plain names with `/` between them, so that no key leaves its
store."""

from __future__ import annotations

import re

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_key(name: str) -> bool:
    """Whether a store may be asked for it."""
    return _KEY.fullmatch(name) is not None


def check_key(key: str) -> str:
    """The key. Raises ValueError for one that would leave its store."""
    if not is_key(key):
        raise ValueError(f"{key!r} is no key: plain names with / between them")
    return key


def blob_key(digest: str) -> str:
    """Where a blob of that name lies: `<first two digits>/<digest>`. Raises ValueError for what is
    no digest."""
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} does not name a blob: expected the 64 hex digits of its hash")
    return f"{digest[:2]}/{digest}"
