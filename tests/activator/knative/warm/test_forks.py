"""Further instances in promoted pods: forked, stopped, lost, adopted; and pods that are kept for
their Template."""

from __future__ import annotations

import asyncio

import pytest

from activator.knative.fleet import KnativeFleet
from activator.knative.forks import fork_loop as loop_module
from activator.knative.forks import pod_forks as forks_module
from activator.knative.forks.launcher_client import PodReport
from activator.knative.forks.pod_forks import PodForks
from activator.knative.leases.pod_leases import InMemoryPodLeases, PodLeaseTable
from activator.knative.warm import unclaimed_pods as unclaimed_module
from activator.knative.warm.waiting_starts import Promotions
from activator.routing.route_table import CallTarget
from snapshotter.types import AgentEvent, InstanceId, InstanceInfo, StartKind
from tests.fakes.clock import ManualClock
from tests.fakes.small_cluster import World
from tests.fakes.warm_pool import WarmPod, WarmPool

SECRETS = {"TOKEN": "s3cret"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "LOOK_S", 0.02)
    monkeypatch.setattr(unclaimed_module, "RELEASED_S", 0.0)
    monkeypatch.setattr(forks_module, "ENDING_S", 0.01)
    monkeypatch.setattr(forks_module, "REFUSED_S", 0.0)


async def fleet_of(
    world: World,
    pool: WarmPool,
    claims: InMemoryPodLeases | None = None,
    *,
    member: str = "a-0",
    forks: PodForks | None = None,
) -> KnativeFleet:
    promotions = Promotions(
        source=pool.source(member),
        has_calls=lambda _: True,
        patience_s=30.0,
        forks=forks or PodForks(),
    )
    fleet = await world.fleet(member, claims, promotions=promotions)
    await fleet.adopt()
    return fleet


async def start(fleet: KnativeFleet, target: CallTarget, number: int) -> InstanceInfo:
    return await fleet.start(target, InstanceId(f"i-{number:016x}"), SECRETS)


async def promoted(pool: WarmPool, room: int) -> WarmPod:
    (warm,) = await pool.add()
    warm.room = room
    return warm


async def event(fleet: KnativeFleet) -> AgentEvent:
    async with asyncio.timeout(20):
        async for found in fleet.watch():
            return found
    raise AssertionError("watches do not end")


async def test_starts_fork_in_a_promoted_pod_until_it_is_full(world: World, pool: WarmPool) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    warm = await promoted(pool, 3)
    first = await start(fleet, target, 1)
    more = await asyncio.gather(start(fleet, target, 2), start(fleet, target, 3))
    assert len(pool.asked) == 1
    assert first.socket == f"tcp:{warm.pod.ip}:8080"
    assert sorted(info.socket for info in more) == [
        f"tcp:{warm.pod.ip}:{port}" for port in (8081, 8082)
    ]
    assert {info.start_kind for info in more} == {StartKind.FORK}
    assert list(more[0].phases_ms) == ["pod", "fork", "wake"]
    assert [one["secrets"] for one in warm.forked] == [SECRETS, SECRETS]
    assert fleet.max_instances_of(target.key) == 3
    (instances, key) = fleet.claimed.by_uid()[warm.pod.uid]
    assert (set(instances), key) == ({first.id, *(info.id for info in more)}, target.key)

    other = await promoted(pool, 1)
    assert (await start(fleet, target, 4)).socket == f"tcp:{other.pod.ip}:8080"
    assert (await start(fleet, target, 2)).socket == more[0].socket, "the same start again"


