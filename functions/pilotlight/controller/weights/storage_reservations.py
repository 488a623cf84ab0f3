"""In-memory state of storage operations: blobs and images in use or being deleted, and bytes
reserved by running uploads.

Only one controller process is active at a time (`controller.lock`), so this state is kept in its
memory: operations that a crash interrupts end with it. State that must survive a crash (that a
deletion has begun) is in the database."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from pilotlight.errors import OverQuota

BUILD_RETRY_S = 30.0
"""Retry delay for a rejected build: most builds take from seconds to some minutes."""


def image_key(digest: str, tenant: str = "") -> str:
    """Key of an image in `StorageReservations`, which differs from every blob digest that a client
    could upload. Without `tenant`: an image that all tenants share."""
    return f"image/{digest}/{tenant}"


class StorageReservations:
    """Use, deletions and reservations in progress. Blobs are named by their digests, images by
    `image_key`.

    Owner: the controller's event loop; state changes only between awaits.
    """

    def __init__(self) -> None:
        self._using: Counter[str] = Counter()
        self._deleting: dict[str, asyncio.Event] = {}
        self._coming: Counter[str] = Counter()
        self._locks: dict[str, asyncio.Lock] = {}
        self._builds: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<StorageReservations using={len(self._using)} deleting={len(self._deleting)}>"

    @contextlib.asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[None]:
        """Prevent the deletion of `name` inside the block; waits for a deletion in progress to
        end."""
        while (deletion := self._deleting.get(name)) is not None:
            await deletion.wait()
        self._using[name] += 1
        try:
            yield
        finally:
            _decrease(self._using, name, 1)

    @contextlib.contextmanager
    def deleting(self, name: str) -> Iterator[bool]:
        """Yield whether `name` may be deleted inside the block: it is not in use, and a new use
        waits until the block ends."""
        if name in self._using or name in self._deleting:
            yield False
            return
        ended = self._deleting[name] = asyncio.Event()
        try:
            yield True
        finally:
            del self._deleting[name]
            ended.set()

    @contextlib.contextmanager
    def building(self, tenant: str, *, limit: int | None) -> Iterator[None]:
        """Count one image build inside the block. Raises OverQuota."""
        self.require_build(tenant, limit=limit)
        self._builds[tenant] += 1
        try:
            yield
        finally:
            _decrease(self._builds, tenant, 1)

    def require_build(self, tenant: str, *, limit: int | None) -> None:
        """Raise OverQuota when the tenant runs as many image builds as its plan allows."""
        if limit is not None and self._builds[tenant] >= limit:
            text = (
                f"{self._builds[tenant]} image builds of this tenant are running, and its plan "
                f"allows builds_at_once = {limit}"
            )
            raise OverQuota(
                f"{text}: wait for one to end",
                retry_after_s=BUILD_RETRY_S,
                quota="builds_at_once",
                of="tenant",
                limit=limit,
            )

    def builds(self, tenant: str) -> int:
        """Number of running image builds of the tenant."""
        return self._builds[tenant]

    def coming_bytes(self, tenant: str) -> int:
        """Bytes reserved by running uploads of the tenant."""
        return self._coming[tenant]

    def reserve(self, tenant: str, check: Callable[[int, int], Awaitable[None]]) -> Reservation:
        """Create the reservation of one upload of the tenant; `check(more_bytes, coming_bytes)`
        raises when they do not fit."""
        lock = self._locks.setdefault(tenant, asyncio.Lock())
        return Reservation(tenant, coming=self._coming, lock=lock, check=check)


class Reservation:
    """Bytes reserved for one upload. Owner: the request that receives it; `release` ends it."""

    def __init__(
        self,
        tenant: str,
        *,
        coming: Counter[str],
        lock: asyncio.Lock,
        check: Callable[[int, int], Awaitable[None]],
    ) -> None:
        self._tenant = tenant
        self._coming = coming
        self._lock = lock
        self._check = check
        self._bytes = 0

    async def grow(self, size_bytes: int) -> None:
        """Reserve `size_bytes` in total. Raises the errors of `check`, and then keeps the previous
        reservation."""
        if size_bytes <= self._bytes:
            return
        async with self._lock:  # recorded and reserved bytes must be read together
            more = size_bytes - self._bytes
            await self._check(more, self._coming[self._tenant])
            self._coming[self._tenant] += more
            self._bytes = size_bytes

    async def settle(self, record: Callable[[], Awaitable[None]]) -> None:
        """Record the upload; from then on its bytes count as stored, not as reserved."""
        async with self._lock:
            await record()
            self.release()

    def release(self) -> None:
        """Release the reservation. Idempotent."""
        _decrease(self._coming, self._tenant, self._bytes)
        self._bytes = 0


def _decrease(counts: Counter[str], name: str, by: int) -> None:
    counts[name] -= by
    if counts[name] <= 0:
        del counts[name]
