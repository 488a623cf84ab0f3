"""The controller's threads, shared out: requests of one tenant hold a few of them at once, the
others wait for their turn.

The framework runs routes in threads of one pool. A tenant whose requests are slow would hold all of
them, and keep every other tenant, and the platform's own processes, waiting. Keys are looked up in
threads apart, so that nobody's key waits behind requests that are slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

OF_TENANT = 8
"""Threads of one tenant at once, a fifth of the pool (40, anyio's default)."""
LOOKING_UP_KEYS = 8
"""Threads that look up keys: a query by an index each."""
_T = TypeVar("_T")
_P = ParamSpec("_P")


class TenantThreads:
    """The shares of all tenants that have requests. Owner: the event loop."""

    def __init__(self, of_tenant: int = OF_TENANT) -> None:
        self._of_tenant = of_tenant
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._keys = anyio.CapacityLimiter(LOOKING_UP_KEYS)

    def __repr__(self) -> str:
        return f"<TenantThreads {len(self._shares)} tenants>"

    def share(self, tenant: str) -> asyncio.Semaphore:
        """The tenant's threads; `async with` takes one, and waits while all are taken: first come,
        first served."""
        found = self._shares.get(tenant)
        if found is None:
            found = self._shares[tenant] = asyncio.Semaphore(self._of_tenant)
        return found

    async def run(
        self, tenant: str, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """What `work` returns, in one of the tenant's threads."""
        async with self.share(tenant):
            return await anyio.to_thread.run_sync(partial(work, *args, **kwargs))

    async def look_up(self, look: Callable[[], _T]) -> _T:
        """What `look` finds of a key, in a thread that no slow request holds."""
        return await anyio.to_thread.run_sync(look, limiter=self._keys)
