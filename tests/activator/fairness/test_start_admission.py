"""Starts over a small node: quotas of instances and GPUs, room in a fair order, reclaimed
instances, storms of cold starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from activator.balancing.instance import Reservation
from activator.balancing.rebalancing import IDLE_SURPLUS_S
from activator.balancing.throttler import Throttler
from activator.fairness.preemption import SPARE_S, TURN_S
from activator.fairness.queue_priority import QueuePriority
from activator.fairness.share_policy import share_of
from activator.fairness.start_admission import StartAdmission
from activator.routing.route_table import CallTarget, RouteTable
from pilotlight import errors
from pilotlight.protocol import FeedChange
from pilotlight.spec.function import Resources
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.pricing import Rates
from pilotlight.spec.quotas import Plan
from snapshotter.errors import NoCapacity
from snapshotter.starts.node_capacity import NodeCapacity
from snapshotter.types import StartKind
from tests.activator.scaled_world import ScaledWorld
from tests.activator.test_gateway import until
from tests.fakes.clock import ManualClock
from tests.fakes.fake_nvml import H100, L4
from tests.fakes.routes import TEST_KEY, change, route_of, spec_of
from tests.fakes.shared_board import Board, BoardState
from tests.fakes.small_node import SmallNode

MIB = 1024**2
SIZE = 100 * MIB


class World(ScaledWorld):
    """One activator's starts over a node of ten instances' size; its time is in the test's hand."""

    def __init__(
        self,
        directory: Path,
        *,
        clock: ManualClock | None = None,
        leases: BoardState | None = None,
    ) -> None:
        clock = clock or ManualClock()
        self.leases = leases
        table = RouteTable(
            {"test": Rates(version="test", gpu_s={"H100": Decimal(1), "L4": Decimal(1)})},
            TEST_KEY.secrets,
        )
        self.node = SmallNode(
            directory, NodeCapacity(memory_bytes=10 * SIZE), lambda tenant: share_of(table, tenant)
        )
        self.gate = StartAdmission(table, clock=clock, leases=leases)
        self.spent: set[str] = set()
        super().__init__(
            directory,
            fleet=self.node,
            table=table,
            clock=clock,
            gate=self.gate,
            may_run=lambda target: target.tenant not in self.spent,
        )

    def tenant(self, name: str, **plan: Any) -> None:
        """A tenant of this plan."""
        self._tell(
            "tenant",
            name,
            {
                "id": name,
                "name": name.upper(),
                "uid": None,
                "plan": Plan(name="p", **plan).to_json(),
                "suspended": False,
            },
        )

    def _tell(self, kind: str, key: str, value: Any) -> None:
        self.seq += 1
        assert self.table.apply(FeedChange(seq=self.seq, kind=kind, key=key, value=value))

    def function_quota(self, target: CallTarget, **quotas: int) -> None:
        """Quotas of one function."""
        self._tell("quota", target.name, quotas)

    def throttler(
        self,
        tenant: str,
        name: str = "hello",
        *,
        size: int = SIZE,
        scaling: Scaling | None = None,
        **more: Any,
    ) -> Throttler:
        """A deployed function's throttler."""
        self.seq += 1
        resources = more.pop("resources", None) or Resources(memory_bytes=size)
        spec = spec_of(
            name, scaling=scaling or Scaling(max_instances=100), resources=resources, **more
        )
        route = route_of(spec, app=f"app-{tenant}", tenant=tenant)
        self.table.apply(change(self.seq, route))
        (target,) = self.table.targets_of(f"{tenant}/main/app-{tenant}/{name}")
        return self.scaler.throttler_of(target)

    async def elapse(self, seconds: float) -> None:
        """Time goes by, and the gate looks again."""
        self.clock.advance(seconds)
        self.gate.instance_quota.dispatch_all()
        self.gate.capacity.retry()
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture(name="world")
async def _world(short_tmp: Path) -> AsyncIterator[World]:
    async with World.running(short_tmp) as world:
        yield world
    assert (repr(world.queue), any(world.gate.waiting)) == (
        "<GlobalQueue 0/1000 waiting>",
        False,
    )


Call = asyncio.Task[Reservation]


