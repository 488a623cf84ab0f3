"""A limit on the controller's threads per tenant: requests of one tenant use a few at once, further
ones wait.

The framework runs routes in threads of one pool. Without a limit, a tenant with slow requests would
use all of them and block every other tenant and the platform's own processes. Keys are looked up in
separate threads, so that no lookup waits behind slow requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

OF_TENANT = 8
"""Threads of one tenant at once; a fifth of the pool (40, anyio's default)."""
LOOKING_UP_KEYS = 8
"""Threads that look up keys; each runs one indexed query."""
_T = TypeVar("_T")
_P = ParamSpec("_P")


class TenantThreads:
    """The thread limits of all tenants that have requests. Owner: the event loop."""

    def __init__(self, of_tenant: int = OF_TENANT) -> None:
        self._of_tenant = of_tenant
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._keys = anyio.CapacityLimiter(LOOKING_UP_KEYS)

    def __repr__(self) -> str:
        return f"<TenantThreads {len(self._shares)} tenants>"

    def share(self, tenant: str) -> asyncio.Semaphore:
        """Return the tenant's semaphore; `async with` acquires one thread and waits in FIFO order
        while all are in use."""
        found = self._shares.get(tenant)
        if found is None:
            found = self._shares[tenant] = asyncio.Semaphore(self._of_tenant)
        return found

    async def run(
        self, tenant: str, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Run `work` in one of the tenant's threads and return its result."""
        async with self.share(tenant):
            return await anyio.to_thread.run_sync(partial(work, *args, **kwargs))

    async def look_up(self, look: Callable[[], _T]) -> _T:
        """Look up a key in a thread that no slow request uses."""
        return await anyio.to_thread.run_sync(look, limiter=self._keys)
