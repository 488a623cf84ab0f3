"""The interface of S3 clients for range reads, implemented with boto3 and obstore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pilotlight.core.object_store.errors import (
    ObjectChanged,
    ObjectStoreError,
    ObjectStoreUnavailable,
)
from pilotlight.core.object_store.interface import ObjectInfo

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    """A request for a range of the object `name` (the full key in its bucket; `url` names it in
    errors).

    Attributes:
        etag: of the required version; None or "" for the current one.
        max_object_bytes: refuse a longer object before its body is read.
    """

    name: str
    url: str
    offset_bytes: int
    length_bytes: int
    etag: str | None = None
    max_object_bytes: int | None = None

    @property
    def if_match(self) -> str | None:
        """The tag to send; weak tags never match (RFC 9110, 13.1.1), so they are only compared
        locally."""
        return self.etag if self.etag and not self.etag.startswith("W/") else None

    def check_head(self, found: ObjectInfo, *, offset_bytes: int, length_bytes: int) -> None:
        """Refuse a response for another version or another range. Raises ObjectStoreError."""
        if self.etag and found.etag and found.etag != self.etag:
            raise ObjectChanged(f"{self.url} was replaced by another version")
        if self.max_object_bytes is not None and found.size_bytes > self.max_object_bytes:
            raise ObjectStoreError(
                f"{self.url} is longer than {self.max_object_bytes} bytes: it has "
                f"{found.size_bytes}"
            )
        expected = max(0, min(self.length_bytes, found.size_bytes - self.offset_bytes))
        if length_bytes > expected or (length_bytes and offset_bytes != self.offset_bytes):
            raise ObjectStoreError(
                f"{self.url}: the store did not return the requested range; it must support Range"
            )
        if length_bytes < expected:
            raise ObjectStoreUnavailable(
                f"{self.url}: {length_bytes} of {expected} bytes from {self.offset_bytes} were "
                f"announced"
            )

    def check_body(self, received_bytes: int, announced_bytes: int) -> None:
        """Refuse a body of another length than announced. Raises ObjectStoreUnavailable."""
        if received_bytes != announced_bytes:
            raise ObjectStoreUnavailable(
                f"{self.url}: the response ended after {received_bytes} of {announced_bytes} bytes"
            )


class RangeReader(Protocol):
    """Reads ranges, one attempt each. Raises ObjectStoreError. Cancelling abandons the attempt."""

    async def read(self, wanted: RangeRequest) -> tuple[Buffer, ObjectInfo]:
        """Read the bytes, and the object's version; b"" past the end (then with size 0 and no
        tag)."""

    async def aclose(self) -> None:
        """Close connections."""
