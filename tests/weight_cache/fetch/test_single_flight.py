"""Work that several wait for."""

from __future__ import annotations

import asyncio

import pytest

from weight_cache.fetch.read_scheduler import PriorityOf
from weight_cache.fetch.single_flight import SingleFlight
from weight_cache.types import ReadPriority


@pytest.mark.timeout(30)
async def test_who_joins_in_the_moment_between_the_end_of_a_flight_and_its_landing_begins_another() -> (
    None
):
    flights, ended = SingleFlight[int](), asyncio.Event()

    async def work(_: PriorityOf) -> int:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return 1

    async def second() -> int:
        await ended.wait()
        return await flights.join("k", answer)

    async def answer(_: PriorityOf) -> int:
        return 2

    waiting = asyncio.create_task(second())
    first = asyncio.create_task(flights.join("k", work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    assert await waiting == 2
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len(flights) == 0


async def test_a_flight_is_as_urgent_as_its_most_urgent_passenger() -> None:
    changes: list[None] = []
    flights, go = SingleFlight[ReadPriority](lambda: changes.append(None)), asyncio.Event()
    lanes: list[ReadPriority] = []

    async def work(priority_of: PriorityOf) -> ReadPriority:
        lanes.append(priority_of())
        await go.wait()
        return priority_of()

    async def join(lane: ReadPriority) -> ReadPriority:
        return await flights.join("k", work, priority_of=lambda: lane)

    first = asyncio.create_task(join(ReadPriority.PREFETCH))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (lanes, len(changes)) == ([ReadPriority.PREFETCH], 1)
    hasty = asyncio.create_task(join(ReadPriority.START))
    await asyncio.sleep(0)
    assert len(changes) == 2
    hasty.cancel()
    await asyncio.wait([hasty])
    assert len(changes) == 3
    go.set()
    assert await first is ReadPriority.PREFETCH


async def test_nobody_left_ends_the_work_however_often_the_last_is_cancelled() -> None:
    flights, begun, cleaned = SingleFlight[None](), asyncio.Event(), asyncio.Event()

    async def work(_: PriorityOf) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned.set()

    asks = [asyncio.create_task(flights.join("k", work)) for _ in range(2)]
    await begun.wait()
    asks[0].cancel()
    await asyncio.wait([asks[0]])
    assert len(flights) == 1
    for _ in range(3):
        asks[1].cancel()
        await asyncio.sleep(0)
    await asyncio.wait([asks[1]])
    assert cleaned.is_set()
    assert len(flights) == 0
