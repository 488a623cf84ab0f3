"""Time that passes when the test says so."""

from __future__ import annotations


class ManualClock:
    """Call it for the time in seconds; `advance` it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
