"""Call threads: reuse, and interrupts that hit the job they were meant for and no other."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable

import pytest

from pilotlight.worker.http.execution_deadlines import ExecutionDeadlines
from pilotlight.worker.process.call_threads import CallThread, CallThreads, Outcome
from pilotlight.worker.user_code.user_errors import CallCancelled
from tests.snapshotter.cuda import virtual_time


async def run(thread: CallThread, function: Callable[[], object]) -> Outcome:
    return await thread.run(contextvars.copy_context(), function, (), {})


async def test_a_thread_is_reused() -> None:
    threads = CallThreads()
    first = threads.take()
    assert await run(first, lambda: 1) == (True, 1)
    threads.give_back(first)
    assert threads.take() is first
    assert threads.take() is not first


async def test_what_a_job_raises_is_its_outcome() -> None:
    ok, error = await run(CallThreads().take(), lambda: next(iter(())))
    assert not ok
    assert isinstance(error, StopIteration)


async def test_a_running_job_is_interrupted() -> None:
    thread, begun = CallThreads().take(), threading.Event()

    def spin() -> None:
        begun.set()
        while True:
            time.sleep(0)

    job = asyncio.ensure_future(run(thread, spin))
    await asyncio.to_thread(begun.wait)
    thread.interrupt()
    ok, error = await job
    assert (ok, type(error)) == (False, CallCancelled)
    assert await run(thread, lambda: 2) == (True, 2)


@pytest.mark.parametrize("work", [0, 10, 100, 1000])
async def test_an_interrupt_never_strikes_a_later_job(work: int) -> None:
    thread = CallThreads().take()
    for _ in range(200):
        job = asyncio.ensure_future(run(thread, lambda: sum(range(work))))
        await asyncio.sleep(0)
        thread.interrupt()
        ok, value = await job
        assert value == sum(range(work)) if ok else isinstance(value, CallCancelled)
        assert await run(thread, lambda: sum(range(50))) == (True, 1225)


async def test_interrupting_an_idle_thread_does_nothing() -> None:
    thread = CallThreads().take()
    thread.interrupt()
    assert await run(thread, lambda: 3) == (True, 3)


class Timed:
    """Something with a clock."""

    def __init__(self) -> None:
        self.expires_at = 0.0
        self.expired = asyncio.Event()

    def expire(self) -> None:
        self.expired.set()


def test_deadlines_expire_in_any_order_and_not_when_forgotten() -> None:
    async def story() -> None:
        deadlines = ExecutionDeadlines()
        late, early, forgotten = Timed(), Timed(), Timed()
        deadlines.watch(late, seconds=0.02)
        deadlines.watch(forgotten, seconds=0.001)
        deadlines.watch(early, seconds=0.002)
        deadlines.forget(forgotten)
        await early.expired.wait()
        assert not late.expired.is_set()
        await late.expired.wait()
        assert not forgotten.expired.is_set()
        assert repr(deadlines) == "<ExecutionDeadlines watching=0>"

    virtual_time.run(story())
