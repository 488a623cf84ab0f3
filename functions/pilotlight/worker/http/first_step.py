"""Starts a task whose first step is taken at once: a coroutine that does not suspend has ended when
`start_task` returns, without a turn of the event loop.

It is a task all the same: `asyncio.timeout`, `TaskGroup`, anyio and whatever keys state by
`asyncio.current_task()` need one, and each call its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

if sys.version_info >= (3, 12):

    def start_task(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start it in the running loop, in a copy of the current context."""
        loop = asyncio.get_running_loop()
        return asyncio.Task(coroutine, loop=loop, eager_start=True)

else:

    def start_task(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start it in the running loop, in a copy of the current context."""
        return asyncio.get_running_loop().create_task(coroutine)
