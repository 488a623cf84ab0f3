"""Waiting for killed processes in the background.

A process inside the GPU driver may be in an uninterruptible sleep, in which even SIGKILL is
delayed; a deadline must not wait for it."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process

CLOSE_S = 5.0
"""Timeout of `aclose`. Processes stuck in the kernel longer than that are reaped by init when we
have exited."""


class Reaper:
    """Waits for killed processes. Owner: one event loop, so there is no lock."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Reaper {len(self._waiting)} waiting>"

    def take(self, child: Process) -> None:
        """Wait for `child`, which has been killed, and discard its output."""
        task = asyncio.create_task(_finish(child), name=f"reap-{child.pid}")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def aclose(self) -> None:
        """Wait for them, up to CLOSE_S."""
        if self._waiting:
            _, stuck = await asyncio.wait(self._waiting, timeout=CLOSE_S)
            for task in stuck:
                task.cancel()


async def _finish(child: Process) -> None:
    if child.stdin is not None:
        child.stdin.close()
    await child.communicate()
