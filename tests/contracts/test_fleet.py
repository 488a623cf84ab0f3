"""What the activator may rely on, wherever instances run: behind a real node agent, and as pods of
a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from activator.balancing.fleet import Fleet, NodeFleet
from activator.balancing.instance_lifecycle import new_instance_id
from activator.knative.leases.pod_leases import InMemoryPodLeases, PodLeaseTable
from activator.knative.readiness_probe import exchange
from activator.routing.route_table import CallTarget
from pilotlight.spec.function import Clocks
from snapshotter import errors
from snapshotter.types import AgentEvent, InstanceInfo, InstanceState, RevisionKey
from tests.fakes.agent_home import AgentHome
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import spec_of, target_of
from tests.fakes.small_cluster import World, small_cluster

SECRETS: Mapping[str, str] = {"TOKEN": "t"}
WAIT_S = 30.0


class Yard(Protocol):
    """Where a fleet's instances run."""

    async def fleet(self) -> Fleet:
        """A new life of the activator `a-0`."""

    def target(self, *, is_broken: bool = False, never_ready: bool = False) -> CallTarget:
        """A revision; one whose worker ends with `no model`; one that is never ready within its
        clock of half a second."""

    async def end(self, info: InstanceInfo) -> None:
        """Its worker ends by itself, with status 6."""

    async def began(self) -> None:
        """Returns once a start is under way."""


class Node:
    """`Yard`: this machine."""

    def __init__(self, home: AgentHome, closing: AsyncExitStack) -> None:
        self._home = home
        self._closing = closing

    async def fleet(self) -> Fleet:
        fleet = NodeFleet(socket=self._home.paths.socket("snapshotter"), lessee="a-0")
        self._closing.push_async_callback(fleet.aclose)
        return fleet

    def target(self, *, is_broken: bool = False, never_ready: bool = False) -> CallTarget:
        target = target_of(spec_of())
        steps = (
            ["print:loading", "raise:no model"] if is_broken else ["hang"] if never_ready else []
        )
        target.launch = self._home.launch(
            str(target.launch.revision),
            boot=steps,
            startup_timeout_s=0.5 if never_ready else 20.0,
            labels=target.launch.labels,
            uid=None,
        )
        return target

    async def end(self, info: InstanceInfo) -> None:
        with contextlib.suppress(Exception):
            await exchange(info.socket, b"GET /exit/6 HTTP/1.1\r\nhost: worker\r\n\r\n")

    async def began(self) -> None:
        slots = self._home.paths.run / "slots"
        async with asyncio.timeout(WAIT_S):
            while not any(slots.iterdir()):
                await asyncio.sleep(0.01)


