"""Processes that were killed and are waited for behind the caller's back.

A process inside the GPU driver may sit in an uninterruptible sleep, where even SIGKILL waits: a
deadline cannot wait with it."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process

CLOSE_S = 5.0
"""How long `aclose` waits. What is stuck in the kernel longer than that is reaped by init once we
are gone."""


class Reaper:
    """Waits for killed processes. Owned by one event loop, so that there is no lock."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Reaper {len(self._waiting)} waiting>"

    def take(self, child: Process) -> None:
        """Wait for `child`, which has been killed, and drop what it still says."""
        task = asyncio.create_task(_finish(child), name=f"reap-{child.pid}")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def aclose(self) -> None:
        """Wait for them, within CLOSE_S."""
        if self._waiting:
            _, stuck = await asyncio.wait(self._waiting, timeout=CLOSE_S)
            for task in stuck:
                task.cancel()


async def _finish(child: Process) -> None:
    if child.stdin is not None:
        child.stdin.close()
    await child.communicate()
