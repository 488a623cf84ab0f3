"""Errors of object stores. `code` is used in API responses and log lines."""

from __future__ import annotations


class ObjectStoreError(Exception):
    """Raised when an object store does not answer in time or refuses; the message names the object
    and the reason."""

    code = "object_store_error"


class ObjectNotFound(ObjectStoreError):
    """Raised when there is no object with that key."""

    code = "object_missing"


class ObjectChanged(ObjectStoreError):
    """Raised when an object's entity tag is not the expected one."""

    code = "object_changed"


class ObjectStoreUnavailable(ObjectStoreError):
    """Raised on a transient failure of the store (5xx, 429, timeout, truncated response): a retry
    may succeed."""

    code = "object_store_unavailable"
