"""Events to everybody who watches. A watcher that does not keep up is cut off, so that it asks for
the state again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from snapshotter.types import AgentEvent

_MAX_WAITING = 10_000


class WatcherTooSlow(Exception):
    """Raised in a watcher that left _MAX_WAITING events unread."""


class Watcher:
    """One watcher's queue. Owner: the event loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[AgentEvent] = asyncio.Queue(_MAX_WAITING)
        self._overflowed = False

    async def next(self) -> AgentEvent:
        """The next event. Raises WatcherTooSlow."""
        if self._overflowed:
            raise WatcherTooSlow(
                f"{_MAX_WAITING} events were not read: watch again, and ask for the state first"
            )
        return await self._queue.get()

    def put_nowait(self, event: AgentEvent) -> None:
        """Queue one event, or mark the watcher as lost."""
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            self._overflowed = True


class Events:
    """The hub. Owner: the event loop."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()

    def __repr__(self) -> str:
        return f"<Events {len(self._watchers)} watchers>"

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watcher]:
        """A watcher that sees every event while the context lasts."""
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def publish(self, event: AgentEvent) -> None:
        """Tell everybody."""
        for watcher in self._watchers:
            watcher.put_nowait(event)
