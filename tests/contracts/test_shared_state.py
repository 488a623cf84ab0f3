"""What several activators may rely on, held to by the board of the tests and by a real Redis
alike."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import cast

import pytest
import redis
import redis.asyncio

from activator.coordination.redis_state import RedisState, address_of
from activator.coordination.state import (
    InstanceDemand,
    SharedState,
    SharedStateUnreachable,
    share_of,
)
from tests.fakes.clock import ManualClock
from tests.fakes.redis_server import MortalRedis, scripts_run
from tests.fakes.shared_board import Board, BoardState

KEY = "f-shop-hello@v1"
TTL_S = 30.0
"""Time to live of a member that a test lets die."""


class Store:
    """Makes members of one platform, and lets time pass."""

    def __init__(
        self, make: Callable[[str, float], SharedState], elapse: Callable[[float], Awaitable[None]]
    ) -> None:
        self._make = make
        self._elapse = elapse

    async def member(self, name: str, ttl_s: float = 15.0) -> SharedState:
        """A member that has joined and stated its holdings."""
        state = self._make(name, ttl_s)
        await state.join()
        await state.beat()
        return state

    async def pass_s(self, seconds: float) -> None:
        """Time goes by for the store."""
        await self._elapse(seconds)


@pytest.fixture(name="store", params=["board", "redis"])
async def _store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    async with AsyncExitStack() as closing:
        if request.param == "board":
            clock = ManualClock()
            board = Board(clock)

            async def advance(seconds: float) -> None:
                clock.advance(seconds)

            yield Store(lambda name, ttl_s: BoardState(board, member=name, ttl_s=ttl_s), advance)
        else:
            url = request.getfixturevalue("redis_url")
            platform = uuid.uuid4().hex[:8]

            def make(name: str, ttl_s: float) -> SharedState:
                state = RedisState(url, platform=platform, member=name, ttl_s=ttl_s)
                closing.push_async_callback(state.aclose)
                return state

            async with redis.asyncio.Redis.from_url(url, decode_responses=True) as raw:
                yield Store(
                    make,
                    lambda seconds: _passed(
                        raw, f"pilotlight:{{{platform}}}:", int(seconds * 1000)
                    ),
                )


async def _passed(raw: redis.asyncio.Redis, prefix: str, ms: int) -> None:
    """Redis keeps the time itself: whatever is noted there lies further back by so much."""
    for key in [key async for key in raw.scan_iter(f"{prefix}*")]:
        if await raw.type(key) == "zset":
            times = cast("list[tuple[str, float]]", await raw.zrange(key, 0, -1, withscores=True))
            await raw.zadd(key, {member: at - ms for member, at in times})
        if (left := await raw.pttl(key)) > 0:
            await raw.pexpire(key, left - ms)


async def test_members_come_and_go(store: Store) -> None:
    one = await store.member("a-0")
    two = await store.member("a-1")
    pulse = await one.beat()
    assert pulse is not None
    assert pulse.members == {"a-0", "a-1"} == one.members()

    await two.leave()
    pulse = await one.beat()
    assert pulse is not None
    assert pulse.members == {"a-0"}


async def test_all_members_together_never_hold_more_than_the_limit(store: Store) -> None:
    members = [await store.member(f"a-{n}") for n in range(4)]

    granted = await asyncio.gather(
        *(m.acquire_instances(KEY, 1, 5) for m, _ in itertools.product(members, range(3)))
    )

    assert sum(granted) == 5
    assert sum(m.statistics().allowance.get(KEY, 0) for m in members) == 5


async def test_a_grant_may_be_less_than_what_was_wanted_and_is_counted_for_each_revision_alone(
    store: Store,
) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    assert await one.acquire_instances(KEY, 3, 4) == 3
    assert await two.acquire_instances(KEY, 3, 4) == 1
    assert await two.acquire_instances("f-other@v1", 3, 4) == 3


async def test_what_is_given_back_is_there_for_the_others(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    await one.acquire_instances(KEY, 2, 2)
    assert await two.acquire_instances(KEY, 1, 2) == 0

    one.release(KEY)
    await one.beat()

    assert await two.acquire_instances(KEY, 1, 2) == 1
    assert await one.acquire_instances(KEY, 1, 2) == 0


async def test_instances_that_were_adopted_count_without_being_asked_for(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    one.record_held(KEY, 2)
    await one.beat()
    assert await two.acquire_instances(KEY, 2, 3) == 1


async def test_the_allowance_of_a_member_that_died_is_free(store: Store) -> None:
    dead = await store.member("a-0", ttl_s=TTL_S)
    two = await store.member("a-1", ttl_s=2 * TTL_S)
    assert await dead.acquire_instances(KEY, 2, 2) == 2
    assert await two.acquire_instances(KEY, 1, 2) == 0

    await store.pass_s(TTL_S + 1)

    assert await two.acquire_instances(KEY, 1, 2) == 1
    pulse = await two.beat()
    assert pulse is not None
    assert pulse.members == {"a-1"}


async def test_a_member_that_comes_back_in_time_finds_its_allowance_kept(store: Store) -> None:
    before = await store.member("a-0")
    two = await store.member("a-1")
    await before.acquire_instances(KEY, 2, 2)
    await before.beat()

    again = store._make("a-0", 15.0)
    # it has not stated its holdings yet: it is looking which instances are its own
    await again.join()
    assert await two.acquire_instances(KEY, 1, 2) == 0
    again.record_held(KEY)
    await again.beat()

    assert await two.acquire_instances(KEY, 1, 2) == 1


async def test_a_member_that_was_forgotten_is_one_again_when_it_asks(store: Store) -> None:
    one = await store.member("a-0", ttl_s=TTL_S)
    await store.pass_s(TTL_S + 1)
    assert await one.acquire_instances(KEY, 1, 1) == 1
    assert one.members() == {"a-0"}


async def test_holders_learn_who_wants_and_who_starves(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    await one.acquire_instances(KEY, 2, 3)
    await two.acquire_instances(KEY, 1, 3)
    assert await two.acquire_instances(KEY, 1, 3) == 0  # it has its share of 1 already
    pulse = await one.beat()
    assert pulse is not None
    assert pulse.wants == {KEY: InstanceDemand(wanting=1, starving=0)}

    two.release(KEY)
    await two.beat()
    await one.acquire_instances(KEY, 1, 3)
    await two.acquire_instances(KEY, 1, 3)
    pulse = await one.beat()
    assert pulse is not None
    assert pulse.wants == {KEY: InstanceDemand(wanting=1, starving=1)}


async def test_who_got_what_it_wanted_is_not_counted_as_wanting(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    await one.acquire_instances(KEY, 2, 2)
    await two.acquire_instances(KEY, 1, 2)
    one.release(KEY)
    await one.beat()
    await two.acquire_instances(KEY, 1, 2)
    pulse = await one.beat()
    assert pulse is not None
    assert pulse.wants == {}


async def test_a_stranger_has_one_bucket_wherever_it_knocks(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    began = time.monotonic()
    waits = [await m.stranger_wait_s("10.0.0.1", rate_per_s=0.1, burst=2) for m in (one, two, one)]
    took_s = time.monotonic() - began  # meanwhile the bucket fills
    assert waits[:2] == [0.0, 0.0]
    assert 9.5 - took_s <= waits[2] <= 10.5
    assert await two.stranger_wait_s("10.0.0.2", rate_per_s=0.1, burst=2) == 0.0


def test_what_all_provide_together_is_dealt_out_and_adds_up() -> None:
    members = frozenset({"a-0", "a-1", "a-2"})
    assert [share_of(4, member, members) for member in sorted(members)] == [2, 1, 1]
    assert share_of(1, "a-0", frozenset()) == 1


def test_an_address_never_carries_the_password() -> None:
    assert address_of("redis://user:secret@db.example:7000/3") == "db.example:7000"
    assert address_of("unix:///run/r.sock?password=secret") == "/run/r.sock"


async def test_a_redis_that_is_not_there_is_named_without_its_password() -> None:
    state = RedisState("redis://:secret@127.0.0.1:1/0", platform="t", member="a-0")
    with pytest.raises(SharedStateUnreachable, match=r"127\.0\.0\.1:1") as refused:
        await state.join()
    assert "secret" not in str(refused.value)
    await state.aclose()


async def test_without_redis_a_member_keeps_what_it_has_and_may_replace_it_but_gets_nothing_more(
    mortal_redis: MortalRedis,
) -> None:
    url = mortal_redis.url
    clock = ManualClock()
    state = RedisState(url, platform="t", member="a-0", clock=clock)
    await state.join()
    await state.beat()
    assert await state.acquire_instances(KEY, 2, 4) == 2
    mortal_redis.kill()

    assert await state.acquire_instances(KEY, 1, 4) == 0
    state.release(KEY)
    assert await state.acquire_instances(KEY, 1, 4) == 1
    assert not state.statistics().is_reachable
    assert await state.beat() is None
    state.release(KEY)
    clock.advance(60.0)  # the others do not count on us any more
    assert await state.acquire_instances(KEY, 1, 4) == 0
    await state.aclose()


async def test_a_verb_is_one_quick_round_trip(redis_url: str) -> None:
    state = RedisState(redis_url, platform="t", member="a-0")
    await state.join()
    await state.beat()
    before = scripts_run(redis_url)
    for _ in range(20):
        await state.acquire_instances(KEY, 1, 100)
    assert 20 <= scripts_run(redis_url) - before <= 21  # the first one may load its script
    await state.leave()
    await state.aclose()
