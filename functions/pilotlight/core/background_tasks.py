"""Work that continues after the request that caused it: clearing a slot, measuring a Template."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """Named background tasks, referenced until done; failures are logged. Owner: the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<BackgroundTasks {sorted(t.get_name() for t in self._tasks)}>"

    def __len__(self) -> int:
        return len(self._tasks)

    def run(self, work: Coroutine[Any, Any, object], name: str) -> asyncio.Task[Any]:
        """Start `work` now."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def aclose(self) -> None:
        """Wait until all tasks are done, including tasks that they start."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancel the tasks and wait until they have ended."""
        await cancel_all(self._tasks)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background task failed name=%s", task.get_name(), exc_info=error)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended. Their results and errors are dropped."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def cancel_again(tasks: Iterable[asyncio.Task[Any]], *, after_s: float) -> None:
    """Log the cancelled tasks that are still running `after_s` seconds later, and cancel them
    again: a library may have swallowed the first cancellation."""
    _, running = await asyncio.wait(list(tasks), timeout=after_s)
    for task in running:
        _log.error("background loop did not stop after cancellation name=%s", task.get_name())
        task.cancel()
