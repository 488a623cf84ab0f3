"""Call threads: reuse, and interrupts that hit the job they were meant for and no other."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import cProfile
import functools
import sys
import threading
import time
from collections.abc import Callable

import pytest

from pilotlight.worker.http.execution_deadlines import ExecutionDeadlines
from pilotlight.worker.process.call_threads import CallThread, CallThreads, Job, Outcome
from pilotlight.worker.user_code.user_errors import CallCancelled
from tests.snapshotter.cuda import virtual_time


async def run(thread: CallThread, function: Callable[[], object]) -> Outcome:
    return await thread.run(contextvars.copy_context(), function, (), {})


async def test_a_thread_is_reused() -> None:
    threads = CallThreads()
    first = threads.acquire()
    assert await run(first, lambda: 1) == (True, 1)
    threads.release(first)
    assert threads.acquire() is first
    assert threads.acquire() is not first


async def test_what_a_job_raises_is_its_outcome() -> None:
    ok, error = await run(CallThreads().acquire(), lambda: next(iter(())))
    assert not ok
    assert isinstance(error, StopIteration)


def spin(begun: threading.Event) -> None:
    begun.set()
    while True:
        time.sleep(0)


async def interrupted(function: Callable[[threading.Event], object]) -> Outcome:
    """What becomes of a job that is interrupted once it has set its event."""
    thread, begun = CallThreads().acquire(), threading.Event()
    job = asyncio.ensure_future(run(thread, lambda: function(begun)))
    await asyncio.to_thread(begun.wait)
    thread.interrupt()
    outcome = await job
    assert await run(thread, lambda: 2) == (True, 2)
    return outcome


async def test_a_running_job_is_interrupted() -> None:
    ok, error = await interrupted(spin)
    assert (ok, type(error)) == (False, CallCancelled)


@pytest.mark.parametrize("when", ["ended", "blocked"])
async def test_functions_that_are_profiled_run_beside_and_after_an_interrupt(when: str) -> None:
    """An exception that is pending or was revoked kept a profiled thread from entering functions
    (CPython before 3.13)."""
    threads, begun, gate = CallThreads(), threading.Event(), threading.Event()
    first, second = threads.acquire(), threads.acquire()

    def block() -> None:
        begun.set()
        gate.wait()

    def answer() -> int:
        return 42

    job = asyncio.ensure_future(run(first, block))
    await asyncio.to_thread(begun.wait)
    first.interrupt()
    if when == "ended":
        gate.set()
        await job
    async with asyncio.timeout(20):
        ok, value = await run(second, lambda: cProfile.Profile().runcall(answer))
    assert (ok, value) == (True, 42)
    gate.set()
    ok, error = await job
    assert (ok, type(error)) == (False, CallCancelled)


async def test_an_interrupt_that_a_finalizer_loses_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: lost.append(raised.exc_type))

    class Closing:
        def __init__(self, begun: threading.Event) -> None:
            self.begun = begun

        def __del__(self) -> None:
            spin(self.begun)

    def leave(begun: threading.Event) -> None:
        Closing(begun)
        spin(begun)

    ok, error = await interrupted(leave)
    assert (ok, type(error), lost) == (False, CallCancelled, [CallCancelled])


async def test_an_interrupt_that_the_function_catches_and_forgets_is_sent_again() -> None:
    def forgetful(begun: threading.Event) -> None:
        with contextlib.suppress(BaseException):
            spin(begun)
        spin(begun)

    ok, error = await interrupted(forgetful)
    assert (ok, type(error)) == (False, CallCancelled)


async def test_what_a_function_does_at_its_end_is_not_interrupted_again() -> None:
    left: list[str] = []

    def tidy(begun: threading.Event) -> None:
        try:
            spin(begun)
        finally:
            try:
                raise ValueError
            except ValueError:
                until = time.monotonic() + 0.5  # the interrupt would be sent twice meanwhile
                while time.monotonic() < until:
                    time.sleep(0.01)
            left.append("tidy")

    ok, error = await interrupted(tidy)
    assert (ok, type(error), left) == (False, CallCancelled, ["tidy"])


@pytest.mark.parametrize("work", [0, 10, 100, 1000])
async def test_an_interrupt_never_strikes_a_later_job(work: int) -> None:
    thread = CallThreads().acquire()
    for _ in range(200):
        job = asyncio.ensure_future(run(thread, lambda: sum(range(work))))
        await asyncio.sleep(0)
        thread.interrupt()
        ok, value = await job
        assert value == sum(range(work)) if ok else isinstance(value, CallCancelled)
        assert await run(thread, lambda: sum(range(50))) == (True, 1225)


async def test_interrupting_an_idle_thread_does_nothing() -> None:
    thread = CallThreads().acquire()
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


class Started:
    """Jobs of the shared queue, and their outcomes in the order in which they came."""

    def __init__(self, threads: CallThreads) -> None:
        self.threads = threads
        self.outcomes: list[Outcome] = []
        self.all_done = asyncio.Event()
        self.open = 0

    def start(self, function: Callable[[], object]) -> Job:
        self.open += 1
        self.all_done.clear()
        context = contextvars.copy_context()
        return self.threads.start(context, function, (), {}, self.done)

    def done(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.open -= 1
        if not self.open:
            self.all_done.set()


async def test_calls_that_block_do_not_hold_each_other_up() -> None:
    started, barrier = Started(CallThreads()), threading.Barrier(8)
    for _ in range(8):
        started.start(lambda: barrier.wait(20))
    await started.all_done.wait()
    assert sorted(value for _, value in started.outcomes) == list(range(8))


async def test_calls_that_only_compute_are_done_by_threads_that_are_awake_already() -> None:
    started = Started(CallThreads())
    for _ in range(2):  # the first round makes a thread for each, as all might have blocked
        started.outcomes.clear()
        for _ in range(100):
            started.start(threading.get_ident)
        await started.all_done.wait()
    assert len({identity for _, identity in started.outcomes}) < 50


async def test_no_call_is_lost_between_threads_that_fall_asleep_and_threads_that_are_taken() -> (
    None
):
    threads = CallThreads()
    started = Started(threads)
    for round_number in range(300):
        for number in range(round_number % 4):
            started.start(functools.partial(time.sleep, 0.0001 * number))
        own = threads.acquire()
        assert await run(own, lambda: 7) == (True, 7)
        threads.release(own)
        if round_number % 3:
            await started.all_done.wait() if started.open else None
    while started.open:
        await started.all_done.wait()
    assert {ok for ok, _ in started.outcomes} == {True}
    assert len(started.outcomes) == sum(number % 4 for number in range(300))


async def test_a_call_that_was_stopped_while_it_waited_does_not_begin() -> None:
    threads, gate = CallThreads(), threading.Event()
    started, begun = Started(threads), []
    started.start(gate.wait)
    waiting = started.start(lambda: begun.append(1))
    waiting.interrupt()
    gate.set()
    await started.all_done.wait()
    assert [type(value) for ok, value in started.outcomes if not ok] in ([CallCancelled], [])
    assert len(begun) == sum(1 for ok, value in started.outcomes if ok and value is None)


@pytest.mark.parametrize("work", [0, 100, 1000])
async def test_an_interrupt_in_the_shared_queue_never_strikes_a_later_job(work: int) -> None:
    started = Started(CallThreads())
    for _ in range(200):
        job = started.start(lambda: sum(range(work)))
        started.start(lambda: sum(range(50)))
        await asyncio.sleep(0)
        job.interrupt()
        await started.all_done.wait()
        assert 1225 in [value for ok, value in started.outcomes[-2:] if ok]
