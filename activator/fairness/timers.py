"""Timers for checks: repeated while needed, or once for several requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class PeriodicTimer:
    """Calls `callback` every `every_s` seconds after `begin`, until it returns False. Owner: the
    event loop."""

    __slots__ = ("_callback", "_every_s", "_timer")

    def __init__(self, callback: Callable[[], bool], *, every_s: float) -> None:
        self._callback = callback
        self._every_s = every_s
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<PeriodicTimer {'on' if self._timer is not None else 'off'}>"

    def begin(self) -> None:
        """Start the timer unless it runs."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._tick)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        if self._callback():
            self.begin()


class Debouncer:
    """Calls `callback` once for several requests, soon after the first. Owner: the event loop."""

    __slots__ = ("_callback", "_handle")

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback
        self._handle: asyncio.Handle | None = None

    def __repr__(self) -> str:
        return f"<Debouncer {'scheduled' if self._handle is not None else 'idle'}>"

    def schedule(self, delay_s: float = 0.0) -> None:
        """Schedule the call after `delay_s`, unless one is scheduled."""
        if self._handle is None:
            loop = asyncio.get_running_loop()
            self._handle = (
                loop.call_later(delay_s, self._now) if delay_s else loop.call_soon(self._now)
            )

    def close(self) -> None:
        """Cancel the scheduled call."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _now(self) -> None:
        self._handle = None
        self._callback()