def calls(throttler: Throttler, count: int = 1, *, timeout_s: float = 30.0) -> list[Call]:
    return [asyncio.create_task(throttler.reserve(timeout_s)) for _ in range(count)]


async def held(throttler: Throttler, count: int) -> list[Reservation]:
    """That many slots, each an instance of its own."""
    return list(await asyncio.gather(*calls(throttler, count)))


async def end(tasks: list[Call]) -> None:
    """Whatever became of them."""
    for task in tasks:
        task.cancel()
    for done in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(done, Reservation):
            done.release()


# -- quotas of instances and GPUs ------------------------------------------------------------------
async def test_a_tenants_instances_are_counted_over_all_its_functions_starting_ones_included(
    world: World,
) -> None:
    world.tenant("a", instances=3)
    one, two = world.throttler("a", "one"), world.throttler("a", "two")
    world.node.gate.clear()
    tasks = calls(one, 2) + calls(two, 2)
    await until(lambda: world.gate.instance_quota.waiting == 1)

    assert (
        len(world.node.started),
        one.starting + two.starting,
        one.blocked_starts + two.blocked_starts,
    ) == (
        3,
        4,
        1,
    )
    assert world.gate.instance_quota.count("a") == (3, 0)
    assert world.scaler.states()["a", "app-a", "two", "starts_held_up"] == 1
    world.node.gate.set()
    await until(lambda: sum(task.done() for task in tasks) == 3)
    assert len(world.node.started) == 3
    await end(tasks)


async def test_an_idle_instance_of_another_function_gives_its_place_within_the_quota(
    world: World,
) -> None:
    world.tenant("a", instances=1)
    one, two = world.throttler("a", "one"), world.throttler("a", "two")
    (await one.reserve(5)).release()

    reservation = await two.reserve(5)

    assert (list(one.instances), list(two.instances)) == ([], [reservation.instance.id])
    (waiting,) = calls(one)
    await until(lambda: world.gate.instance_quota.waiting == 1)
    reservation.release()  # now it is idle, and somebody waits for its place
    (await waiting).release()
    assert list(two.instances) == []


async def test_functions_take_turns_where_the_quota_is_smaller_than_their_number(
    world: World,
) -> None:
    world.tenant("a", instances=1)
    one, two = world.throttler("a", "one"), world.throttler("a", "two")
    reservation = await one.reserve(5)
    more = calls(one, 3)
    (waiting,) = calls(two)
    await world.elapse(TURN_S / 2)
    assert not reservation.instance.is_draining
    await world.elapse(TURN_S)

    assert reservation.instance.is_draining, "it finishes its call and takes no more"
    reservation.release()
    (await waiting).release()
    await end(more)


async def test_where_waiting_is_no_use_the_call_is_429_with_the_quota(world: World) -> None:
    world.tenant("a", instances=0)
    with pytest.raises(errors.OverQuota) as e:
        await world.throttler("a").reserve(5)
    assert (e.value.detail, e.value.retry_after_s) == (
        {"quota": "instances", "of": "tenant", "limit": 0},
        2.0,
    )

    world.tenant("b", gpus=1)
    gpus = Resources(memory_bytes=SIZE, gpu=("H100",), gpu_count=2)
    (await world.throttler("b", "small").reserve(5)).release()
    with pytest.raises(errors.OverQuota) as e:
        await world.throttler("b", "large", resources=gpus).reserve(5)
    assert e.value.detail == {"quota": "gpus", "of": "tenant", "limit": 1}
    assert world.node.asked == ["b"]


async def test_gpus_are_counted_and_functions_without_them_do_not_wait_for_one(
    world: World,
) -> None:
    world.tenant("a", gpus=2)
    gpus = Resources(memory_bytes=SIZE, gpu=("H100",), gpu_count=2)
    one, two = (
        world.throttler("a", "one", resources=gpus),
        world.throttler("a", "two", resources=gpus),
    )
    reservation = await one.reserve(5)
    tasks = calls(two)
    await until(lambda: world.gate.instance_quota.waiting == 1)
    assert world.gate.instance_quota.count("a") == (1, 2)
    await end(calls(world.throttler("a", "plain")))

    reservation.release()
    (await tasks[0]).release()
    assert list(one.instances) == []


