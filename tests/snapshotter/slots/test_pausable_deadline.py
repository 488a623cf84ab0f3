"""What bounds a rung stands still while it waits for what is no part of it."""

from __future__ import annotations

import asyncio

import pytest

from snapshotter.slots.boot_limiter import FairSemaphore
from snapshotter.slots.pausable_deadline import PausableDeadline, YieldableSlot
from tests.snapshotter.cuda import virtual_time


def test_deadline_stands_still() -> None:
    async def story() -> None:
        patience, arrival = PausableDeadline(), asyncio.Event()
        async with asyncio.timeout(20) as limit:
            with patience.bounded_by(limit):
                async with patience.paused():
                    assert limit.when() is None
                    asyncio.get_running_loop().call_later(40, arrival.set)
                    await arrival.wait()
        assert not limit.expired()

    virtual_time.run(story())


async def test_deadline_goes_on_where_it_was() -> None:
    patience = PausableDeadline()

    async def rung() -> None:
        async with asyncio.timeout(0.02) as limit:
            with patience.bounded_by(limit):
                async with patience.paused():
                    await asyncio.sleep(0)
                await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await rung()


async def test_deadline_that_has_passed_is_left_alone() -> None:
    patience = PausableDeadline()

    async def rung() -> None:
        async with asyncio.timeout(0) as limit:
            with patience.bounded_by(limit):
                try:
                    await asyncio.Event().wait()
                finally:
                    async with patience.paused():
                        pass

    with pytest.raises(TimeoutError):
        await rung()


async def test_turn_is_given_to_others_meanwhile() -> None:
    gate, patience, arrival, diary = (
        FairSemaphore(1),
        PausableDeadline(),
        asyncio.Event(),
        list[str](),
    )

    async def waits_for_weights() -> None:
        async with YieldableSlot(gate) as turn:
            with patience.bounded_by(turn=turn):
                async with patience.paused():
                    diary.append("waits")
                    await arrival.wait()
                diary.append("goes on")

    async def needs_none() -> None:
        async with YieldableSlot(gate):
            diary.append("other")
            arrival.set()
            await asyncio.sleep(0)
            diary.append("other done")

    async with asyncio.TaskGroup() as group:
        group.create_task(waits_for_weights())
        group.create_task(needs_none())
    assert diary == ["waits", "other", "other done", "goes on"]
    assert gate.free == 1


async def test_turn_that_is_cancelled_while_given_up_is_not_given_back_twice() -> None:
    gate, patience = FairSemaphore(1), PausableDeadline()

    async def waits() -> None:
        async with YieldableSlot(gate) as turn:
            with patience.bounded_by(turn=turn):
                async with patience.paused():
                    await asyncio.Event().wait()

    for _ in range(2):
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    async with YieldableSlot(gate):
        assert gate.free == 0
    assert gate.free == 1


async def test_bounds_end_with_their_context() -> None:
    patience = PausableDeadline()
    async with asyncio.timeout(10) as limit:
        with patience.bounded_by(limit):
            pass
        async with patience.paused():
            assert limit.when() is not None
