"""When to look: again and again for as long as somebody waits, and once for all that happens in the
same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class PeriodicTimer:
    """Calls `look` every `every_s` seconds from `begin` on, until it answers False. Owner: the
    event loop."""

    __slots__ = ("_every_s", "_look", "_timer")

    def __init__(self, look: Callable[[], bool], *, every_s: float) -> None:
        self._look = look
        self._every_s = every_s
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<PeriodicTimer {'on' if self._timer is not None else 'off'}>"

    def begin(self) -> None:
        """Tick, unless it does."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._tick)

    def close(self) -> None:
        """No more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        if self._look():
            self.begin()


class Debouncer:
    """Calls `look` once, shortly after it was first asked to. Owner: the event loop."""

    __slots__ = ("_handle", "_look")

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._handle: asyncio.Handle | None = None

    def __repr__(self) -> str:
        return f"<Soon {'asked' if self._handle is not None else 'idle'}>"

    def ask(self, delay_s: float = 0.0) -> None:
        """Look after `delay_s`, unless it was asked before."""
        if self._handle is None:
            loop = asyncio.get_running_loop()
            self._handle = (
                loop.call_later(delay_s, self._now) if delay_s else loop.call_soon(self._now)
            )

    def close(self) -> None:
        """Do not look any more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _now(self) -> None:
        self._handle = None
        self._look()
