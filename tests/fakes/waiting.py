"""Waiting for what another task, thread or process does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(
    condition: Callable[[], object], *, timeout_s: float = 30.0, poll_s: float = 0.005
) -> None:
    """Let the loop turn until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(poll_s)


def wait_until(
    condition: Callable[[], object], *, timeout_s: float = 30.0, poll_s: float = 0.02
) -> None:
    """The same in a thread without a loop. Raises TimeoutError."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError
        time.sleep(poll_s)