async def test_a_function_has_quotas_of_its_own(world: World) -> None:
    throttler, other = world.throttler("a"), world.throttler("a", "other")
    world.function_quota(throttler.target, instances=1)
    tasks = calls(throttler, 3)
    await until(lambda: any(task.done() for task in tasks))
    (await other.reserve(5)).release()
    await world.elapse(TURN_S)

    assert (len(throttler.instances), len(other.instances)) == (1, 1), (
        "nothing of another function is given up for it"
    )
    await end(tasks)


async def test_at_its_deadline_a_call_is_told_of_the_quota(world: World) -> None:
    world.tenant("a", instances=1)
    busy = await world.throttler("a", "one").reserve(5)
    with pytest.raises(errors.OverQuota, match="instances in use"):
        await world.throttler("a", "two").reserve(0.05)
    busy.release()


async def test_a_quota_that_grows_lets_starts_through(world: World) -> None:
    world.tenant("a", instances=1)
    tasks = calls(world.throttler("a"), 3)
    await until(lambda: world.gate.instance_quota.waiting == 2)
    world.tenant("a", instances=3)
    await world.elapse(1.0)
    await asyncio.gather(*tasks)
    assert world.gate.instance_quota.waiting == 0
    await end(tasks)


# -- room on the node ------------------------------------------------------------------------------
async def test_a_start_waits_for_room_and_gets_it_when_an_instance_ends(world: World) -> None:
    full = await held(world.throttler("a"), 10)
    (waiting,) = calls(world.throttler("a", "other"))
    await until(lambda: world.gate.capacity.waiting == 1)
    assert "1000 MiB of 1 tenants, 1 starts wait" in repr(world.gate)

    full[0].release()  # idle, and of the same tenant: given up at once
    (await waiting).release()
    assert world.node.claimed_bytes == 10 * SIZE
    for reservation in full[1:]:
        reservation.release()


async def test_idle_instances_of_a_tenant_over_its_share_go_first(world: World) -> None:
    a, b, c = (world.throttler(tenant) for tenant in "abc")
    first, second = await held(b, 3), await held(a, 7)
    for reservation in first + second:
        reservation.release()

    await end(await _done(calls(c, 2)))
    assert (len(a.instances), len(b.instances), len(c.instances)) == (5, 3, 2)


async def test_one_large_start_takes_no_more_of_a_revision_than_it_has_beyond_its_minimum(
    world: World,
) -> None:
    kept = world.throttler("kept", scaling=Scaling(min_instances=8, max_instances=100))
    large, fitting = (
        world.throttler("large", size=3 * SIZE),
        world.throttler("fitting", size=2 * SIZE),
    )
    for reservation in await held(kept, 10):
        reservation.release()

    tasks = calls(large)
    await asyncio.sleep(0)
    await world.elapse(SPARE_S)
    assert len(kept.instances) == 10
    await end(tasks)
    await end(await _done(calls(fitting)))
    assert len(kept.instances) == 8


async def _done(tasks: list[Call]) -> list[Call]:
    await asyncio.gather(*tasks)
    return tasks


async def test_a_tenant_over_its_share_leaves_the_fresh_idle_instances_of_others_alone(
    world: World,
) -> None:
    small, storm = world.throttler("small"), world.throttler("storm")
    (await small.reserve(5)).release()
    tasks = calls(storm, 30)
    await until(lambda: len(storm.instances) == 9)
    await world.elapse(SPARE_S / 2)
    assert len(small.instances) == 1

    await world.elapse(SPARE_S / 2)
    await until(lambda: len(storm.instances) == 10)
    assert len(small.instances) == 0, "by now nobody has called it for a while"
    await end(tasks)


async def test_a_tenant_within_its_share_gets_busy_instances_of_one_over_it_after_a_turn(
    world: World,
) -> None:
    storm, small = world.throttler("storm"), world.throttler("small")
    busy = await held(storm, 10)
    behind = calls(storm, 5)
    (waiting,) = calls(small)
    await world.elapse(1.0)
    assert not any(reservation.instance.is_draining for reservation in busy)
    await world.elapse(TURN_S)

    draining = [reservation for reservation in busy if reservation.instance.is_draining]
    assert len(draining) == 1
    draining[0].release()
    (await waiting).release()
    busy.remove(draining[0])
    for reservation in busy:
        reservation.release()
    await end(behind)


