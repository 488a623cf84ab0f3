"""Bursts from zero of one revision: how many warm pods are promoted, and what the starts get."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from activator.knative.fleet import KnativeFleet
from activator.knative.forks import pod_forks as forks_module
from activator.knative.forks.pod_forks import PodForks
from activator.knative.leases.pod_leases import InMemoryPodLeases, PodLeaseTable
from activator.knative.warm.waiting_starts import Promotions
from activator.routing.route_table import CallTarget
from pilotlight.spec.function import Resources
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.warm_shape import WarmShape
from snapshotter.types import InstanceId, InstanceInfo, StartKind
from tests.fakes.small_cluster import World
from tests.fakes.warm_pool import WarmPod, WarmPool

BURST = 8
MEMORY_BYTES = 128 << 20
"""Of the function."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks_module, "EARLY_RETRY_S", 0.005)


def target_in(world: World, *, snapshot: bool = True) -> CallTarget:
    """A function for bursts."""
    resources = Resources(memory_bytes=MEMORY_BYTES)
    scaling = Scaling(max_inputs=1, max_instances=64)
    return world.target(snapshot=snapshot, scaling=scaling, resources=resources)


async def fleet_of(
    world: World,
    pool: WarmPool,
    *,
    room: int,
    member: str = "a-0",
    claims: InMemoryPodLeases | None = None,
    patience_s: float = 30.0,
) -> KnativeFleet:
    """An activator's fleet, and warm pods of a shape that holds so many instances."""
    shape = WarmShape(name="small", cpu=8, memory_bytes=room * MEMORY_BYTES, max_pods=BURST)
    promotions = Promotions(
        source=pool.source(member),
        has_calls=lambda _: True,
        patience_s=patience_s,
        forks=PodForks(shapes=[shape]),
    )
    fleet = await world.fleet(member, claims, promotions=promotions)
    await fleet.adopt()
    return fleet


async def pods_in(pool: WarmPool, count: int, *, room: int) -> list[WarmPod]:
    """Warm pods in which so many instances fit."""
    pods = await pool.add(count)
    for warm in pods:
        warm.room = room
    return pods


def burst(
    fleet: KnativeFleet, target: CallTarget, *, first: int = 0
) -> list[asyncio.Task[InstanceInfo]]:
    """Starts at once, as a throttler asks for them."""
    return [
        asyncio.create_task(fleet.start(target, InstanceId(f"i-{number:016x}"), {}))
        for number in range(first, first + BURST)
    ]


def promoted(infos: list[InstanceInfo]) -> list[int]:
    """How many instances each pod has, most first."""
    pods = Counter(info.socket.rpartition(":")[0] for info in infos)
    return sorted(pods.values(), reverse=True)


async def test_a_burst_that_fits_into_one_pod_promotes_one_and_forks_the_others_in_it(
    world: World, pool: WarmPool
) -> None:
    target, fleet = target_in(world), await fleet_of(world, pool, room=BURST)
    await pods_in(pool, BURST, room=BURST)
    writes = world.server.requests.writes()
    infos = await asyncio.gather(*burst(fleet, target))
    assert len(pool.asked) == 1
    assert promoted(infos) == [BURST]
    assert Counter(info.start_kind for info in infos) == {
        StartKind.RESTORE: 1,
        StartKind.FORK: BURST - 1,
    }
    assert len({info.socket for info in infos}) == BURST
    assert world.server.requests.writes() == writes  # the controller's claim is the only one
    assert world.wakes == []


async def test_a_burst_promotes_as_many_pods_as_its_memory_needs(
    world: World, pool: WarmPool
) -> None:
    target, fleet = target_in(world), await fleet_of(world, pool, room=3)
    await pods_in(pool, BURST, room=3)
    infos = await asyncio.gather(*burst(fleet, target))
    assert len(pool.asked) == 3
    assert promoted(infos) == [3, 3, 2]
    assert world.wakes == []


async def test_a_function_that_cannot_be_forked_gets_a_pod_for_each_start(
    world: World, pool: WarmPool
) -> None:
    target, fleet = target_in(world, snapshot=False), await fleet_of(world, pool, room=BURST)
    await pods_in(pool, BURST, room=1)
    infos = await asyncio.gather(*burst(fleet, target))
    assert len(pool.asked) == BURST
    assert promoted(infos) == [1] * BURST


