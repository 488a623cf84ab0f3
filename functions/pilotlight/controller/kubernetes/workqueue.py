"""A work queue in which each key occurs once and is never processed twice at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections.abc import Callable, Iterable


class WorkQueue:
    """Keys with the time at which they are due. Owner: one event loop; all methods except `take`
    are synchronous, so no lock is needed.

    A key that is added while it is processed becomes due again afterwards. The number of functions
    and namespaces bounds the size."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[str, float] = {}
        self._order: list[tuple[float, int, str]] = []
        self._count = 0
        self._running: set[str] = set()
        self._again: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._added = asyncio.Event()

    def __repr__(self) -> str:
        return f"<WorkQueue {len(self._due)} waiting, {len(self._running)} running>"

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being processed and nothing is due now."""
        now = self._clock()
        return not self._running and not any(at <= now for at in self._due.values())

    def add(self, key: str, *, after_s: float = 0.0) -> None:
        """Enqueue `key` in `after_s`; an earlier due time stays."""
        at = self._clock() + after_s
        if key in self._running:
            self._again[key] = min(at, self._again.get(key, at))
            return
        if self._due.get(key, at + 1) <= at:
            return
        self._due[key] = at
        self._count += 1
        heapq.heappush(self._order, (at, self._count, key))
        self._added.set()

    def add_all(self, keys: Iterable[str]) -> None:
        """Enqueue all of these now."""
        for key in keys:
            self.add(key)

    async def take(self) -> str:
        """Wait for the next key that is due; the caller must call `done` or `failed`."""
        while True:
            wait_s = self._next_in_s()
            if wait_s is not None and wait_s <= 0:
                _, _, key = heapq.heappop(self._order)
                del self._due[key]
                self._running.add(key)
                return key
            self._added.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._added.wait()

    def done(self, key: str, *, again_s: float | None = None) -> None:
        """Mark `key` as reconciled; it is due again in `again_s`, if given."""
        self._failures.pop(key, None)
        self._finish(key, again_s)

    def failed(self, key: str, *, first_s: float, most_s: float, at_least_s: float = 0.0) -> float:
        """Mark `key` as failed: due again after a pause that doubles with each failure. Returns the
        pause in seconds."""
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        pause_s = max(at_least_s, min(most_s, first_s * 2.0 ** min(count, 30)))
        self._finish(key, pause_s)
        return pause_s

    def _finish(self, key: str, again_s: float | None) -> None:
        self._running.discard(key)
        wanted_at = self._again.pop(key, None)
        if wanted_at is not None:
            self.add(key, after_s=max(0.0, wanted_at - self._clock()))
        if again_s is not None:
            self.add(key, after_s=again_s)

    def _next_in_s(self) -> float | None:
        """Return seconds until the next key is due; None if there is none. Drops entries that an
        earlier one replaced."""
        while self._order and self._due.get(self._order[0][2]) != self._order[0][0]:
            heapq.heappop(self._order)
        return self._order[0][0] - self._clock() if self._order else None
