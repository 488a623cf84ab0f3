"""Errors of object stores. `code` is what an API answer or a log line names."""

from __future__ import annotations


class ObjectStoreError(Exception):
    """Raised when an object store does not answer in time, or refuses; the message names the object
    and the reason."""

    code = "object_store_error"


class ObjectNotFound(ObjectStoreError):
    """Raised when there is no object of that key."""

    code = "object_missing"


class ObjectChanged(ObjectStoreError):
    """Raised when an object is not the one that was asked about before: its entity tag differs."""

    code = "object_changed"


class ObjectStoreUnavailable(ObjectStoreError):
    """Raised when the store did not answer, or not as it should, this time (5xx, 429, silence, a
    cut): asking again may help."""

    code = "object_store_unavailable"