async def test_freed_room_is_handed_out_in_turns_whoever_asked_for_more(world: World) -> None:
    world.node.others_bytes = 10 * SIZE
    storm, small = world.throttler("storm"), world.throttler("small")
    flood = calls(storm, 20)
    await until(lambda: world.gate.capacity.waiting == 20)
    late = calls(small, 2)
    await until(lambda: world.gate.capacity.waiting == 22)
    for n in range(1, 5):
        world.node.others_bytes -= SIZE
        await world.elapse(0.01)
        await until(lambda n=n: len(storm.instances) + len(small.instances) == n)

    assert (len(storm.instances), len(small.instances)) == (2, 2)
    await end(flood + late)


async def test_at_its_deadline_a_call_without_room_is_503_with_the_reason(world: World) -> None:
    busy = await held(world.throttler("a"), 10)
    with pytest.raises(
        errors.Unavailable, match="no room for app-b/hello: 100 MiB wanted, 0 MiB of 1000 MiB free"
    ) as e:
        await world.throttler("b").reserve(0.05)
    assert (e.value.detail["resource"], e.value.retry_after_s) == ("memory", 5)
    with pytest.raises(errors.Unavailable, match="no room for app-c/hello") as e:
        await world.throttler("c").reserve(0.05)
    assert "app-b" not in str(e.value)
    for reservation in busy:
        reservation.release()


async def test_what_no_waiting_can_change_is_told_at_once(world: World) -> None:
    with pytest.raises(errors.Unavailable, match="1100 MiB wanted"):
        await world.throttler("a", size=11 * SIZE).reserve(30)
    world.node.room = NodeCapacity(memory_bytes=10 * SIZE, dedicated_to="OTHER")
    with pytest.raises(errors.Unavailable, match="dedicated"):
        await world.throttler("b").reserve(30)


async def test_what_is_reserved_is_kept_free_and_not_given_up(world: World) -> None:
    world.tenant("vip", isolation="reserved", reserved_memory_bytes=3 * SIZE)
    vip, storm = world.throttler("vip"), world.throttler("storm")
    flood = calls(storm, 30)
    await until(lambda: len(storm.instances) == 7)
    await world.elapse(1.0)
    assert len(storm.instances) == 7

    for reservation in await held(vip, 3):
        reservation.release()
    await world.elapse(2 * SPARE_S)
    assert (len(vip.instances), len(storm.instances)) == (3, 7)
    await end(flood)


async def test_starts_that_nobody_waits_for_any_more_are_given_up(world: World) -> None:
    busy = await held(world.throttler("a"), 10)
    b = world.throttler("b")
    tasks = calls(b, 3)
    await until(lambda: world.gate.capacity.waiting == 3)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    await world.elapse(0.0)
    assert (b.starting, world.gate.capacity.waiting) == (2, 2)
    await end(tasks)
    await world.elapse(0.0)
    assert (b.starting, world.gate.capacity.waiting) == (0, 0)
    for reservation in busy:
        reservation.release()


async def test_a_start_whose_calls_are_served_before_it_could_be_ready_leaves_the_room_to_others(
    world: World,
) -> None:
    busy = await held(world.throttler("a"), 9)
    slow = world.throttler("a", "slow")
    tasks = calls(slow, 3)
    first = await tasks[0]
    slow.start_times.observe(StartKind.COLD, 60.0, ())
    await world.elapse(2.0)
    assert (slow.waiting, slow.starting, world.gate.capacity.waiting) == (2, 2, 2)
    first.release()  # it took 2 s, and so will the next
    await world.elapse(0.0)
    assert (slow.waiting, slow.starting, world.gate.capacity.waiting) == (1, 0, 0)

    await world.elapse(60.0)  # it took longer, so that the mean says nothing
    slow.start(1)
    await world.elapse(0.0)
    assert (slow.waiting, slow.starting, world.gate.capacity.waiting) == (1, 1, 1)
    await end(tasks)
    for reservation in busy:
        reservation.release()


