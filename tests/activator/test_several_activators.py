"""Throttlers of several activators over one board: together within max_instances, and nobody is
left without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activator.autoscaler.heartbeat import START_GRACE_S, HeartbeatLoop
from activator.balancing.global_queue import GlobalQueue
from activator.balancing.instance import Instance
from activator.balancing.instance_lifecycle import InstanceProvisioner
from activator.balancing.rebalancing import (
    IDLE_SURPLUS_S,
    TURN_S,
    RebalanceRequest,
    RebalanceState,
    pick_instance_to_yield,
)
from activator.balancing.throttler import Throttler
from activator.coordination.state import HeartbeatReply, InstanceDemand
from activator.fairness.start_admission import StartAdmission
from activator.metrics.metrics import Metrics
from activator.quotas.unauthenticated_limit import SharedUnauthenticatedLimit
from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.spec.instances.scaling import Scaling
from snapshotter import errors as agent_errors
from snapshotter.types import InstanceId, InstanceInfo, StartKind
from tests.activator.autoscaler.test_autoscaler_loop import Rig
from tests.activator.scaled_world import books_of
from tests.activator.test_gateway import until
from tests.fakes.clock import ManualClock
from tests.fakes.fake_fleet import FakeFleet, info_of
from tests.fakes.routes import TENANT, change, empty_table, route_of, spec_of
from tests.fakes.shared_board import Board, BoardState


class Members:
    """Activators of one platform, as far as one revision goes: a throttler each, all on one board
    and one node."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.board = Board(self.clock)
        self.fleet = FakeFleet(directory)
        self.metrics = Metrics()
        self.books = books_of(directory)
        self.table = empty_table()
        self.states: list[BoardState] = []
        self.throttlers: list[Throttler] = []

    async def join(self, scaling: Scaling) -> Throttler:
        """One more activator."""
        self.table.apply(change(1, route_of(spec_of(scaling=scaling))))
        target: CallTarget = self.table.targets_of(f"{TENANT}/main/shop/hello")[0]
        state = BoardState(self.board, member=f"a-{len(self.states)}")
        await state.join()
        throttler = Throttler(
            target,
            provisioner=InstanceProvisioner(
                self.fleet,
                secret_env=self.table.secrets.env_of,
                gate=StartAdmission(clock=self.clock, leases=state),
            ),
            queue=GlobalQueue(100),
            observer=self.metrics,
            account=self.books.account,
            clock=self.clock,
        )
        self.states.append(state)
        self.throttlers.append(throttler)
        return throttler

    async def beat(self) -> None:
        """All beat, and make room for each other."""
        for state, throttler in zip(self.states, self.throttlers, strict=True):
            pulse = await state.beat()
            assert pulse is not None
            throttler.make_room(pulse.wants.get(throttler.target.key), len(pulse.members))

    async def aclose(self) -> None:
        for throttler in self.throttlers:
            await throttler.aclose()
        await self.fleet.aclose()
        await self.books.aclose()


@pytest.fixture(name="members")
async def _members(short_tmp: Path) -> AsyncIterator[Members]:
    members = Members(short_tmp)
    yield members
    await members.aclose()


async def test_two_activators_never_start_more_than_one_would(members: Members) -> None:
    one, two = (
        await members.join(Scaling(max_instances=3)),
        await members.join(Scaling(max_instances=3)),
    )
    calls = [asyncio.ensure_future(t.reserve(5.0)) for t in (one, two) for _ in range(4)]
    await until(lambda: sum(c.done() for c in calls) == 3)

    assert len(members.fleet.started) == 3
    for call in calls:
        call.cancel()
    for done in await asyncio.gather(*calls, return_exceptions=True):
        if not isinstance(done, BaseException):
            done.release()


async def test_a_call_waits_for_an_instance_that_another_activator_gives_up_when_it_is_idle(
    members: Members,
) -> None:
    one, two = (
        await members.join(Scaling(max_instances=1)),
        await members.join(Scaling(max_instances=1)),
    )
    (await one.reserve(5.0)).release()
    waiting = asyncio.ensure_future(two.reserve(5.0))
    await until(lambda: two.starting == 1)
    assert not waiting.done()

    await members.beat()

    reservation = await waiting
    assert list(one.instances) == []
    assert list(two.instances) == [reservation.instance.id]
    reservation.release()


