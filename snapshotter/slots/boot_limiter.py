"""Limits concurrent boots and restores: more than the processors can run would delay all of them.

Tenants alternate by deficit round robin (Shreedhar & Varghese 1996): each turn grants as many boots
as the tenant's weight, first in first out within a tenant. Any number of cold starts of one tenant
delay those of another by at most one turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final, Self

from snapshotter.types import TenantShare

PER_PROCESSOR: Final = 2
"""One boot reads its files while another one computes."""
HOLD_S: Final = 2.0
"""A boot that takes longer, for example because it waits for I/O, continues without a permit and
blocks others no further."""
MOST_S: Final = 20.0
"""How long a slower boot keeps its permit while all processors are busy: another boot would only
delay both."""
NO_SHARE: Final = TenantShare()
"""Share of background work without a caller: one tenant of weight 1."""


def _never() -> bool:
    return False


def processors_are_busy() -> bool:
    """Whether more threads are runnable now than the processors of this machine can serve (proc(5),
    /proc/loadavg, fourth field)."""
    try:
        running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
    except (OSError, IndexError):
        return False
    return running.isdigit() and int(running) > PER_PROCESSOR * (os.cpu_count() or 1)


class _Flow:
    """One tenant's waiters, and the rest of its turn."""

    __slots__ = ("credit", "waiters", "weight")

    def __init__(self, weight: int) -> None:
        self.waiters: deque[asyncio.Future[None]] = deque()
        self.weight = weight
        self.credit = weight


class FairSemaphore:
    """A semaphore of `count` permits, granted to tenants in turns. Owner: the event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._flows: OrderedDict[str, _Flow] = OrderedDict()

    def __repr__(self) -> str:
        waiting = sum(len(flow.waiters) for flow in self._flows.values())
        return f"<FairSemaphore {self._free} free, {waiting} of {len(self._flows)} tenants wait>"

    @property
    def free(self) -> int:
        """Number of free permits."""
        return self._free

    async def acquire(self, share: TenantShare) -> None:
        """Wait for a permit; return it by `release`."""
        if self._free:
            self._free -= 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        flow = self._flows.setdefault(share.tenant, _Flow(share.weight))
        flow.weight = share.weight
        flow.waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()  # the permit was granted at the same moment: return it
            raise

    def release(self) -> None:
        """Return a permit, and grant it to the next waiter in turn."""
        while self._flows:
            tenant, flow = next(iter(self._flows.items()))
            waiter = flow.waiters.popleft()
            is_waiting = not waiter.done()
            flow.credit -= is_waiting
            if not flow.waiters:
                del self._flows[tenant]
            elif flow.credit <= 0:
                flow.credit = flow.weight
                self._flows.move_to_end(tenant)
            if is_waiting:
                waiter.set_result(None)
                return
        self._free += 1


class BootLimiter:
    """Limits boots; permits expire. Owner: the event loop."""

    def __init__(
        self,
        count: int,
        *,
        hold_s: float = HOLD_S,
        most_s: float = MOST_S,
        is_busy: Callable[[], bool] = _never,
    ) -> None:
        """`is_busy`: whether the processors are overloaded; a permit is then held for up to
        `most_s`."""
        self._semaphore = FairSemaphore(count)
        self._hold_s = hold_s
        self._most_s = most_s
        self._is_busy = is_busy

    @classmethod
    def for_processors(cls) -> Self:
        """A limiter that suits the processors available to this process."""
        return cls(PER_PROCESSOR * len(os.sched_getaffinity(0)), is_busy=processors_are_busy)

    @contextlib.asynccontextmanager
    async def acquire(self, share: TenantShare = NO_SHARE) -> AsyncIterator[float]:
        """Hold a permit while the context lasts, or for about `hold_s`; yields the time waited for
        it, in ms."""
        began = time.perf_counter()
        await self._semaphore.acquire(share)
        with (
            contextlib.ExitStack() as place
        ):  # closed by the timer or the context, whichever is first
            place.callback(self._semaphore.release)
            self._arm(place, time.perf_counter() + self._most_s)
            yield (time.perf_counter() - began) * 1000

    def _arm(self, place: contextlib.ExitStack, until: float) -> None:
        timer = asyncio.get_running_loop().call_later(self._hold_s, self._check, place, until)
        place.callback(timer.cancel)

    def _check(self, place: contextlib.ExitStack, until: float) -> None:
        if self._is_busy() and time.perf_counter() < until:
            self._arm(place, until)
        else:
            place.close()
