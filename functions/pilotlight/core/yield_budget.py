"""Turns of one event loop, for whoever reads what somebody else sends.

A read of what is in the buffer already does not suspend (asyncio.StreamReader), so a peer that
sends many small frames at once would have the loop for itself until they are all handled."""

from __future__ import annotations

import asyncio

_BUDGET_BYTES = 64 * 1024
_FRAME_BYTES = 1024
"""What handling a frame costs beside its length, in bytes that are parsed in the same time: some 10
µs."""


class YieldBudget:
    """Owner: the task that reads."""

    def __init__(self) -> None:
        self._left = _BUDGET_BYTES

    async def handled(self, frame: bytes) -> None:
        """To be awaited after each frame: every 64 frames or 64 KiB the others get their turn."""
        self._left -= _FRAME_BYTES + len(frame)
        if self._left <= 0:
            self._left = _BUDGET_BYTES
            await asyncio.sleep(0)
