"""Work that several wait for."""

from __future__ import annotations

import asyncio

import pytest

from weight_cache.flights import Flights
from weight_cache.lanes import LaneOf


@pytest.mark.timeout(5)
async def test_who_joins_in_the_moment_between_the_end_of_a_flight_and_its_landing_begins_another() -> None:
    flights, ended = Flights[int](), asyncio.Event()

    async def work(_: LaneOf) -> int:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return 1

    async def second() -> int:
        await ended.wait()
        return await flights.join("k", answer)

    async def answer(_: LaneOf) -> int:
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