class Pods:
    """`Yard`: a cluster that makes a pod whenever its revision is woken and has none that is
    free."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._board = PodLeaseTable(lambda: ("a-0",))
        self._broken: set[str] = set()
        self._never: set[str] = set()
        self._targets: dict[str, CallTarget] = {}
        self._made: set[asyncio.Task[None]] = set()
        world.woken.clear()
        self.inner = world.on_wake

    async def fleet(self) -> Fleet:
        return await self._world.fleet("a-0", InMemoryPodLeases(self._board, member="a-0"))

    def target(self, *, is_broken: bool = False, never_ready: bool = False) -> CallTarget:
        target = self._world.target(clocks=Clocks(startup_s=0.5 if never_ready else 20.0))
        kinds = self._broken if is_broken else self._never if never_ready else set()
        kinds.add(target.key)
        self._targets[target.key] = target
        return target

    async def on_wake(self, request: WorkerRequest) -> WorkerAnswer:
        target = next(iter(self._targets.values()))
        free = len(self._world.maker.pods) - len(self._board.owners)
        if free <= 0:
            await self._make(target)
        return await self.inner(request)

    async def _make(self, target: CallTarget) -> None:
        pod = self._world.maker.made(target)
        await self._world.maker.boots(pod)
        if target.key in self._broken:
            await asyncio.sleep(0.05)
            self._world.maker.restarted(pod, message="loading\nRuntimeError: no model")
        elif target.key not in self._never:
            await self._world.maker.serves(pod)

    async def end(self, info: InstanceInfo) -> None:
        pod = next(pod for pod in self._world.maker.pods.values() if pod.ip in info.socket)
        await self._world.maker.dies(pod)
        self._world.maker.restarted(pod, exit_code=6, reason="Error")

    async def began(self) -> None:
        await self._world.woken.wait()


@pytest.fixture(name="yard", params=["node", "cluster"])
async def _yard(request: pytest.FixtureRequest, short_tmp: Path) -> AsyncIterator[Yard]:
    async with AsyncExitStack() as closing:
        if request.param == "node":
            home = AgentHome(short_tmp)
            await closing.enter_async_context(home.agent(namespaces=False))
            yield Node(home, closing)
        else:
            world = await closing.enter_async_context(small_cluster(short_tmp))
            pods = Pods(world)
            world.wake_url = await world.maker.waker(pods.on_wake)
            yield pods


async def _start(fleet: Fleet, target: CallTarget, instance: Any = None) -> InstanceInfo:
    return await fleet.start(target, instance or new_instance_id(), SECRETS)


async def _told(fleet: Fleet, kind: str) -> AgentEvent:
    async with asyncio.timeout(WAIT_S):
        async for event in fleet.watch():
            if event.kind == kind:
                return event
    raise AssertionError("it tells for ever")


async def test_a_start_is_a_ready_instance_that_answers(yard: Yard) -> None:
    fleet, target = await yard.fleet(), yard.target()
    instance = new_instance_id()
    info = await _start(fleet, target, instance)
    assert (info.id, info.revision, info.state, info.lessee) == (
        instance,
        target.launch.revision,
        InstanceState.READY,
        "a-0",
    )
    assert (info.labels, info.memory_bytes, info.cpu) == (
        target.launch.labels,
        target.launch.memory_bytes,
        target.launch.cpu,
    )
    assert info.phases_ms
    assert (await exchange(info.socket, b"GET /pid HTTP/1.1\r\nhost: worker\r\n\r\n")).status == 200


async def test_a_start_asked_for_again_is_the_same_instance(yard: Yard) -> None:
    fleet, target = await yard.fleet(), yard.target()
    instance = new_instance_id()
    first, again = await _start(fleet, target, instance), await _start(fleet, target, instance)
    assert again.socket == first.socket
    assert len(await fleet.adopt()) == 1


async def test_two_starts_are_two_instances(yard: Yard) -> None:
    fleet, target = await yard.fleet(), yard.target()
    one, two = await _start(fleet, target), await _start(fleet, target)
    assert one.socket != two.socket
    assert {info.id for info in await fleet.adopt()} == {one.id, two.id}


async def test_what_is_stopped_is_not_ours_any_more_however_often(yard: Yard) -> None:
    fleet, target = await yard.fleet(), yard.target()
    info = await _start(fleet, target)
    await fleet.stop(info.id, grace_s=1.0)
    await fleet.stop(info.id, grace_s=1.0)
    assert await fleet.adopt() == []


async def test_to_stop_what_never_was_is_no_error(yard: Yard) -> None:
    fleet = await yard.fleet()
    await fleet.stop(new_instance_id(), grace_s=1.0)


async def test_the_next_life_of_an_activator_finds_its_instances(yard: Yard) -> None:
    fleet, target = await yard.fleet(), yard.target()
    info = await _start(fleet, target)
    again = await yard.fleet()
    [adopted] = await again.adopt()
    assert (adopted.id, adopted.socket, adopted.revision, adopted.labels) == (
        info.id,
        info.socket,
        info.revision,
        info.labels,
    )
    await again.stop(info.id, grace_s=1.0)
    assert await again.adopt() == []


async def test_a_start_that_is_abandoned_leaves_nothing_that_is_ours(yard: Yard) -> None:
    fleet, target = await yard.fleet(), yard.target(never_ready=True)
    target.launch = replace(target.launch, startup_timeout_s=60.0)
    starting = asyncio.create_task(_start(fleet, target))
    await yard.began()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await fleet.adopt() == []


async def test_a_worker_that_ends_before_it_is_ready_fails_the_start_with_what_it_said(
    yard: Yard,
) -> None:
    fleet, target = await yard.fleet(), yard.target(is_broken=True)
    with pytest.raises(errors.StartFailed, match="no model") as failure:
        await _start(fleet, target)
    assert any("loading" in line for line in failure.value.detail["log_tail"])
    assert await fleet.adopt() == []


async def test_the_startup_clock_ends_a_start_and_says_where_it_was(yard: Yard) -> None:
    fleet, target = await yard.fleet(), yard.target(never_ready=True)
    with pytest.raises(errors.StartTimeout) as late:
        await _start(fleet, target)
    assert late.value.detail["phase"]
    assert await fleet.adopt() == []


async def test_an_instance_that_ends_by_itself_is_told_of(yard: Yard) -> None:
    fleet, target = await yard.fleet(), yard.target()
    told = asyncio.create_task(_told(fleet, "instance_gone"))
    info = await _start(fleet, target)
    await yard.end(info)
    event = await told
    assert (event.subject, event.reason) == (info.id, "exited")
    assert await fleet.adopt() == []


async def test_it_does_what_it_says_it_can(yard: Yard) -> None:
    fleet, target = await yard.fleet(), yard.target()
    info = await _start(fleet, target)
    if fleet.can_sleep:
        assert (await fleet.sleep(info.id)).state is InstanceState.ASLEEP
        assert (await fleet.wake(info.id)).state is InstanceState.READY
    else:
        for nap in (fleet.sleep, fleet.wake):
            with pytest.raises(errors.Unsupported):
                await nap(info.id)
    if fleet.has_templates:
        assert (await fleet.prepare(target)).revision == target.launch.revision
        assert [template.revision for template in await fleet.templates()] == [
            target.launch.revision
        ]
    else:
        with pytest.raises(errors.Unsupported):
            await fleet.prepare(target)
        assert await fleet.templates() == []
    with pytest.raises((errors.Unsupported, errors.SnapshotRefused)):
        await fleet.checkpoint(target)
    await fleet.drop_template(RevisionKey("f-nobody@v1"))
