"""The queue: a key stands in it once, is never worked on twice at a time, and waits longer after
each failure."""

from __future__ import annotations

import asyncio

from pilotlight.controller.kubernetes.workqueue import WorkQueue
from tests.fakes.clock import ManualClock


async def test_a_key_stands_once_and_the_earlier_time_counts() -> None:
    clock = ManualClock(100.0)
    work = WorkQueue(clock=clock)
    work.add("a", after_s=5)
    work.add("a")
    work.add("a", after_s=3)
    assert await work.take() == "a"
    work.done("a")
    assert work.is_idle
    assert repr(work) == "<WorkQueue 0 waiting, 0 running>"


async def test_what_is_added_while_it_is_worked_on_is_due_again_afterwards() -> None:
    work = WorkQueue(clock=ManualClock(100.0))
    work.add("a")
    assert await work.take() == "a"
    work.add("a")
    waiting = asyncio.create_task(work.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    work.done("a")
    assert await waiting == "a"
    work.done("a")
    assert work.is_idle


async def test_the_earliest_goes_first_whatever_was_added_when() -> None:
    clock = ManualClock(100.0)
    work = WorkQueue(clock=clock)
    work.add("late", after_s=10)
    work.add("soon", after_s=1)
    work.add("now")
    clock.now += 20
    assert [await work.take() for _ in range(3)] == ["now", "soon", "late"]


async def test_pauses_double_up_to_a_bound_and_begin_anew_after_a_success() -> None:
    clock = ManualClock(100.0)
    work = WorkQueue(clock=clock)
    pauses = []
    for _ in range(5):
        work.add("a")
        clock.now += 1000
        await work.take()
        pauses.append(work.failed("a", first_s=1, most_s=5))
    assert pauses == [1, 2, 4, 5, 5]
    clock.now += 1000
    assert await work.take() == "a"
    work.done("a")
    work.add("a")
    await work.take()
    assert work.failed("a", first_s=1, most_s=5) == 1


async def test_a_pause_that_was_asked_for_is_kept() -> None:
    work = WorkQueue(clock=ManualClock(100.0))
    work.add("a")
    await work.take()
    assert work.failed("a", first_s=1, most_s=5, at_least_s=3) == 3


async def test_one_that_is_done_may_be_due_again_by_itself() -> None:
    clock = ManualClock(100.0)
    work = WorkQueue(clock=clock)
    work.add("a")
    await work.take()
    work.done("a", again_s=600)
    assert work.is_idle
    clock.now += 601
    assert not work.is_idle
    assert await work.take() == "a"


async def test_whoever_waits_for_nothing_is_woken_by_the_first_key() -> None:
    work = WorkQueue(clock=ManualClock(100.0))
    waiting = asyncio.create_task(work.take())
    await asyncio.sleep(0)
    work.add_all(["a"])
    assert await waiting == "a"
