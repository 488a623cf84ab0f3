"""The origin: content-addressed blobs, read by range.

Data from an origin is not trusted: the store hashes every chunk. An origin guarantees that all
ranges of a blob come from one version of its object, that a range is complete, and that every read
ends, with bytes or with an error that says what to do."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from pilotlight.core.object_store import ObjectInfo, ObjectStore, blob_key
from pilotlight.core.object_store.errors import (
    ObjectChanged,
    ObjectNotFound,
    ObjectStoreError,
    ObjectStoreUnavailable,
)
from pilotlight.core.object_store.retries import Pause, retry_unavailable
from weight_cache.errors import OriginUnavailable
from weight_cache.manifest import CHUNK_BYTES

T = TypeVar("T")
SLOWEST_BYTES_PER_S = 64 * 1024
"""An attempt may take its timeout plus the time that its bytes need at this rate, so that a
trickling response fails too."""
_REMEMBERED = 10_000
"""Blobs whose version is cached, evicted least recently used first: a few MB."""
_log = logging.getLogger(__name__)


class Origin(Protocol):
    """Blobs by digest (hex). Many reads run concurrently; cancelling one abandons it."""

    async def size(self, digest: str) -> int:
        """Length of blob `digest` in bytes. Raises OriginUnavailable."""

    async def read(
        self, digest: str, *, offset_bytes: int, length_bytes: int
    ) -> bytes | memoryview:
        """Read up to `length_bytes` from `offset_bytes`; shorter only at the end of the blob.
        Raises OriginUnavailable."""


class ObjectOrigin:
    """The platform's blobs in an object store.

    `size` requests the blob's current version, which later reads require. Transient errors are
    retried, up to `attempts` times in total with pauses between them; an attempt without an answer
    fails after `timeout_s`, so an unresponsive store fails after `attempts * timeout_s`. The store
    passed in must not retry itself. Owner: the event loop; no `await` while `_known` changes."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        attempts: int = 5,
        timeout_s: float = 30.0,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._pause = pause
        self._known: OrderedDict[str, ObjectInfo] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ObjectOrigin {self._store!r}>"

    async def size(self, digest: str) -> int:
        """Request the length of a blob in bytes; never cached. Raises OriginUnavailable."""
        return (await self._request_info(digest)).size_bytes

    async def read(
        self, digest: str, *, offset_bytes: int, length_bytes: int
    ) -> bytes | memoryview:
        """Read a range. Ranges of a larger blob are read from one version; a blob of a single range
        needs no version check. Raises OriginUnavailable."""
        key = _key(digest)
        info = self._known.get(digest)
        if info is None and (offset_bytes or length_bytes >= CHUNK_BYTES):
            info = await self._request_info(digest)

        async def attempt() -> bytes | memoryview:
            etag = info.etag if info is not None else None
            data = await self._store.read(
                key, offset_bytes=offset_bytes, length_bytes=length_bytes, etag=etag
            )
            if info is not None and len(data) != (
                whole := max(0, min(length_bytes, info.size_bytes - offset_bytes))
            ):
                raise ObjectStoreUnavailable(
                    f"received {len(data)} of {whole} bytes from {offset_bytes}"
                )
            return data

        return await self._insist(
            digest, attempt, timeout_s=self._timeout_s + length_bytes / SLOWEST_BYTES_PER_S
        )

    async def aclose(self) -> None:
        """Close the store."""
        await self._store.aclose()

    async def _request_info(self, digest: str) -> ObjectInfo:
        key = _key(digest)
        info = await self._insist(digest, lambda: self._store.info(key), timeout_s=self._timeout_s)
        if info is None:
            raise self._unavailable(
                digest, "is missing. Deploy again to upload it, or push the weights again"
            )
        self._known[digest] = info
        self._known.move_to_end(digest)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return info

    async def _insist(
        self, digest: str, work: Callable[[], Awaitable[T]], *, timeout_s: float
    ) -> T:
        async def limited() -> T:
            try:
                async with asyncio.timeout(timeout_s):
                    return await work()
            except TimeoutError as e:
                raise ObjectStoreUnavailable(f"no answer within {timeout_s:.3g} s") from e

        async def logged() -> T:
            try:
                return await limited()
            except ObjectStoreUnavailable as e:
                _log.warning(
                    "origin failed blob=%s store=%r reason=%s", digest[:12], self._store, e
                )
                raise

        try:
            return await retry_unavailable(
                logged, attempts=self._attempts, longest_pause_s=self._timeout_s, pause=self._pause
            )
        except ObjectNotFound as e:
            self._known.pop(digest, None)
            raise self._unavailable(
                digest, "is missing. Deploy again to upload it, or push the weights again"
            ) from e
        except ObjectChanged as e:
            self._known.pop(digest, None)
            raise self._unavailable(
                digest,
                "was replaced while it was read. Its bytes are discarded; the next start reads it again",
            ) from e
        except ObjectStoreUnavailable as e:
            reason = (
                f"could not be read in {self._attempts} attempts: {e}. Check the store and the "
                f"network to it, then start again"
            )
            raise self._unavailable(digest, reason) from e
        except ObjectStoreError as e:
            raise self._unavailable(digest, f"cannot be read: {e}") from e

    def _unavailable(self, digest: str, reason: str) -> OriginUnavailable:
        return OriginUnavailable(f"blob {digest[:12]} of {self._store!r} {reason}")


def _key(digest: str) -> str:
    try:
        return blob_key(digest)
    except ValueError as e:
        raise OriginUnavailable(str(e)) from e
