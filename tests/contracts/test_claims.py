"""What activators may rely on when they claim pods, held to by the board in one process and by a
real Redis alike."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import pytest
from redis.asyncio import Redis

from activator.coordination.redis_state import RedisState
from activator.knative.leases.pod_leases import (
    ClaimsUnreachable,
    InMemoryPodLeases,
    PodLease,
    PodLeaseStore,
    PodLeaseTable,
)
from activator.knative.leases.redis_pod_leases import RedisPodLeases

REVISION = "f-shop-hello@v1"
OTHER = "f-shop-other@v1"


class Store:
    """Members of one platform; `lapse` lets one fall silent, `rejoin` lets it speak again."""

    def __init__(
        self,
        make: Callable[[str], PodLeaseStore],
        join: Callable[[str], Awaitable[None]],
        lapse: Callable[[str], Awaitable[None]],
        owners: Callable[[], Awaitable[dict[str, str]]],
    ) -> None:
        self._make = make
        self.rejoin = join
        self.lapse = lapse
        self.owners = owners

    async def member(self, name: str) -> PodLeaseStore:
        """A member that counts."""
        await self.rejoin(name)
        return self._make(name)


@pytest.fixture(name="store", params=["process", "redis"])
async def _store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "process":
        living: set[str] = set()
        board = PodLeaseTable(lambda: living)

        async def join(name: str) -> None:
            living.add(name)

        async def lapse(name: str) -> None:
            living.discard(name)

        async def owners() -> dict[str, str]:
            return {life: member for life, (member, _) in board.owners.items()}

        yield Store(lambda name: InMemoryPodLeases(board, member=name), join, lapse, owners)
        return
    async with AsyncExitStack() as closing:
        yield _redis_store(request.getfixturevalue("redis_url"), closing)


def _redis_store(url: str, closing: AsyncExitStack) -> Store:
    platform = uuid.uuid4().hex[:8]
    raw = Redis.from_url(url, decode_responses=True)
    closing.push_async_callback(raw.aclose)
    members = f"pilotlight:{{{platform}}}:members"

    async def join(name: str) -> None:
        state = RedisState(url, platform=platform, member=name)
        await state.join()
        await state.beat()
        closing.push_async_callback(state.aclose)  # what follows of its life is the test's matter

    async def lapse(name: str) -> None:
        await raw.zadd(members, {name: 1})  # its time to live ended long ago

    async def owners() -> dict[str, str]:
        found: dict[str, str] = {}
        async for key in raw.scan_iter(f"pilotlight:{{{platform}}}:claims:*"):
            found |= {
                str(life): str(text).partition(" ")[0]
                for life, text in (await raw.hgetall(key)).items()
            }
        return found

    def make(name: str) -> PodLeaseStore:
        claims = RedisPodLeases(url, platform=platform, member=name)
        closing.push_async_callback(claims.aclose)
        return claims

    return Store(make, join, lapse, owners)


async def test_a_free_pod_is_ours_and_nobody_elses(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    assert await one.claim(REVISION, "i-1", ["p.0"], pods=1) == "p.0"
    assert await two.claim(REVISION, "i-2", ["p.0"], pods=1) is None


async def test_the_first_free_one_is_taken_in_the_order_asked(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    assert await one.claim(REVISION, "i-1", ["p.0", "q.0"], pods=2) == "p.0"
    assert await two.claim(REVISION, "i-2", ["p.0", "q.0"], pods=2) == "q.0"


async def test_two_starts_of_one_member_get_two_pods(store: Store) -> None:
    one = await store.member("a-0")
    got = [await one.claim(REVISION, f"i-{n}", ["p.0", "q.0"], pods=2) for n in range(3)]
    assert got == ["p.0", "q.0", None]


async def test_asked_again_for_the_same_instance_it_is_the_same_pod(store: Store) -> None:
    one = await store.member("a-0")
    assert await one.claim(REVISION, "i-1", ["p.0", "q.0"], pods=2) == "p.0"
    assert await one.claim(REVISION, "i-1", ["q.0", "p.0"], pods=2) == "p.0"


async def test_what_is_given_back_is_the_others_at_once(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    await one.claim(REVISION, "i-1", ["p.0"], pods=1)
    await one.release("p.0")
    await one.release("p.0")
    assert await two.claim(REVISION, "i-2", ["p.0"], pods=1) == "p.0"


async def test_nobody_gives_back_what_is_anothers(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    await one.claim(REVISION, "i-1", ["p.0"], pods=1)
    await two.release("p.0")
    assert await store.owners() == {"p.0": "a-0"}


async def test_another_life_of_a_pod_is_another_pod(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    await one.claim(REVISION, "i-1", ["p.0"], pods=1)
    assert await two.claim(REVISION, "i-2", ["p.1"], pods=1) == "p.1"


async def test_pods_of_a_member_that_fell_silent_are_free(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    await one.claim(REVISION, "i-1", ["p.0"], pods=1)
    await store.lapse("a-0")
    assert await two.claim(REVISION, "i-2", ["p.0"], pods=1) == "p.0"


async def test_who_comes_back_is_told_what_others_took(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    for n, life in enumerate(("p.0", "q.0")):
        await one.claim(REVISION, f"i-{n}", [life], pods=2)
    await store.lapse("a-0")
    await two.claim(REVISION, "i-9", ["p.0"], pods=2)
    await store.rejoin("a-0")

    assert await one.state() == {"p.0"}
    assert await store.owners() == {"p.0": "a-1", "q.0": "a-0"}
    assert await one.state() == frozenset()


async def test_a_members_next_life_finds_what_was_its_own(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    await one.claim(REVISION, "i-1", ["p.0"], pods=2)
    await one.claim(OTHER, "i-2", ["q.0"], pods=1)
    await one.claim(REVISION, "i-3", ["r.0"], pods=2)
    await one.release("r.0")
    await store.lapse("a-0")
    await two.claim(OTHER, "i-9", ["q.0"], pods=1)

    again = await store.member("a-0")

    assert await again.mine() == [PodLease(life="p.0", revision=REVISION, instance="i-1")]
    assert await again.state() == frozenset()


async def test_what_a_member_holds_without_knowing_is_free_with_its_next_beat(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    await one.claim(REVISION, "i-1", ["p.0"], pods=1)
    # the answer to its claim was lost, and the start that asked is over
    forgetful = await store.member("a-0")
    assert await two.claim(REVISION, "i-2", ["p.0"], pods=1) is None
    await forgetful.state()
    assert await two.claim(REVISION, "i-2", ["p.0"], pods=1) == "p.0"


async def test_a_store_that_lost_its_memory_learns_from_the_next_beat(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    await one.claim(REVISION, "i-1", ["p.0"], pods=1)
    await one.state()
    await one.state()
    assert await two.claim(REVISION, "i-2", ["p.0"], pods=1) is None


@pytest.mark.parametrize("seed", range(8))
async def test_never_two_owners_whatever_order_things_happen_in(store: Store, seed: int) -> None:
    """Members claim, give back, state, fall silent and come back, all at once. Who is told that a
    pod is its own is its only user for as long as it is a member: it stops using what `state` says
    it lost, which it asks before it goes on after a silence."""
    rng = random.Random(seed)
    names, lives = ["a-0", "a-1", "a-2"], [f"p{n}.0" for n in range(4)]
    members = {name: await store.member(name) for name in names}
    held: dict[str, set[str]] = {name: set() for name in names}
    silent: set[str] = set()

    async def claims(name: str, step: int) -> None:
        life = await members[name].claim(
            REVISION, f"i-{name}-{step}", rng.sample(lives, k=3), pods=len(lives)
        )
        if life is not None:
            users = [other for other in names if other not in silent and life in held[other]]
            assert users in ([], [name]), f"{life} is {users}'s, and {name} was given it"
            held[name].add(life)

    async def gives_back(name: str) -> None:
        if held[name]:
            life = rng.choice(sorted(held[name]))
            held[name].discard(life)
            await members[name].release(life)

    async def beats(name: str) -> None:
        held[name] -= await members[name].state()

    for step in range(60):
        name = rng.choice(names)
        deed = rng.random()
        if name in silent:
            if deed < 0.5:
                await store.rejoin(name)
                await beats(name)
                silent.discard(name)
        elif deed < 0.1 and len(silent) < 2:
            silent.add(name)
            await store.lapse(name)
        else:
            awake = [other for other in names if other not in silent]
            several = rng.sample(awake, k=min(2, len(awake)))
            work = [
                claims(one, step)
                if rng.random() < 0.6
                else gives_back(one)
                if rng.random() < 0.6
                else beats(one)
                for one in several
            ]
            await asyncio.gather(*work)

    for name in silent:
        await store.rejoin(name)
        await beats(name)
    owners = await store.owners()
    assert {life: name for name in names for life in held[name]} == owners
    assert sum(len(mine) for mine in held.values()) == len(owners)


async def test_claims_at_the_same_moment_have_one_winner(store: Store) -> None:
    members = [await store.member(f"a-{n}") for n in range(5)]
    got = await asyncio.gather(
        *(m.claim(REVISION, f"i-{n}", ["p.0", "q.0"], pods=2) for n, m in enumerate(members))
    )
    assert sorted(life for life in got if life is not None) == ["p.0", "q.0"]


# -- Redis alone -----------------------------------------------------------------------------------


async def test_who_finds_no_free_pod_is_heard_by_who_has_more_than_its_share(
    redis_url: str,
) -> None:
    platform = uuid.uuid4().hex[:8]
    async with AsyncExitStack() as closing:
        states, claims = [], []
        for name in ("a-0", "a-1"):
            states.append(state := RedisState(redis_url, platform=platform, member=name))
            claims.append(claim := RedisPodLeases(redis_url, platform=platform, member=name))
            closing.push_async_callback(state.aclose)
            closing.push_async_callback(claim.aclose)
            await state.join()
            await state.beat()
        for n in range(2):
            states[0].record_held(REVISION)
            await claims[0].claim(REVISION, f"i-{n}", [f"p{n}.0"], pods=2)

        # who only wants to end a pod, of which another is quicker, needs no room
        assert await claims[1].claim(REVISION, "end-p0", ["p0.0"], pods=0) is None
        pulse = await states[0].beat()
        assert pulse is not None
        assert not pulse.wants
        assert await claims[1].claim(REVISION, "i-9", ["p0.0", "p1.0"], pods=2) is None
        pulse = await states[0].beat()
        assert pulse is not None
        assert pulse.wants[REVISION].starving == 1

        await claims[0].release("p0.0")
        assert await claims[1].claim(REVISION, "i-9", ["p0.0", "p1.0"], pods=2) == "p0.0"
        pulse = await states[0].beat()
        assert pulse is not None
        assert REVISION not in pulse.wants


async def test_an_unreachable_store_claims_nothing_and_forgets_nothing() -> None:
    claims = RedisPodLeases("unix:///nowhere/r.sock", platform="p", member="a-0")
    with pytest.raises(ClaimsUnreachable, match=r"/nowhere/r\.sock"):
        await claims.claim(REVISION, "i-1", ["p.0"], pods=1)
    with pytest.raises(ClaimsUnreachable):
        await claims.state()
    with suppress(ClaimsUnreachable):
        await claims.release("p.0")
    await claims.aclose()


async def test_a_member_that_lapsed_is_granted_nothing_until_it_is_one_again(
    redis_url: str,
) -> None:
    platform = uuid.uuid4().hex[:8]
    claims = RedisPodLeases(redis_url, platform=platform, member="a-0")
    assert await claims.claim(REVISION, "i-1", ["p.0"], pods=1) is None
    state = RedisState(redis_url, platform=platform, member="a-0")
    await state.join()
    assert await claims.claim(REVISION, "i-1", ["p.0"], pods=1) == "p.0"
    await state.aclose()
    await claims.aclose()


async def test_what_no_member_has_is_told_without_a_claim(store: Store) -> None:
    one, two = await store.member("a-0"), await store.member("a-1")
    assert await one.claim(REVISION, "i-1", ["p.0"], pods=2) == "p.0"
    lives = ["p.0", "q.0"]
    assert await one.free(REVISION, lives) == await two.free(REVISION, lives) == {"q.0"}
    assert await two.free(REVISION, []) == frozenset()
    await store.lapse("a-0")  # it died: what it had is free
    assert await two.free(REVISION, lives) == {"p.0", "q.0"}
    assert "q.0" not in await store.owners()
