"""Which blobs and images are in use or being deleted now, and how many bytes are on their way in.

One controller process is at work at a time (`controller.lock`), so this is kept in its memory: what
a crash cuts off is gone with it. What a crash must not lose (that a deletion has begun) is in the
database."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from pilotlight.errors import OverQuota

BUILD_RETRY_S = 30.0
"""When a refused build is worth asking for again: most builds take from seconds to some minutes."""


def image_key(digest: str, tenant: str = "") -> str:
    """An image in the gate: no blob, which anybody may say to upload under the same digest. A
    tenant's own, or that of all tenants."""
    return f"image/{digest}/{tenant}"


class StorageReservations:
    """Blobs are named by their digests, images by `image_key`.

    Owner: the controller's event loop; everything changes between awaits only.
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
        """Keep `name` from being deleted for as long as the block lasts; waits for a deletion that
        has begun."""
        while (deletion := self._deleting.get(name)) is not None:
            await deletion.wait()
        self._using[name] += 1
        try:
            yield
        finally:
            _decrease(self._using, name, 1)

    @contextlib.contextmanager
    def deleting(self, name: str) -> Iterator[bool]:
        """Whether `name` may be deleted inside the block: nothing uses it, and nothing begins to
        until the block ends."""
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
        """Count one image build for as long as the block lasts. Raises OverQuota."""
        self.require_build(tenant, limit=limit)
        self._builds[tenant] += 1
        try:
            yield
        finally:
            _decrease(self._builds, tenant, 1)

    def require_build(self, tenant: str, *, limit: int | None) -> None:
        """Raise OverQuota when the tenant has as many image builds running as it may."""
        if limit is not None and self._builds[tenant] >= limit:
            text = (
                f"{self._builds[tenant]} image builds of this tenant run, and its plan allows "
                f"builds_at_once = {limit}"
            )
            raise OverQuota(
                f"{text}: wait for one to end",
                retry_after_s=BUILD_RETRY_S,
                quota="builds_at_once",
                of="tenant",
                limit=limit,
            )

    def builds(self, tenant: str) -> int:
        """Image builds of the tenant that run now."""
        return self._builds[tenant]

    def coming_bytes(self, tenant: str) -> int:
        """Bytes of the tenant's uploads that run now."""
        return self._coming[tenant]

    def reserve(self, tenant: str, check: Callable[[int, int], Awaitable[None]]) -> Reservation:
        """Room for one upload of the tenant; `check(more_bytes, coming_bytes)` raises when they do
        not fit."""
        lock = self._locks.setdefault(tenant, asyncio.Lock())
        return Reservation(tenant, coming=self._coming, lock=lock, check=check)


class Reservation:
    """Bytes that one upload may have. Owner: the request that receives it; `release` ends it."""

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
        """Reserve `size_bytes` in all. Raises what `check` raises; then what was reserved stays."""
        if size_bytes <= self._bytes:
            return
        async with self._lock:  # what is recorded and what is coming are looked at together
            more = size_bytes - self._bytes
            await self._check(more, self._coming[self._tenant])
            self._coming[self._tenant] += more
            self._bytes = size_bytes

    async def settle(self, record: Callable[[], Awaitable[None]]) -> None:
        """Record the upload, whose bytes count as stored from then on."""
        async with self._lock:
            await record()
            self.release()

    def release(self) -> None:
        """Give back what is reserved. Idempotent."""
        _decrease(self._coming, self._tenant, self._bytes)
        self._bytes = 0


def _decrease(counts: Counter[str], name: str, by: int) -> None:
    counts[name] -= by
    if counts[name] <= 0:
        del counts[name]