async def test_a_stop_ends_one_instance_and_the_last_one_the_pod(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    warm = await promoted(pool, 2)
    one, two = [await start(fleet, target, number) for number in (1, 2)]
    await fleet.stop(one.id, grace_s=1.0)
    assert not warm.has_first
    assert list(warm.forks) == [8081]
    assert fleet.owned(warm.pod.uid) is not None
    again = await start(fleet, target, 3)
    assert again.socket == f"tcp:{warm.pod.ip}:8082"
    await fleet.stop(again.id, grace_s=1.0)
    await fleet.stop(two.id, grace_s=1.0)
    await world.until(lambda: [body["uid"] for body in pool.deleted] == [warm.pod.uid])
    found = await event(fleet)
    while found.kind == "instance_gone":
        found = await event(fleet)
    assert (found.kind, found.subject) == ("template_gone", target.key)


async def test_an_instance_that_is_killed_is_reported_and_the_others_serve_on(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    warm = await promoted(pool, 2)
    one, two = [await start(fleet, target, number) for number in (1, 2)]
    await warm.end(8080, status=137)
    found = await event(fleet)
    assert (found.kind, found.subject, found.reason) == ("instance_gone", one.id, "killed")
    assert fleet.claimed.by_uid()[warm.pod.uid][0] == (two.id,)
    assert (await start(fleet, target, 3)).start_kind is StartKind.FORK

    await world.maker.gone(warm.pod)
    ends = [await event(fleet), await event(fleet)]
    assert {one.subject for one in ends if one.kind == "instance_gone"} <= {
        two.id,
        "i-" + "3".zfill(16),
    }


async def test_after_a_restart_an_activator_has_all_instances_again(
    world: World, pool: WarmPool
) -> None:
    target = world.target()
    board = PodLeaseTable(lambda: ("a-0",))
    fleet = await fleet_of(world, pool, InMemoryPodLeases(board, member="a-0"))
    await promoted(pool, 3)
    before = [await start(fleet, target, number) for number in (1, 2, 3)]
    await fleet.stop(before[0].id, grace_s=1.0)

    again = await world.fleet(
        "a-0",
        InMemoryPodLeases(board, member="a-0"),
        promotions=Promotions(source=pool.source(), has_calls=lambda _: True, patience_s=30.0),
    )
    infos = await again.adopt()
    assert {(info.id, info.socket) for info in infos} == {
        (info.id, info.socket) for info in before[1:]
    }


async def test_what_the_former_owner_of_a_pod_left_in_it_is_stopped(
    world: World, pool: WarmPool
) -> None:
    target = world.target()
    living = ["a-0", "a-1"]
    board = PodLeaseTable(lambda: living)
    first = await fleet_of(world, pool, InMemoryPodLeases(board, member="a-0"))
    warm = await promoted(pool, 2)
    for number in (1, 2):
        await start(first, target, number)
    second = await fleet_of(world, pool, InMemoryPodLeases(board, member="a-1"), member="a-1")
    living.remove("a-0")
    info = await start(second, target, 3)
    assert info.socket == f"tcp:{warm.pod.ip}:8080"
    await world.until(lambda: not warm.forks)
    assert (await start(second, target, 4)).start_kind is StartKind.FORK


async def test_a_pod_is_kept_for_its_template_and_goes_first_when_there_is_no_other(
    world: World, pool: WarmPool
) -> None:
    clock = ManualClock()
    forks = PodForks(idle_templates=1, idle_s=60.0, clock=clock)
    target, other = world.target(), world.target("other")
    fleet = await fleet_of(world, pool, forks=forks)
    warm = await promoted(pool, 2)
    info = await start(fleet, target, 1)
    await world.until(lambda: has_template(fleet, warm))
    await fleet.stop(info.id, grace_s=1.0)
    assert fleet.claimed.by_uid()[warm.pod.uid] == ((), target.key)
    assert fleet.max_instances_of(target.key) == 0

    again = await start(fleet, target, 2)
    assert (again.start_kind, len(pool.asked)) == (StartKind.FORK, 1)
    await fleet.stop(again.id, grace_s=1.0)
    assert pool.deleted == []
    starting = asyncio.create_task(start(fleet, other, 3))
    await world.until(lambda: [body["uid"] for body in pool.deleted] == [warm.pod.uid])
    await world.maker.up(other)
    await starting


async def test_a_tenant_keeps_few_pods_for_their_templates_and_not_for_long(
    world: World, pool: WarmPool
) -> None:
    clock = ManualClock()
    forks = PodForks(idle_templates=1, idle_s=60.0, clock=clock)
    fleet = await fleet_of(world, pool, forks=forks)
    pods, infos = [], []
    for number, name in enumerate(("one", "two")):
        pods.append(await promoted(pool, 2))
        infos.append(await start(fleet, world.target(name), number))
    await world.until(lambda: all(has_template(fleet, warm) for warm in pods))
    for info in infos:
        await fleet.stop(info.id, grace_s=1.0)
    await world.until(lambda: [body["uid"] for body in pool.deleted] == [pods[1].pod.uid])
    clock.advance(61.0)
    await world.until(lambda: len(pool.deleted) == 2)


def has_template(fleet: KnativeFleet, warm: WarmPod) -> bool:
    owned = fleet.owned(warm.pod.uid)
    return owned is not None and owned.has_template


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{}",
        b'{"instances": [{"instance": "a", "port": 22, "state": "ready"}], "template": true}',
        b'{"instances": [5], "template": true}',
    ],
)
def test_what_a_pod_reports_is_checked(body: bytes) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        PodReport.parse(body)
