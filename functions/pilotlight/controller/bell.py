"""Wakes the followers of the feed the moment a change is committed."""

from __future__ import annotations

import asyncio


class Bell:
    """Rung from any thread, heard on one loop.

    Owner: the event loop that made it; `_event` is replaced on that loop only, so no lock is
    needed. A listener takes `next_ring()` *before* it reads, so that a ring between its reading and
    its waiting is not lost."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self.closed = False

    def __repr__(self) -> str:
        return f"<Bell {'closed' if self.closed else 'open'}>"

    def ring(self) -> None:
        """Wake everybody who waits; callable from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """Wake everybody, for the last time: the process is shutting down."""
        self.closed = True
        self._wake()

    def next_ring(self) -> asyncio.Event:
        """What is set at the next ring."""
        return self._event

    def _wake(self) -> None:
        self._event.set()
        if not self.closed:
            self._event = asyncio.Event()