async def test_unasked_starts_take_nothing_from_anybody(world: World) -> None:
    for reservation in await held(world.throttler("a"), 10):
        reservation.release()
    b = world.throttler("b")
    b.start(3)
    await until(lambda: b.starting == 0)
    assert (world.node.claimed_bytes, world.gate.capacity.waiting) == (10 * SIZE, 0)


async def test_an_instance_that_dies_gives_its_room_to_who_waits(world: World) -> None:
    a = world.throttler("a")
    busy = await held(a, 10)
    (waiting,) = calls(world.throttler("b"))
    await until(lambda: world.gate.capacity.waiting == 1)
    lost = busy[0].instance.id
    await world.node.stop(busy[0].instance.info.id, grace_s=0)
    a.instance_exited(lost, "crashed")
    (await waiting).release()
    for reservation in busy:
        reservation.release()


async def test_adopted_instances_count(world: World) -> None:
    world.tenant("a", instances=1)
    throttler = world.throttler("a")
    info = (await throttler.reserve(5)).instance.info
    other = World(world.node.directory / "again")
    other.tenant("a", instances=1)
    other.throttler("a").add(info)
    assert other.gate.instance_quota.count("a") == (1, 0)
    await other.scaler.aclose()
    await other.books.aclose()


# -- budgets and bills -----------------------------------------------------------------------------
async def test_where_a_budget_is_spent_nothing_is_kept_or_started_unasked_and_idle_instances_go(
    world: World,
) -> None:
    throttler = world.throttler("a", scaling=Scaling(min_instances=2))
    await until(lambda: len(throttler.instances) == 2)
    busy = await throttler.reserve(5)
    world.spent.add("a")
    _decide(world, 2)
    assert (list(throttler.instances), throttler.starting) == ([busy.instance.id], 0)
    busy.release()
    _decide(world, 2)
    assert (throttler.instances, throttler.starting) == ({}, 0)

    world.spent.clear()
    _decide(world, 2)
    await until(lambda: len(throttler.instances) == 2)


def _decide(world: World, seconds: int) -> None:
    for _ in range(seconds):
        world.clock.advance(1.0)
        world.scaler.record(world.clock())
        world.decide()


async def test_a_start_is_billed_for_its_own_time_without_what_it_waited_for(world: World) -> None:
    busy = await held(world.throttler("a"), 10)
    (waiting,) = calls(world.throttler("b"))
    await until(lambda: world.gate.capacity.waiting == 1)
    world.clock.advance(100.0)  # it waits for room
    busy[0].instance.is_draining = True
    busy[0].release()
    world.clock.advance(SPARE_S)
    (await waiting).release()
    await world.books.shipper.flush()

    starts = [record for record in world.ledger.records.values() if record.kind == "START"]
    assert (len(starts), {record.start_kind for record in starts} <= {"COLD", "FORK"}) == (11, True)
    assert all(record.billed_ns < 50e9 for record in starts)
    for reservation in busy[1:]:
        reservation.release()


# -- several activators ----------------------------------------------------------------------------
@pytest.fixture(name="pair")
async def _pair(short_tmp: Path) -> AsyncIterator[tuple[World, World]]:
    clock = ManualClock()
    board = Board(clock)
    worlds = tuple(
        World(short_tmp / str(n), clock=clock, leases=BoardState(board, member=f"a-{n}"))
        for n in range(2)
    )
    for world in worlds:
        assert world.leases is not None
        await world.leases.join()
        await world.reconciler.reconcile()
    yield worlds[0], worlds[1]
    for world in worlds:
        await world.scaler.aclose()
        await world.node.aclose()
        await world.books.aclose()


async def _beat(pair: tuple[World, World]) -> None:
    for world in pair:
        assert world.leases is not None
        pulse = await world.leases.beat()
        assert pulse is not None
        world.scaler.make_room(pulse)


