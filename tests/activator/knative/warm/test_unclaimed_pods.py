"""Promoted pods that nobody has: who finds them, when they go, and who must not have them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from activator.knative.fleet import KnativeFleet
from activator.knative.leases.pod_leases import InMemoryPodLeases, PodLeaseTable
from activator.knative.warm.unclaimed_pods import (
    NO_DOCUMENT_S,
    ROUTELESS_S,
    Unclaimed,
    is_due,
)
from activator.routing.route_table import CallTarget
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.knative.warm.test_promotion import fleet_of, start
from tests.fakes.clock import ManualClock
from tests.fakes.routes import spec_of, target_of
from tests.fakes.small_cluster import World
from tests.fakes.warm_pool import WarmPod, WarmPool


def unclaimed(**changed: float | None) -> Unclaimed:
    """A promoted pod that serves, and became free just now."""
    return replace(Unclaimed(free_s=0.0, age_s=0.0, running=0), **changed)  # type: ignore[arg-type]


def test_when_a_promoted_pod_that_nobody_has_goes() -> None:
    target = target_of(spec_of(scaling=Scaling(scaledown_window_s=20)))
    startup_s = target.launch.startup_timeout_s
    assert not is_due(unclaimed(free_s=19), target)
    assert is_due(unclaimed(free_s=20), target)
    assert not is_due(unclaimed(free_s=99, running=1), target)  # its owner died, its call runs
    never_sent = unclaimed(free_s=9, running=None, is_warm=True)  # its owner died before
    assert not is_due(never_sent, target)
    assert is_due(replace(never_sent, free_s=10), target)
    assert not is_due(unclaimed(free_s=99, age_s=startup_s - 1, running=None), target)
    assert is_due(unclaimed(age_s=startup_s, running=None), target)
    assert is_due(replace(unclaimed(running=None), is_restarted=True), target)
    assert not is_due(unclaimed(free_s=ROUTELESS_S - 1), None)
    assert is_due(unclaimed(free_s=ROUTELESS_S), None)


def unclaimed_of(fleet: KnativeFleet, clock: ManualClock) -> ManualClock:
    """Let the test say what time it is for the loop that looks for them."""
    assert fleet.unclaimed is not None
    fleet.unclaimed.clock = clock
    return clock


async def _promoted_by_the_dead(
    world: World, pool: WarmPool, target: CallTarget, *, state: str = "serving"
) -> WarmPod:
    """A pod that an activator had promoted when it died."""
    (warm,) = await pool.add()
    if state != "warm":
        warm.documents.append({"launch": target.launch.to_json(), "secrets": {}})
    world.maker.claimed(warm.pod, target, "i-dead")
    await world.maker.boots(warm.pod)
    if state == "serving":
        await pool.serves(warm)
    return warm


@pytest.mark.parametrize("state", ["serving", "booting", "warm"])
async def test_a_pod_of_a_dead_activator_is_deleted_after_its_time(
    world: World, pool: WarmPool, state: str
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    clock = unclaimed_of(fleet, ManualClock())
    assert fleet.unclaimed is not None
    warm = await _promoted_by_the_dead(world, pool, target, state=state)
    await world.until(fleet.pods.promoted)
    clock.now = fleet.pods.promoted()[0].seen_at
    await fleet.unclaimed.poll_once()
    assert pool.deleted == []
    due_s = {"serving": target.spec.scaling.window_s, "warm": NO_DOCUMENT_S}
    clock.advance(due_s.get(state, target.launch.startup_timeout_s) - 0.5)
    await fleet.unclaimed.poll_once()
    assert pool.deleted == []
    clock.advance(1.0)
    await fleet.unclaimed.poll_once()
    await world.until(lambda: [one["uid"] for one in pool.deleted] == [warm.pod.uid])


async def test_a_pod_of_a_dead_activator_that_serves_is_the_next_starts(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    warm = await _promoted_by_the_dead(world, pool, target)
    await world.until(fleet.pods.promoted)
    assert (await start(fleet, target)).socket == f"tcp:{warm.pod.ip}:8080"
    assert world.wakes == []


async def test_one_activator_deletes_it_and_none_deletes_what_another_has(
    world: World, pool: WarmPool
) -> None:
    members = {"a-0", "a-1"}
    board, clock = PodLeaseTable(lambda: members), ManualClock()
    one, two = [
        await fleet_of(world, pool, member, InMemoryPodLeases(board, member=member))
        for member in ("a-0", "a-1")
    ]
    assert one.unclaimed is not None
    assert two.unclaimed is not None
    for fleet in (one, two):
        unclaimed_of(fleet, clock)
    target = world.target()
    await pool.add()
    info = await start(one, target)
    await world.until(two.pods.promoted)
    await two.unclaimed.poll_once()
    clock.advance(24 * 3600.0)
    await two.unclaimed.poll_once()
    assert pool.deleted == []
    members.discard("a-0")  # it dies: its claims are free, and its pod waits for the next start
    await two.unclaimed.poll_once()
    assert pool.deleted == []
    assert (await start(two, target, 1)).socket == info.socket


async def test_what_the_controller_does_not_delete_stays_free_and_is_found_again(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    clock = unclaimed_of(fleet, ManualClock())
    assert fleet.unclaimed is not None
    warm = await _promoted_by_the_dead(world, pool, target)
    await world.until(fleet.pods.promoted)
    await fleet.unclaimed.poll_once()
    clock.advance(24 * 3600.0)
    pool.status = 503
    await fleet.unclaimed.poll_once()
    assert (await start(fleet, target)).socket == f"tcp:{warm.pod.ip}:8080"


async def test_a_deleted_pod_is_nobodys_until_it_is_gone(world: World, pool: WarmPool) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    clock = unclaimed_of(fleet, ManualClock())
    assert fleet.unclaimed is not None
    await _promoted_by_the_dead(world, pool, target)
    await world.until(fleet.pods.promoted)
    await fleet.unclaimed.poll_once()
    clock.advance(24 * 3600.0)
    looking = asyncio.create_task(fleet.unclaimed.poll_once())
    await world.until(lambda: pool.deleted)
    starting = asyncio.create_task(start(fleet, target))
    await looking
    await world.woken.wait()
    await world.maker.up(target)
    assert (await starting).socket.endswith(":8012")