async def test_where_a_pod_has_no_template_the_others_are_promoted_then_and_later_at_once(
    world: World, pool: WarmPool
) -> None:
    target, fleet = target_in(world), await fleet_of(world, pool, room=BURST)
    pods = await pods_in(pool, 2 * BURST, room=1)  # its worker has threads, which nobody declared
    infos = await asyncio.gather(*burst(fleet, target))
    assert len(pool.asked) == BURST
    assert promoted(infos) == [1] * BURST
    for warm in pods[BURST:]:
        warm.is_slow = True
    starts = burst(fleet, target, first=BURST)
    await world.until(lambda: len(pool.asked) == 2 * BURST)  # before any of them serves
    for warm in pods[BURST:]:
        await world.until(lambda warm=warm: warm.documents)
        await pool.serves(warm)
    assert promoted(await asyncio.gather(*starts)) == [1] * BURST


async def test_a_pod_that_ends_before_it_serves_is_followed_by_another(
    world: World, pool: WarmPool
) -> None:
    target, fleet = target_in(world), await fleet_of(world, pool, room=BURST)
    first, second = await pods_in(pool, 2, room=BURST)
    first.is_slow = True
    starts = burst(fleet, target)
    await world.until(lambda: first.documents and fleet.pods.of(target.key))
    assert len(pool.asked) == 1
    await world.maker.gone(first.pod)  # its node was lost
    infos = await asyncio.gather(*starts)
    assert promoted(infos) == [BURST]
    assert {info.socket.split(":")[1] for info in infos} == {second.pod.ip}
    assert len(pool.asked) == 2
    assert world.wakes == []


async def test_a_refused_fork_that_comes_too_early_is_asked_for_again_at_once(
    world: World, pool: WarmPool
) -> None:
    target, fleet = target_in(world), await fleet_of(world, pool, room=BURST)
    (warm,) = await pods_in(pool, 1, room=BURST)
    warm.early = 3
    infos = await asyncio.gather(*burst(fleet, target))
    assert promoted(infos) == [BURST]
    assert warm.early == 0
    assert world.wakes == []


async def test_starts_that_were_given_up_try_no_second_pod(world: World, pool: WarmPool) -> None:
    target, fleet = target_in(world), await fleet_of(world, pool, room=BURST)
    refusing, _ = await pods_in(pool, 2, room=BURST)
    refusing.refuses, refusing.takes_time = 409, asyncio.Event()
    starts = burst(fleet, target)
    await world.until(lambda: pool.asked)
    for start in starts:
        start.cancel()
    await asyncio.gather(*starts, return_exceptions=True)
    refusing.takes_time.set()
    await world.until(lambda: [body["uid"] for body in pool.deleted] == [refusing.pod.uid])
    await fleet.starts.aclose()
    assert len(pool.asked) == 1


async def test_a_pod_that_was_promoted_in_vain_serves_the_next_burst(
    world: World, pool: WarmPool
) -> None:
    target, fleet = target_in(world), await fleet_of(world, pool, room=BURST)
    warm, _ = await pods_in(pool, 2, room=BURST)
    warm.is_slow = True
    starts = burst(fleet, target)
    await world.until(lambda: warm.documents)
    for start in starts:
        start.cancel()
    await asyncio.gather(*starts, return_exceptions=True)
    starts = burst(fleet, target, first=BURST)
    await world.until(lambda: fleet.starts.promised(target.key) == BURST)
    await pool.serves(warm)
    assert promoted(await asyncio.gather(*starts)) == [BURST]
    assert len(pool.asked) == 1


async def test_a_pod_that_another_activator_has_is_not_waited_for(
    world: World, pool: WarmPool
) -> None:
    board = PodLeaseTable(lambda: {"a-0", "a-1"})
    one, two = [
        await fleet_of(
            world,
            pool,
            room=BURST,
            member=member,
            claims=InMemoryPodLeases(board, member=member),
        )
        for member in ("a-0", "a-1")
    ]
    target = target_in(world)
    await pods_in(pool, 2, room=BURST)
    infos = await asyncio.gather(*burst(one, target))
    others = await asyncio.gather(*burst(two, target, first=BURST))
    assert promoted([*infos, *others]) == [BURST, BURST]
    assert [body["member"] for body in pool.asked] == ["a-0", "a-1"]


async def test_starts_that_waited_for_long_request_pods_of_their_own_and_take_what_comes_first(
    world: World, pool: WarmPool
) -> None:
    target, fleet = target_in(world), await fleet_of(world, pool, room=BURST, patience_s=0.2)
    world.waiting = BURST
    (warm,) = await pods_in(pool, 1, room=BURST)
    warm.is_slow = True
    starts = burst(fleet, target)
    await world.woken.wait()
    own = await world.maker.up(target)
    first, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
    assert {start.result().socket for start in first} == {f"tcp:{own.ip}:8012"}
    await pool.serves(warm)
    assert promoted(await asyncio.gather(*starts)) == [BURST - 1, 1]