async def test_activators_keep_to_a_tenants_quota_together_and_make_room_for_each_other(
    pair: tuple[World, World],
) -> None:
    one, two = pair
    for world in pair:
        world.tenant("a", instances=2)
    first = await held(one.throttler("a", "one"), 2)
    (waiting,) = calls(two.throttler("a", "two"))
    await until(lambda: two.leases is not None and two.leases.statistics().refused > 0)
    assert len(two.node.started) == 0

    first[0].release()  # idle: it goes to the activator that has less than its fair share
    await _beat(pair)
    (await waiting).release()
    assert (len(one.throttler("a", "one").instances), len(two.throttler("a", "two").instances)) == (
        1,
        1,
    )
    first[1].release()


async def test_gpus_of_all_activators_count_and_come_back_with_their_instance(
    pair: tuple[World, World],
) -> None:
    one, two = pair
    gpus = Resources(memory_bytes=SIZE, gpu=("H100",), gpu_count=2)
    for world in pair:
        world.tenant("a", gpus=3)
    throttler = one.throttler("a", resources=gpus)
    (await throttler.reserve(5)).release()
    (waiting,) = calls(two.throttler("a", resources=gpus))
    await until(lambda: two.leases is not None and two.leases.statistics().refused > 0)
    assert one.leases is not None
    assert one.leases.statistics().allowance == {
        throttler.target.key: 1,
        "tenant:a": 1,
        "gpus:a": 2,
    }

    one.clock.advance(IDLE_SURPLUS_S)
    await _beat(pair)  # it is idle, and another wants it
    (await waiting).release()
    assert one.leases.statistics().allowance == {}


async def test_idle_instances_make_room_for_another_activators_start(world: World) -> None:
    storm = world.throttler("storm")
    for reservation in await held(storm, 9):
        reservation.release()
    watching = asyncio.create_task(world.reconciler.watch())
    detail = {
        "asked": 2 * SIZE,
        "free": SIZE,
        "claimed": 9 * SIZE,
        "total": 10 * SIZE,
        "claims": {"storm": 9 * SIZE},
    }
    world.node.tell("room_wanted", "i-of-another", tenant="late", **detail)
    await until(lambda: len(world.node.stopped) == 1)
    assert len(storm.instances) == 8

    world.node.tell(
        "room_wanted",
        "i-of-another",
        tenant="storm",
        **{**detail, "claims": {"storm": 3 * SIZE, "other": 6 * SIZE}},
    )
    # its own idle ones are open to it, whoever holds them
    await until(lambda: len(world.node.stopped) == 2)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


# -- storms ----------------------------------------------------------------------------------------
async def test_instances_that_a_storm_leaves_go_to_a_tenant_with_less_though_the_storm_asked_first(
    world: World,
) -> None:
    storm = [task for n in range(30) for task in calls(world.throttler("storm", f"f{n}"))]
    await until(lambda: world.gate.capacity.waiting == 20)
    (mine,) = calls(world.throttler("small"))
    await until(lambda: world.gate.capacity.waiting == 21)
    next(task for task in storm if task.done()).result().release()

    (await mine).release()
    assert sum(task.done() for task in storm) == 10
    await end(storm)


async def test_a_storm_of_cold_starts_of_one_tenant_leaves_the_starts_of_another_alone(
    world: World,
) -> None:
    """A hundred functions of one tenant start cold at once; another's one start boots after a turn
    of the storm, not after it."""
    world.node.room = NodeCapacity(memory_bytes=1000 * SIZE)
    world.node.turns = type(world.node.turns)(2)
    storm = [world.throttler("storm", f"f{n}") for n in range(100)]
    small = world.throttler("small")
    tasks = [task for throttler in storm for task in calls(throttler)]
    await until(lambda: len(world.node.asked) == 100)
    before = len(world.node.booted)
    (mine,) = calls(small)
    reservation = await mine
    position = world.node.booted.index("small")

    assert position - before <= 10, f"{position - before} of the storm's starts went before it"
    assert sum(task.done() for task in tasks) < 100
    reservation.release()
    await _done(tasks)
    await end(tasks)


