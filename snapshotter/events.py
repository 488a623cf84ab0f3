"""Event broadcast to all watchers. A watcher that falls behind is disconnected, so that it fetches
the state again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from snapshotter.types import AgentEvent

_MAX_WAITING = 10_000


class WatcherTooSlow(Exception):
    """Raised in a watcher that left more than _MAX_WAITING events unread."""


class Watcher:
    """One watcher's queue. Owner: the event loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[AgentEvent] = asyncio.Queue(_MAX_WAITING)
        self._overflowed = False

    async def next(self) -> AgentEvent:
        """The next event. Raises WatcherTooSlow."""
        if self._overflowed:
            raise WatcherTooSlow(
                f"{_MAX_WAITING} events were not read in time: fetch the state, then watch again"
            )
        return await self._queue.get()

    def put_nowait(self, event: AgentEvent) -> None:
        """Queue one event, or mark the watcher as overflowed."""
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            self._overflowed = True


class Events:
    """Broadcasts events to watchers. Owner: the event loop."""

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
        """Queue the event for every watcher."""
        for watcher in self._watchers:
            watcher.put_nowait(event)
