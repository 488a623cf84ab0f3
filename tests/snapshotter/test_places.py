"""Boots take turns: so many at once, first come first served, and a slow one holds up nobody for long."""

from __future__ import annotations

import asyncio

import pytest

from snapshotter.places import Places


async def test_no_more_than_so_many_at_once_and_in_their_order() -> None:
    places, inside, seen = Places(2), 0, list[tuple[int, int]]()

    async def boot(n: int) -> None:
        nonlocal inside
        async with places.one():
            inside += 1
            seen.append((n, inside))
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(boot(n) for n in range(9)))
    assert [n for n, _ in seen] == list(range(9))
    assert max(together for _, together in seen) == 2


async def test_who_comes_first_waits_for_nothing() -> None:
    async with Places(1).one() as waited_ms:
        assert waited_ms < 100


async def test_a_slow_one_goes_on_without_its_place_and_gives_it_back_once() -> None:
    places = Places(1, hold_s=0.01)
    async with places.one(), places.one() as waited_ms:
        assert waited_ms >= 9
    places = Places(1, hold_s=60)
    async with places.one():
        pass
    async with asyncio.timeout(5), places.one():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), places.one():
                raise AssertionError("there is one place")


async def test_who_stops_waiting_takes_no_place() -> None:
    places = Places(1)
    async with places.one():
        waiting = asyncio.create_task(places.one().__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(5), places.one():
        pass