async def test_a_storm_over_a_full_node_leaves_warm_tenants_and_newcomers_alone(
    world: World,
) -> None:
    warm, storm, late = world.throttler("warm"), world.throttler("storm"), world.throttler("late")
    kept = await held(warm, 2)
    flood = calls(storm, 50)
    await until(lambda: len(storm.instances) == 8)
    first = kept[0].instance.id
    for reservation in kept:
        reservation.release()
    await world.elapse(1.0)
    assert [(await warm.reserve(5)).instance.id in warm.instances, first in warm.instances] == [
        True,
        True,
    ]

    (mine,) = calls(late)
    await world.elapse(0.0)
    # goes to the storm's next call: slots are its own
    next(task for task in flood if task.done()).result().release()
    await world.elapse(TURN_S)
    for task in flood:
        if task.done() and task.result().instance.is_draining:
            task.result().release()
    (await mine).release()
    await end(
        [task for task in flood if not task.done() or task.result().instance.id in storm.instances]
    )


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
async def test_a_call_that_leaves_at_any_point_leaves_nothing_behind(
    world: World, steps: int
) -> None:
    world.tenant("a", instances=2)
    world.node.room = NodeCapacity(memory_bytes=2 * SIZE)
    one, two = world.throttler("a", "one"), world.throttler("b", "two")
    tasks = calls(one, 3) + calls(two, 3)
    for _ in range(steps):
        await asyncio.sleep(0)
    await end(tasks)
    await world.elapse(1.0)
    await until(lambda: one.starting + two.starting == 0)

    assert [
        len(throttler.instances) + throttler.in_flight + throttler.waiting
        for throttler in (one, two)
    ] == [len(one.instances), len(two.instances)]
    assert world.gate.instance_quota.count("a") == (len(one.instances), 0)
    assert world.node.claimed_bytes == SIZE * (len(one.instances) + len(two.instances))
    assert world.queue.waiting == 0


async def test_a_refusal_that_is_not_about_memory_fails_the_start(world: World) -> None:
    world.node.failures = [NoCapacity("no more sockets", {"resource": "sockets"})]
    with pytest.raises(errors.Unavailable, match="no more sockets"):
        await world.throttler("a").reserve(30)


async def test_an_idle_instance_gives_its_gpu_to_a_start_that_lacks_one(world: World) -> None:
    world.node.add_gpus(H100)
    world.gate.capacity.gpu_pause_s = 0.0
    gpu = Resources(memory_bytes=SIZE, gpu=("H100",), gpu_count=1)
    old, new = (
        world.throttler("a", "old", resources=gpu),
        world.throttler("a", "new", resources=gpu),
    )
    (reservation,) = await held(old, 1)
    with pytest.raises(errors.Unavailable, match="GPUs wanted"):
        await new.reserve(30)  # it is busy
    reservation.release()
    (second,) = await held(new, 1)
    assert not old.instances
    second.release()


async def test_a_gpu_of_another_kind_does_not_help_and_its_instance_goes_on(world: World) -> None:
    world.node.add_gpus(H100, L4)
    world.gate.capacity.gpu_pause_s = 0.0

    def on(*kinds: str) -> Resources:
        return Resources(memory_bytes=SIZE, gpu=kinds, gpu_count=1)

    large, small = (
        world.throttler("a", "large", resources=on("H100")),
        world.throttler("a", "small", resources=on("L4")),
    )
    (busy,), (idle,) = await held(large, 1), await held(small, 1)
    idle.release()
    with pytest.raises(errors.Unavailable, match="0 of 1 H100 free") as e:
        await world.throttler("a", "more", resources=on("H100")).reserve(30)
    assert e.value.detail["kinds"] == {"H100": {"free": 0, "claimed": 1, "total": 1}}
    assert len(small.instances) == 1

    either = world.throttler("a", "either", resources=on("H100", "L4"))
    (second,) = await held(either, 1)
    assert not small.instances, "its second choice is had by releasing an idle instance"
    (instance,) = either.instances.values()
    assert instance.info.gpus is not None
    assert instance.info.gpus.kind == "L4"
    second.release()
    busy.release()


async def test_a_start_waits_for_a_gpu_of_an_instance_that_ends(world: World) -> None:
    world.gate.capacity.gpu_pause_s = 0.0
    taken = {"resource": "gpu", "asked": 1, "free": 0, "claimed": 1, "total": 1}
    world.node.failures = [NoCapacity("0 of 1 free", taken), NoCapacity("0 of 1 free", taken)]
    gpu = Resources(memory_bytes=SIZE, gpu=("H100",), gpu_count=1)
    (reservation,) = await held(world.throttler("a", resources=gpu), 1)
    reservation.release()
    assert world.node.failures == []


