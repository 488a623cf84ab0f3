"""Threads that step back, and work that is never left alone."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from pilotlight.core.threads import (
    NICENESS,
    BoundedThreads,
    LowPriorityThreads,
    cancel_and_wait,
    finish_in_thread,
    run_concurrently,
    wait_finished,
)


@pytest.fixture
def threads() -> Iterator[LowPriorityThreads]:
    pool = LowPriorityThreads(2)
    yield pool
    pool.close()


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_quiet_threads_are_nice_and_nobody_else_is(threads: LowPriorityThreads) -> None:
    before = niceness()
    assert await threads.run(niceness) == max(before, NICENESS)
    assert niceness() == before
    assert await finish_in_thread(niceness) == before


async def test_cancelled_caller_waits_for_the_work_however_often_it_is_cancelled(
    threads: LowPriorityThreads,
) -> None:
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(30)
        ended.set()

    caller = asyncio.create_task(threads.run(work))
    await asyncio.to_thread(begun.wait, 30)
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_work_that_can_end_early_is_told_of_the_cancellation_and_waited_for() -> None:
    pool = BoundedThreads(1, "test")
    begun, ended = threading.Event(), threading.Event()

    def work(stopped: threading.Event) -> None:
        begun.set()
        assert stopped.wait(30)
        ended.set()

    try:
        caller = asyncio.create_task(pool.run_until_cancelled(work))
        await asyncio.to_thread(begun.wait, 30)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert ended.is_set()
    finally:
        pool.close()


async def test_first_failure_ends_the_others_and_is_raised_when_they_have_ended() -> None:
    ended: list[str] = []

    async def slow(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async def fail() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await run_concurrently(
            [lambda: slow("a"), lambda: slow("b"), fail, lambda: slow("never")], at_once=3
        )
    assert sorted(ended) == ["a", "b"]


async def test_no_more_than_so_many_at_once_and_all_are_done() -> None:
    running, most, done = 0, 0, 0

    async def job() -> None:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        done += 1

    await run_concurrently((job for _ in range(10)), at_once=3)
    assert (most, done) == (3, 10)


async def test_cancelling_the_caller_cancels_what_runs() -> None:
    cancelled = 0

    async def job() -> None:
        nonlocal cancelled
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled += 1
            raise

    caller = asyncio.create_task(run_concurrently([job, job], at_once=5))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert cancelled == 2


async def test_nothing_to_settle_is_settled() -> None:
    await wait_finished([])


async def test_who_is_cancelled_while_a_task_ends_is_cancelled_and_the_task_has_ended() -> None:
    ended = asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    task = asyncio.create_task(slow_to_end())
    await asyncio.sleep(0)
    caller = asyncio.create_task(cancel_and_wait(task))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_what_a_cancelled_task_raised_is_raised_once_all_have_ended() -> None:
    async def fails() -> None:
        raise ValueError("a fault")

    failing, endless = asyncio.create_task(fails()), asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="a fault"):
        await cancel_and_wait(failing, endless)
    assert endless.cancelled()
    await cancel_and_wait(endless)  # its own cancellation is not a failure
