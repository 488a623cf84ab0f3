"""Fair sharing of an event loop by tasks that read frames from peers.

Reading buffered data does not suspend (asyncio.StreamReader), so a peer that sends many small
frames at once would block the loop until all of them are handled."""

from __future__ import annotations

import asyncio

_BUDGET_BYTES = 64 * 1024
_FRAME_BYTES = 1024
"""Fixed cost of handling a frame, in bytes parsed in the same time: about 10 µs."""


class YieldBudget:
    """Yields to other tasks after a number of frames. Owner: the task that reads."""

    def __init__(self) -> None:
        self._left = _BUDGET_BYTES

    async def handled(self, frame: bytes) -> None:
        """Call after each frame: yields every 64 frames or 64 KiB."""
        self._left -= _FRAME_BYTES + len(frame)
        if self._left <= 0:
            self._left = _BUDGET_BYTES
            await asyncio.sleep(0)