async def test_a_start_that_nobody_waits_for_takes_nobodys_gpu(world: World) -> None:
    world.node.add_gpus(H100)
    world.gate.capacity.gpu_pause_s = 0.0
    gpu = Resources(memory_bytes=SIZE, gpu=("H100",), gpu_count=1)
    old, new = (
        world.throttler("a", "old", resources=gpu),
        world.throttler("a", "new", resources=gpu),
    )
    (reservation,) = await held(old, 1)
    reservation.release()
    new.start(1)
    await until(lambda: not new.starting)
    assert len(old.instances) == 1


GPU = Resources(memory_bytes=SIZE, gpu=("H100",), gpu_count=1)


async def test_a_tenant_over_its_share_of_the_gpus_gives_an_idle_one_at_once(world: World) -> None:
    world.node.add_gpus(H100, H100)
    world.gate.capacity.gpu_pause_s = 0.0
    many, few = world.throttler("a", resources=GPU), world.throttler("b", resources=GPU)
    first, second = await held(many, 2)
    first.release()
    (third,) = await held(few, 1)
    assert len(many.instances) == 1
    second.release()
    third.release()


async def test_a_busy_one_finishes_its_call_for_a_tenant_that_waited_its_turn(world: World) -> None:
    world.node.add_gpus(H100, H100)
    world.gate.capacity.gpu_pause_s = 0.01
    many, few = world.throttler("a", resources=GPU), world.throttler("b", resources=GPU)
    reservations = await held(many, 2)
    (call,) = calls(few)
    await asyncio.sleep(0.05)
    assert len(many.instances) == 2, "it waits for its turn"
    world.clock.advance(TURN_S)
    await until(lambda: len(list(many.live())) == 1)
    assert not call.done(), "the drained instance still has its call"
    await asyncio.sleep(0.05)
    assert len(list(many.live())) == 1, "one is drained for it, and no second one"
    for reservation in reservations:
        reservation.release()
    (await call).release()


async def test_gpus_of_a_tenant_with_a_reservation_stay_with_it(world: World) -> None:
    world.node.add_gpus(H100, H100)
    world.gate.capacity.gpu_pause_s = 0.0
    world.tenant("a", isolation="reserved", reserved_memory_bytes=SIZE)
    many = world.throttler("a", resources=GPU)
    for reservation in await held(many, 2):
        reservation.release()
    world.clock.advance(SPARE_S)
    with pytest.raises(errors.Unavailable, match="GPUs wanted"):
        await world.throttler("b", resources=GPU).reserve(30)
    assert len(many.instances) == 2


async def test_on_one_gpu_a_batch_function_goes_once_a_standard_call_waited_its_turn(
    world: World,
) -> None:
    world.node.add_gpus(H100)
    world.gate.capacity.gpu_pause_s = 0.01
    batch = world.throttler("a", resources=GPU, priority=Priority.BATCH)
    (reservation,) = await held(batch, 1)
    rank = QueuePriority(priority=Priority.BATCH, tenant="b", weight=1)
    with pytest.raises(errors.Unavailable, match="GPUs wanted"):
        await world.throttler("b", "equal", resources=GPU).reserve(30, rank)
    (call,) = calls(world.throttler("b", "above", resources=GPU))
    await asyncio.sleep(0.05)
    assert len(list(batch.live())) == 1, "it waits for its turn"
    world.clock.advance(TURN_S)
    await until(lambda: not list(batch.live()))
    reservation.release()
    (await call).release()


async def test_a_priority_above_the_plan_protects_no_instance(world: World) -> None:
    world.node.add_gpus(H100)
    world.gate.capacity.gpu_pause_s = 0.0
    world.tenant("a", priority="batch")
    claims = world.throttler("a", resources=GPU, priority=Priority.REALTIME)
    (reservation,) = await held(claims, 1)
    reservation.release()
    (second,) = await held(world.throttler("b", resources=GPU), 1)
    assert not claims.instances
    second.release()
