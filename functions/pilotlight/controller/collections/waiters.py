"""Requests that wait for a value of a queue.

A waiter holds no thread and no transaction. A put of values wakes as many waiters of that
partition, first come, first served; a waiter that leaves without having used its wake passes it
on."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

MAX_OF_TENANT = 32
"""Waiting requests of one tenant: a quarter of the connections that an activator gives it."""
MAX_WAITING = 128
"""Waiting requests of all tenants: half of an activator's connections to the controller."""

Place = tuple[str, str, str, str]
"""Tenant, environment, queue and partition."""


class QueueWaiters:
    """All waiting requests. Owner: the event loop."""

    def __init__(self, *, of_tenant: int = MAX_OF_TENANT, in_all: int = MAX_WAITING) -> None:
        self._of_tenant = of_tenant
        self._in_all = in_all
        self._places: dict[Place, deque[asyncio.Event]] = {}
        self._tenants: Counter[str] = Counter()
        self.is_closed = False

    def __repr__(self) -> str:
        return f"<QueueWaiters {self._tenants.total()} in {len(self._places)} partitions>"

    @contextmanager
    def waiting(self, place: Place) -> Iterator[asyncio.Event | None]:
        """Yield an event that is set when a value may be there; None: no more may wait, or the
        process is shutting down."""
        tenant = place[0]
        is_full = self._tenants[tenant] >= self._of_tenant
        if is_full or self._tenants.total() >= self._in_all or self.is_closed:
            yield None
            return
        event = asyncio.Event()
        queue = self._places.setdefault(place, deque())
        queue.append(event)
        self._tenants[tenant] += 1
        try:
            yield event
        finally:
            queue.remove(event)
            self._tenants -= Counter({tenant: 1})
            if not queue:
                del self._places[place]
            elif event.is_set():
                self.wake(place, 1)

    def wake(self, place: Place, number: int) -> None:
        """Wake as many waiters as values were put."""
        for event in self._places.get(place, ()):
            if number <= 0:
                break
            if not event.is_set():
                event.set()
                number -= 1

    def close(self) -> None:
        """Release all waiters: the process is shutting down."""
        self.is_closed = True
        for queue in self._places.values():
            for event in queue:
                event.set()
