"""Threads with low priority, and helpers that never leave a thread running with resources that its
caller is about to close.

Niceness is relative to the threads of one scheduling group. If the kernel groups by session
(sched(7), "The autogroup feature"), it orders only threads of this process; the process lowers the
priority of its group at startup."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

NICENESS = 10
"""Niceness of threads that hash and write: about a tenth of the weight of a serving process
(sched(7)), and all of the idle time."""

P = ParamSpec("P")
T = TypeVar("T")


class BoundedThreads:
    """A small thread pool for one kind of work, so that a lot of it does not delay other work."""

    def __init__(
        self, count: int, name: str, *, initializer: Callable[[], None] | None = None
    ) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, name, initializer=initializer)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work`, which runs to its end even if the caller is cancelled."""
        return await _finish(
            asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args, **kwargs))
        )

    async def run_until_cancelled(self, work: Callable[[threading.Event], T]) -> T:
        """As `run`, for work that receives an event and raises soon after it is set on
        cancellation."""
        stopped = threading.Event()
        return await _finish(
            asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(stopped)),
            on_cancel=stopped.set,
        )

    def close(self) -> None:
        """Stop the threads after waiting for running work."""
        self._pool.shutdown(cancel_futures=True)


class LowPriorityThreads(BoundedThreads):
    """Threads at nice 10: on Linux niceness is an attribute of the thread (setpriority(2),
    notes)."""

    def __init__(self, count: int | None = None) -> None:
        # two more, since some wait for the disk
        count = count if count is not None else (os.cpu_count() or 1) + 2
        super().__init__(count, "quiet", initializer=_lower_priority)


async def finish_in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run in a thread, to the end even if cancelled: a thread cannot be stopped, and it uses
    resources that its caller is about to close."""
    return await _finish(asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs)))


async def wait_finished(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all of `tasks` have ended, even if the caller is cancelled, repeatedly; then raise
    the cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while any(not task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as e:
            cancelled = e
    if cancelled is not None:
        raise cancelled


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel `tasks` and wait until all have ended. Raises errors of a task, but not its
    cancellation; propagates the caller's own cancellation.

    `with suppress(CancelledError): await task` would swallow the caller's, too: a loop cancelled
    there would never end."""
    for task in tasks:
        task.cancel()
    await wait_finished(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def run_concurrently(
    jobs: Iterable[Callable[[], Coroutine[Any, Any, None]]], *, at_once: int
) -> None:
    """Run all `jobs`, at most `at_once` concurrently. The first failure cancels the others, and is
    raised when they have ended."""
    running: set[asyncio.Task[None]] = set()
    try:
        for job in jobs:
            running.add(asyncio.create_task(job()))
            if len(running) >= at_once:
                running = await _wait_first_completed(running)
        while running:
            running = await _wait_first_completed(running)
    finally:
        for task in running:
            task.cancel()
        await wait_finished(running)
        for task in running:
            if not task.cancelled():
                task.exception()  # mark as retrieved: only the first failure is raised


async def _wait_first_completed(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    done, pending = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    failed = [task for task in done if task.cancelled() or task.exception() is not None]
    if failed:
        failed[0].result()
    return pending


async def _finish(job: asyncio.Future[T], *, on_cancel: Callable[[], None] = lambda: None) -> T:
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        on_cancel()
        await wait_finished([job])
        if not job.cancelled():
            job.exception()  # mark as retrieved: a cancelled caller does not receive it
        raise


def _lower_priority() -> None:
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
