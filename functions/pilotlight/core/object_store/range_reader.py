"""What a client of S3 must be able to do for a store: read one range of one version. Two clients do
it: boto3 and obstore."""

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
    """What is asked for, of the object `name` (the full key in its bucket; `url` names it in
    errors).

    Attributes:
        etag: of the version that is meant; None or "" for whichever is there.
        max_object_bytes: refuse, before the body is read, an object longer than this.
    """

    name: str
    url: str
    offset_bytes: int
    length_bytes: int
    etag: str | None = None
    max_object_bytes: int | None = None

    @property
    def if_match(self) -> str | None:
        """The tag to send; weak ones never match (RFC 9110, 13.1.1), so they are compared here
        only."""
        return self.etag if self.etag and not self.etag.startswith("W/") else None

    def check_head(self, found: ObjectInfo, *, offset_bytes: int, length_bytes: int) -> None:
        """Refuse an answer that announces another version or another range than asked for. Raises
        ObjectStoreError."""
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
                f"{self.url}: the store does not answer with the range that was asked for; it "
                f"must support Range"
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
                f"{self.url}: the answer ended after {received_bytes} of {announced_bytes} bytes"
            )


class RangeReader(Protocol):
    """Reads ranges, one attempt each. Raises ObjectStoreError. Cancelling abandons the attempt."""

    async def read(self, wanted: RangeRequest) -> tuple[Buffer, ObjectInfo]:
        """The bytes, and whose they are; b"" past the end (the information then is of no version:
        size 0, no tag)."""

    async def aclose(self) -> None:
        """Let connections go."""