async def test_a_call_without_an_allowance_fails_by_its_own_deadline_only(members: Members) -> None:
    one, two = (
        await members.join(Scaling(max_instances=1)),
        await members.join(Scaling(max_instances=1)),
    )
    held = await one.reserve(5.0)

    with pytest.raises(errors.DeadlineExceeded):
        await two.reserve(0.05)
    await until(lambda: two.starting == 0)  # nobody waits for it any more
    assert len(members.fleet.started) == 1
    held.release()


async def test_an_allowance_comes_back_when_a_start_fails_and_when_an_instance_dies(
    members: Members,
) -> None:
    one = await members.join(Scaling(max_instances=1))
    members.fleet.failures.append(agent_errors.StartFailed("no such module"))
    with pytest.raises(errors.StartFailed):
        await one.reserve(5.0)
    assert members.states[0].statistics().allowance == {}

    reservation = await one.reserve(5.0)
    await members.fleet.kill(reservation.instance.id, "crashed", tell=False)
    one.instance_exited(reservation.instance.id, "crashed")
    assert members.states[0].statistics().allowance == {}
    reservation.release()


async def test_the_allowance_of_a_stopping_instance_is_free_once_it_is_gone(
    members: Members,
) -> None:
    one = await members.join(Scaling(max_instances=1))
    (await one.reserve(5.0)).release()
    one.drain(next(iter(one.instances.values())))
    assert members.states[0].statistics().allowance == {one.target.key: 1}
    await until(lambda: members.states[0].statistics().allowance == {})


async def test_adopted_instances_count(members: Members) -> None:
    one = await members.join(Scaling(max_instances=1))
    one.add(info_of(one.target, "i-mine", "/nowhere", StartKind.FORK))
    assert members.states[0].statistics().allowance == {one.target.key: 1}


async def test_what_is_kept_warm_is_kept_once_by_all_together(members: Members) -> None:
    throttlers = [await members.join(Scaling(min_instances=3, max_instances=8)) for _ in range(2)]
    assert [t.min_instances for t in throttlers] == [2, 1]


# -- which instance is given up --------------------------------------------------------------------
STARVING, WANTING = InstanceDemand(wanting=1, starving=1), InstanceDemand(wanting=1, starving=0)


def instances(members: Members, throttler: Throttler, *in_flight: int) -> list[Instance]:
    made = []
    for n, flying in enumerate(in_flight):
        info = info_of(throttler.target, f"i-{n}", "/nowhere", StartKind.FORK)
        account = members.books.account(throttler.target, info.id)
        made.append(Instance(info, account=account, capacity=4, now=float(n)))
        made[-1].in_flight = flying
    return made


def claim(
    want: InstanceDemand,
    *,
    starved_s: float = 0.0,
    members: int = 2,
    max_instances: int = 2,
    min_instances: int = 0,
) -> RebalanceRequest:
    return RebalanceRequest(
        want=want,
        starved_s=starved_s,
        members=members,
        min_instances=min_instances,
        max_instances=max_instances,
        waiting=0,
    )


@pytest.mark.parametrize(
    "in_flight, asked, idle_s, given",
    [
        pytest.param((0, 1), claim(STARVING), 0.0, "i-0", id="an idle one at once to who starves"),
        pytest.param(
            (0, 0),
            claim(WANTING, max_instances=4),
            IDLE_SURPLUS_S,
            "i-0",
            id="an idle one after a while to who wants more",
        ),
        pytest.param(
            (0, 0),
            claim(WANTING, max_instances=4),
            0.0,
            None,
            id="not at once to who only wants more",
        ),
        pytest.param(
            (0, 0),
            claim(WANTING, min_instances=2),
            60.0,
            None,
            id="never below what is kept warm, to who only wants more",
        ),
        pytest.param(
            (2, 1), claim(STARVING), 0.0, "i-1", id="a busy one above our share to who starves"
        ),
        pytest.param(
            (1,),
            claim(STARVING, starved_s=9.0),
            0.0,
            None,
            id="our share is ours while we are busy",
        ),
        pytest.param(
            (1,),
            claim(STARVING, max_instances=1, starved_s=TURN_S - 0.1),
            0.0,
            None,
            id="fewer than members: not before a turn",
        ),
        pytest.param(
            (1,),
            claim(STARVING, max_instances=1, starved_s=TURN_S),
            0.0,
            "i-0",
            id="fewer instances than members: in turns",
        ),
        pytest.param(
            (), claim(STARVING, max_instances=1, starved_s=9.0), 0.0, None, id="nothing to give"
        ),
    ],
)
async def test_which_instance_is_given_up(
    members: Members,
    in_flight: tuple[int, ...],
    asked: RebalanceRequest,
    idle_s: float,
    given: str | None,
) -> None:
    live = instances(members, await members.join(Scaling()), *in_flight)
    victim = pick_instance_to_yield(live, asked, now=idle_s)
    assert (victim.id if victim else None) == given


