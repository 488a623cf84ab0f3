"""Notifies the followers of the feed when a change is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ChangeNotifier:
    """A notification that any thread can send and tasks of one event loop wait for.

    Owner: the event loop that created it. `_event` is replaced on that loop only, so no lock is
    needed. A listener calls `next_change()` *before* it reads, so that it does not miss a
    notification between its read and its wait. `at_close`: what else ends at `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self.closed = False
        self.at_close: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<ChangeNotifier {'closed' if self.closed else 'open'}>"

    def ring(self) -> None:
        """Wake all listeners. Safe from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """Wake all listeners for the last time: the process is shutting down."""
        self.closed = True
        self._wake()
        for release in self.at_close:
            release()

    def next_change(self) -> asyncio.Event:
        """Return the event that the next `ring` sets."""
        return self._event

    def _wake(self) -> None:
        self._event.set()
        if not self.closed:
            self._event = asyncio.Event()
