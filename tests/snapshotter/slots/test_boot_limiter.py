"""Boots take turns: so many at once, first come first served, and a slow one holds up nobody for
long."""

from __future__ import annotations

import asyncio
import time

import pytest

from snapshotter.slots.boot_limiter import BootLimiter, FairSemaphore, processors_are_busy
from snapshotter.types import TenantShare


async def test_no_more_than_so_many_at_once_and_in_their_order() -> None:
    places, inside, seen = BootLimiter(2), 0, list[tuple[int, int]]()

    async def boot(n: int) -> None:
        nonlocal inside
        async with places.acquire():
            inside += 1
            seen.append((n, inside))
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(boot(n) for n in range(9)))
    assert [n for n, _ in seen] == list(range(9))
    assert max(together for _, together in seen) == 2


async def test_who_comes_first_waits_for_nothing() -> None:
    async with asyncio.timeout(5), BootLimiter(1, hold_s=60).acquire() as waited_ms:
        assert waited_ms < 5000


async def test_a_slow_one_goes_on_without_its_place_and_gives_it_back_once() -> None:
    places, began = BootLimiter(1, hold_s=0.5), time.perf_counter()
    async with places.acquire(), places.acquire():
        assert time.perf_counter() - began >= 0.49
    places = BootLimiter(1, hold_s=60)
    async with places.acquire():
        pass
    async with asyncio.timeout(5), places.acquire():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), places.acquire():
                raise AssertionError("there is one place")


async def test_who_stops_waiting_takes_no_place() -> None:
    places = BootLimiter(1)
    async with places.acquire():
        waiting = asyncio.create_task(places.acquire().__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(5), places.acquire():
        pass


def share_of(tenant: str, weight: int = 1) -> TenantShare:
    return TenantShare(tenant=tenant, name=tenant, weight=weight)


async def order_of(shares: list[TenantShare]) -> list[str]:
    """Whose turn came when, at one place that was taken until all waited."""
    turns, served = FairSemaphore(1), list[str]()
    await turns.acquire(share_of("before"))

    async def one(share: TenantShare) -> None:
        await turns.acquire(share)
        served.append(share.tenant)
        turns.release()

    waiting = [asyncio.create_task(one(share)) for share in shares]
    await asyncio.sleep(0)
    turns.release()
    await asyncio.gather(*waiting)
    assert (turns.free, repr(turns)) == (1, "<FairSemaphore 1 free, 0 of 0 tenants wait>")
    return served


async def test_a_storm_of_one_tenant_leaves_the_next_turn_to_another() -> None:
    assert (await order_of([share_of("storm")] * 100 + [share_of("small")]))[:2] == [
        "storm",
        "small",
    ]


async def test_a_turn_is_as_long_as_its_weight() -> None:
    served = await order_of([share_of("heavy", 3)] * 9 + [share_of("light")] * 9)
    assert "".join(name[0] for name in served[:12]) == "hhhlhhhlhhhl"


async def test_places_of_who_stopped_waiting_go_to_others_at_every_point() -> None:
    turns = FairSemaphore(1)
    await turns.acquire(share_of("a"))
    waiting = [asyncio.create_task(turns.acquire(share_of(name))) for name in "abc"]
    await asyncio.sleep(0)
    waiting[1].cancel()  # while it waits
    turns.release()
    waiting[0].cancel()  # in the moment in which it got its place
    await asyncio.wait(waiting, timeout=10)

    assert [task.cancelled() for task in waiting] == [True, True, False]
    turns.release()
    assert turns.free == 1


async def test_boots_take_turns_by_tenant() -> None:
    places, seen = BootLimiter(1), list[str]()

    async def boot(tenant: str) -> None:
        async with places.acquire(share_of(tenant)):
            seen.append(tenant)
            await asyncio.sleep(0)

    await asyncio.gather(*(boot(name) for name in ("storm", "storm", "storm", "small")))
    assert seen == ["storm", "storm", "small", "storm"]


async def test_a_slow_one_keeps_its_place_while_the_processors_are_busy_but_not_for_ever() -> None:
    looks: list[bool] = []

    def is_busy() -> bool:
        looks.append(len(looks) < 3)
        return looks[-1]

    async with BootLimiter(1, hold_s=0.01, is_busy=is_busy).acquire():
        async with asyncio.timeout(10):
            while len(looks) < 4:
                await asyncio.sleep(0.001)
    places, began = (
        BootLimiter(1, hold_s=0.01, most_s=0.05, is_busy=lambda: True),
        time.perf_counter(),
    )
    async with places.acquire(), asyncio.timeout(10), places.acquire():
        assert time.perf_counter() - began >= 0.045


def test_whether_processors_are_busy_can_be_said_of_this_machine() -> None:
    assert isinstance(processors_are_busy(), bool)