async def test_where_somebody_else_decides_how_many_there_are_the_share_is_of_those(
    members: Members,
) -> None:
    throttler = await members.join(Scaling(max_instances=8))
    [only] = instances(members, throttler, 1)
    throttler.instances[only.id] = only
    generosity = RebalanceState()
    assert generosity.choose(throttler, STARVING, 2, 0.0, most=1) is None, "its turn has just begun"
    assert generosity.choose(throttler, STARVING, 2, TURN_S + 0.1) is None, (
        "of eight, four are ours"
    )
    assert generosity.choose(throttler, STARVING, 2, TURN_S + 0.1, most=1) is only
    del throttler.instances[only.id]


# -- the loop and the strangers --------------------------------------------------------------------
class Node:
    """Instances of whoever, and what was stopped."""

    def __init__(self, infos: list[InstanceInfo]) -> None:
        self.infos = infos
        self.stopped: list[str] = []

    async def leased(self) -> list[InstanceInfo]:
        return self.infos

    async def stop(self, instance_id: InstanceId, *, grace_s: float) -> None:
        self.stopped.append(instance_id)


class Beats:
    """A membership whose every beat is answered alike; the second wait for news ends the loop."""

    member = "a-0"

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.beats = 0

    async def beat(self) -> HeartbeatReply:
        self.beats += 1
        return HeartbeatReply(members=frozenset({"a-0"}))

    async def wait_for_changes(self, timeout_s: float) -> None:
        if self.beats > 1:
            raise asyncio.CancelledError
        self.clock.advance(START_GRACE_S + 1)


async def test_instances_of_an_activator_that_is_really_gone_are_stopped(short_tmp: Path) -> None:
    rig = Rig(short_tmp)
    target = rig.deploy()
    leased = []
    for instance, lessee in (("i-mine", "a-0"), ("i-dead", "a-1"), ("i-cut-off", "a-2")):
        leased.append(info_of(target, instance, "/nowhere", StartKind.FORK))
        object.__setattr__(leased[-1], "lessee", lessee)
    node = Node(leased)

    async def is_alive(member: str) -> bool:
        return member == "a-2"  # alive, though Redis has not heard of it

    beats = Beats(rig.clock)
    keeper = HeartbeatLoop(
        beats, scaler=rig.scaler, leases=node, is_process_alive=is_alive, clock=rig.clock
    )
    rig.scaler.reconciled.set()
    with pytest.raises(asyncio.CancelledError):
        await keeper.run()

    assert beats.beats == 2  # after the first one the others may still be starting
    assert node.stopped == ["i-dead"]
    await rig.scaler.aclose()
    await rig.books.aclose()


async def test_a_stranger_that_spreads_over_activators_finds_one_bucket() -> None:
    board = Board(ManualClock())
    one, two = (
        SharedUnauthenticatedLimit(BoardState(board, member=m), rate_per_s=1.0)
        for m in ("a-0", "a-1")
    )
    for limit in (one, two):
        limit.check("10.0.0.1", now=0.0)
        await asyncio.sleep(0)
    # its own bucket has a token, the shared one none: told a moment later
    one.check("10.0.0.1", now=1.0)
    await asyncio.sleep(0)

    for refuse in (one.guard, one.check):
        with pytest.raises(errors.TooManyRequests):
            refuse("10.0.0.1", now=2.0)
    board.is_down = True
    two.check("10.0.0.1", now=9.0)  # without the board the own bucket is all there is
    await one.aclose()
    await two.aclose()
