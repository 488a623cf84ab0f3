"""Starts on a cluster: found, woken, refused; and what happens to pods that calls run in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import pytest

from activator.knative import pod_deletion
from activator.knative.fleet import KnativeFleet
from activator.knative.leases.pod_leases import ClaimsUnreachable, InMemoryPodLeases, PodLeaseTable
from activator.knative.pod_deletion import REPLACEMENTS
from activator.routing.route_table import CallTarget
from pilotlight.errors import Unavailable
from pilotlight.spec.function import Clocks
from snapshotter import errors
from snapshotter.types import AgentEvent, InstanceId, InstanceInfo, StartKind
from tests.fakes.absence import away
from tests.fakes.pod_maker import FakePod, revision_name_of
from tests.fakes.small_cluster import World


async def _event(fleet: KnativeFleet) -> AgentEvent:
    async with asyncio.timeout(20):
        async for event in fleet.watch():
            return event
    raise AssertionError("watches do not end")


TERMINATED = {"terminated": {"exitCode": 1, "reason": "Error"}}


def is_leaving(world: World, pod: FakePod) -> bool:
    """Whether somebody deleted the pod."""
    there = world.server.get("v1", "Pod", pod.name, pod.namespace)
    return there is None or "deletionTimestamp" in there["metadata"]


def _started(
    world: World, fleet: KnativeFleet, target: CallTarget, number: int = 0
) -> asyncio.Task[InstanceInfo]:
    return asyncio.create_task(world.start(fleet, target, number))


async def test_a_pod_that_is_there_and_nobodys_is_taken_at_once(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    pod = await world.maker.up(target)
    await world.until(lambda: any(known.is_ready for known in fleet.pods.of(target.key)))
    world.server.requests.clear()

    info = await world.start(fleet, target)

    assert info.socket == f"tcp:{pod.ip}:8012"
    assert info.start_kind is StartKind.WARM
    assert list(info.phases_ms) == ["claim"]
    assert info.labels == target.launch.labels
    assert world.wakes == []
    assert [asked.path for asked in world.server.requests if asked.verb != "watch"] == []


async def test_from_zero_the_revision_is_woken_and_its_pod_used_before_kubernetes_calls_it_ready(
    world: World,
) -> None:
    target, fleet = world.target(), await world.fleet()
    world.server.requests.clear()
    starting = _started(world, fleet, target)
    await world.woken.wait()
    assert world.wakes[0] == revision_name_of(target)

    pod = world.maker.made(target)
    await world.maker.boots(pod)
    await world.until(lambda: fleet.pods.of(target.key) and fleet.pods.of(target.key)[0].ip)
    await world.maker.serves(pod)
    info = await starting

    assert info.start_kind is StartKind.COLD
    assert list(info.phases_ms) == ["pod", "boot", "enter", "claim"]
    assert [asked.path for asked in world.server.requests if asked.verb != "watch"] == []


async def test_two_starts_of_one_activator_take_two_pods(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    one, two = await world.maker.up(target), await world.maker.up(target)

    infos = await asyncio.gather(world.start(fleet, target, 1), world.start(fleet, target, 2))

    assert {info.socket for info in infos} == {f"tcp:{one.ip}:8012", f"tcp:{two.ip}:8012"}


async def test_the_same_start_asked_again_is_the_same_pod(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    await world.maker.up(target)
    await world.maker.up(target)
    assert (await world.start(fleet, target)).socket == (await world.start(fleet, target)).socket


async def test_a_start_that_is_abandoned_leaves_the_pod_to_the_next(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    starting = _started(world, fleet, target, 1)
    await world.woken.wait()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    pod = await world.maker.up(target)
    assert (await world.start(fleet, target, 2)).socket == f"tcp:{pod.ip}:8012"


async def test_a_pod_given_back_is_the_next_ones(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    await world.maker.up(target)
    first = await world.start(fleet, target, 1)
    await fleet.stop(first.id, grace_s=1.0)
    await fleet.stop(first.id, grace_s=1.0)
    assert (await world.start(fleet, target, 2)).socket == first.socket


async def test_a_pod_whose_calls_do_not_end_is_deleted(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    pod = await world.maker.up(target)
    info = await world.start(fleet, target)
    pod.running = 1
    await fleet.stop(info.id, grace_s=0.0)
    stored = world.server.get("v1", "Pod", pod.name, pod.namespace)
    assert stored is not None
    assert "deletionTimestamp" in stored["metadata"]


async def test_an_unknown_instance_is_stopped_without_a_word(world: World) -> None:
    fleet = await world.fleet()
    writes = world.server.requests.writes()
    await fleet.stop(InstanceId("i-nobody"), grace_s=1.0)
    assert world.server.requests.writes() == writes


# -- no use in waiting -----------------------------------------------------------------------------


async def test_an_image_that_cannot_be_pulled_fails_the_start_with_the_reason(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    starting = _started(world, fleet, target)
    pod = world.maker.made(target)
    world.maker.waiting(pod, "ErrImagePull", "manifest unknown: registry.example/fn")
    await world.until(lambda: [p for p in fleet.pods.of(target.key) if p.obstacle])
    world.maker.waiting(pod, "ImagePullBackOff", "Back-off pulling image")
    with pytest.raises(errors.BundleUnavailable, match="manifest unknown"):
        await starting


async def test_a_pod_that_no_node_takes_is_no_capacity_with_the_schedulers_words(
    world: World,
) -> None:
    target, fleet = world.target(), await world.fleet()
    starting = _started(world, fleet, target)
    world.maker.unschedulable(
        world.maker.made(target), "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    )
    with pytest.raises(errors.NoCapacity, match=r"0/3 nodes are available") as refused:
        await starting
    assert refused.value.detail["resource"] == "gpu"


async def test_a_node_that_comes_within_the_grace_is_waited_for(world: World) -> None:
    target, fleet = world.target(), await world.fleet(grace_s=60)
    starting = _started(world, fleet, target)
    pod = world.maker.made(target)
    world.maker.unschedulable(pod, "0/3 nodes are available")
    await world.until(lambda: [p for p in fleet.pods.of(target.key) if p.obstacle])
    await world.maker.boots(pod)
    await world.maker.serves(pod)
    assert (await starting).socket == f"tcp:{pod.ip}:8012"


async def test_a_worker_that_ends_before_it_is_ready_fails_the_start_with_its_last_words(
    world: World,
) -> None:
    target, fleet = world.target(), await world.fleet()
    starting = _started(world, fleet, target)
    pod = world.maker.made(target)
    await world.maker.boots(pod)
    await world.until(lambda: fleet.pods.of(target.key))
    world.maker.restarted(pod, message="ModuleNotFoundError: No module named 'torch'")
    with pytest.raises(errors.StartFailed, match="No module named 'torch'"):
        await starting


async def test_a_quota_without_room_is_no_capacity(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    starting = _started(world, fleet, target)
    world.maker.cannot_be_made(
        target,
        'pods "hello" is forbidden: exceeded quota: tenant, requested: pods=1, used: pods=4, '
        "limited: pods=4",
    )
    with pytest.raises(errors.NoCapacity, match="exceeded quota") as refused:
        await starting
    assert refused.value.detail["resource"] == "quota"


async def test_pods_that_the_cluster_refuses_for_good_fail_the_start(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    starting = _started(world, fleet, target)
    world.maker.cannot_be_made(
        target, 'pods "hello" is forbidden: violates PodSecurity "restricted"'
    )
    with pytest.raises(errors.StartFailed, match="PodSecurity"):
        await starting


async def test_the_startup_clock_says_how_far_the_pod_came(world: World) -> None:
    base, fleet = world.target(clocks=Clocks(startup_s=0.3)), await world.fleet()
    pod = world.maker.made(base)
    world.maker.waiting(pod, "ContainerCreating")
    await world.until(
        lambda: any("ContainerCreating" in known.stage for known in fleet.pods.of(base.key))
    )
    with pytest.raises(errors.StartTimeout, match=f"pod {pod.name}: .*ContainerCreating"):
        await world.start(fleet, base)


async def test_without_any_pod_the_startup_clock_says_what_came_of_waking(world: World) -> None:
    # the wake's answer is part of it
    target, fleet = world.target(clocks=Clocks(startup_s=1.0)), await world.fleet()
    with pytest.raises(errors.StartTimeout, match=r"no pod was created .*answered 404"):
        await world.start(fleet, target)


# -- pods that go ----------------------------------------------------------------------------------


async def test_a_pod_that_is_asked_to_go_is_told_of_and_then_gone(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    pod = await world.maker.up(target)
    info = await world.start(fleet, target)

    await world.maker.asked_to_go(pod)
    event = await _event(fleet)
    assert (event.kind, event.subject) == ("instance_stopping", info.id)
    await world.maker.gone(pod)
    event = await _event(fleet)
    assert (event.kind, event.subject, event.reason) == ("instance_gone", info.id, "deleted")


async def test_the_worker_of_a_pod_that_is_being_deleted_is_ended_once_no_call_runs_in_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_deletion, "RUNNING_S", 0.05)
    board = PodLeaseTable(lambda: {"a-0", "a-1"})
    one, two = [
        await world.fleet(member, InMemoryPodLeases(board, member=member))
        for member in ("a-0", "a-1")
    ]
    for fleet in (one, two):
        await fleet.adopt()
    target = world.target()
    claimed = await world.maker.up(target)
    await world.start(one, target)
    free = await world.maker.up(target)
    claimed.running, probes = 2, claimed.probes
    for pod in (claimed, free):
        await world.maker.asked_to_go(pod)
    await world.until(lambda: free.is_ended)
    await world.until(lambda: claimed.probes > probes + 2)
    assert not claimed.is_ended
    claimed.running = 0
    await world.until(lambda: claimed.is_ended)


async def test_the_worker_of_a_pod_that_was_deleted_before_it_had_an_address_is_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_deletion, "RUNNING_S", 0.05)
    target, fleet = world.target(), await world.fleet()
    await fleet.adopt()
    pod = world.maker.made(target)
    await world.until(lambda: fleet.pods.find(pod.uid))
    await world.maker.asked_to_go(pod)
    await world.until(lambda: any(one.is_ending for one in fleet.pods.of(target.key)))
    await asyncio.sleep(0.2)  # it is looked for, in vain
    await world.maker.boots(pod)
    await world.maker.serves(pod)
    await world.until(lambda: pod.is_ended)


async def test_an_evicted_pod_is_gone_with_that_word(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    pod = await world.maker.up(target)
    info = await world.start(fleet, target)
    await world.maker.evicted(pod)
    event = await _event(fleet)
    assert (event.kind, event.subject, event.reason) == ("instance_gone", info.id, "evicted")
    assert "low on resource" in event.message


async def test_a_worker_that_ends_while_it_serves_is_replaced_and_the_next_call_waits_for_that(
    world: World,
) -> None:
    target, fleet = world.target(), await world.fleet()
    pod = await world.maker.up(target)
    info = await world.start(fleet, target, 1)
    await world.maker.dies(pod)
    world.maker.ended(pod, exit_code=137, reason="OOMKilled")
    event = await _event(fleet)
    assert (event.kind, event.subject, event.reason) == ("instance_gone", info.id, "out_of_memory")
    starting = _started(world, fleet, target, 2)
    await world.until(lambda: is_leaving(world, pod))
    world.maker.waiting(pod, "CrashLoopBackOff", "back-off 5m0s restarting failed container")
    await asyncio.sleep(0.6)  # two looks of a start that waits
    assert not starting.done()
    other = await world.maker.up(target)
    assert (await starting).socket == f"tcp:{other.ip}:8012"


async def test_a_pod_that_crashed_while_nobody_had_it_fails_no_start_either(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    pod = await world.maker.up(target)
    await world.until(lambda: [one for one in fleet.pods.of(target.key) if one.is_ready])
    await world.maker.dies(pod)
    world.maker.ended(pod)
    world.maker.waiting(pod, "CrashLoopBackOff", restarts=3, last=TERMINATED)
    await world.until(lambda: [one for one in fleet.pods.of(target.key) if one.obstacle])
    assert not is_leaving(world, pod)  # nobody needs it
    starting = _started(world, fleet, target)
    await world.until(lambda: is_leaving(world, pod))
    other = await world.maker.up(target)
    assert (await starting).socket == f"tcp:{other.ip}:8012"


async def test_a_crash_that_is_known_here_before_the_kubelet_tells_is_no_failed_start(
    world: World,
) -> None:
    target, fleet = world.target(), await world.fleet()
    pod = world.maker.made(target)
    await world.maker.boots(pod)
    await world.maker.serves(pod)  # Kubernetes does not call it ready yet
    info = await world.start(fleet, target)
    await world.maker.dies(pod)
    await fleet.stop(info.id, grace_s=0.0)  # its connection broke
    waiting = _started(world, fleet, target, 1)
    world.maker.ended(pod)
    await world.until(lambda: [one.ending is not None for one in fleet.pods.of(target.key)])
    world.maker.restarted(pod)
    await world.maker.serves(pod)
    assert (await waiting).socket == f"tcp:{pod.ip}:8012"


async def test_a_function_that_ends_every_worker_cannot_have_pods_deleted_without_end(
    world: World,
) -> None:
    target, fleet = world.target(), await world.fleet()
    pods = []
    for number in range(REPLACEMENTS + 1):
        pods.append(pod := await world.maker.up(target))
        await world.start(fleet, target, number)
        await world.maker.dies(pod)
        world.maker.ended(pod)
        await _event(fleet)
    await world.until(lambda: all(is_leaving(world, pod) for pod in pods[:-1]))
    world.maker.waiting(pods[-1], "CrashLoopBackOff", restarts=1, last=TERMINATED)
    await world.until(lambda: [one for one in fleet.pods.of(target.key) if one.obstacle])
    with pytest.raises(errors.StartFailed, match="exits repeatedly"):
        await world.start(fleet, target, 99)
    assert not is_leaving(world, pods[-1])


async def test_a_pod_that_cannot_be_deleted_serves_again_once_its_worker_is_restarted(
    world: World,
) -> None:
    target, fleet = world.target(), await world.fleet()
    pod = await world.maker.up(target)
    await world.start(fleet, target, 1)
    world.server.rights.deny("delete", "pods", namespace=pod.namespace)
    world.maker.restarted(pod)
    await _event(fleet)
    assert (await world.start(fleet, target, 2)).socket == f"tcp:{pod.ip}:8012"


# -- the API server is away ------------------------------------------------------------------------


async def test_nothing_is_gone_and_free_pods_are_still_taken_while_the_api_server_is_away(
    world: World,
) -> None:
    target, fleet = world.target(), await world.fleet(grace_s=20)
    await world.maker.up(target)
    second = await world.maker.up(target)
    first = await world.start(fleet, target, 1)
    await world.until(lambda: len(fleet.pods.of(target.key)) == 2)
    async with away(world.server):
        info = await world.start(fleet, target, 2)

        assert {first.socket, info.socket} >= {f"tcp:{second.ip}:8012"}
        assert {i.id for i in await fleet.adopt()} == {first.id, info.id}
        starting = _started(world, fleet, target, 3)
        await world.woken.wait()  # who has none of its own is woken all the same
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(fleet.watch()), 0)
    third = await world.maker.up(target)
    assert (await starting).socket == f"tcp:{third.ip}:8012"


async def test_a_start_without_a_pod_ends_with_the_reason_while_the_api_server_is_away(
    world: World,
) -> None:
    target, fleet = world.target(), await world.fleet()
    async with away(world.server):
        with pytest.raises(Unavailable, match="no pod is made") as refused:
            await world.start(fleet, target)
        assert refused.value.retry_after_s
        unsynced = await world.fleet("a-1", synced=False)
        with pytest.raises(Unavailable, match="API server has not answered"):
            await world.start(unsynced, target, 1)
    await world.until(lambda: not world.cluster.away_s)
    starting = _started(world, fleet, target, 2)
    pod = await world.maker.up(target)
    assert (await starting).socket == f"tcp:{pod.ip}:8012"


async def test_what_went_while_the_api_server_was_away_is_known_once_it_is_back(
    world: World,
) -> None:
    target, fleet = world.target(), await world.fleet()
    pod = await world.maker.up(target)
    info = await world.start(fleet, target)
    async with away(world.server):
        pass
    world.server.expire_watches()
    await world.maker.gone(pod)
    event = await _event(fleet)
    assert (event.kind, event.subject) == ("instance_gone", info.id)


async def test_watches_that_are_cut_again_and_again_lose_nothing(world: World) -> None:
    world.server.faults.cut_watches_every_s = 0.02
    target, fleet = world.target(), await world.fleet(grace_s=10.0)
    for number in range(5):
        starting = _started(world, fleet, target, number)
        pod = await world.maker.up(target)
        assert (await starting).socket == f"tcp:{pod.ip}:8012"


# -- after a restart -------------------------------------------------------------------------------


async def test_what_was_ours_is_ours_again(world: World) -> None:
    target, board = world.target(), PodLeaseTable(lambda: ("a-0",))
    before = await world.fleet("a-0", InMemoryPodLeases(board, member="a-0"))
    pod = await world.maker.up(target)
    info = await world.start(before, target)

    after = await world.fleet("a-0", InMemoryPodLeases(board, member="a-0"))
    await world.until(lambda: after.pods.of(target.key))
    adopted = await after.adopt()

    assert [(i.id, i.socket, i.revision) for i in adopted] == [
        (info.id, f"tcp:{pod.ip}:8012", target.launch.revision)
    ]
    assert replace(adopted[0], started_at=0.0).labels == target.launch.labels

    await world.maker.asked_to_go(pod)
    last = await world.fleet("a-0", InMemoryPodLeases(board, member="a-0"))
    await world.until(lambda: [one.is_ending for one in last.pods.of(target.key)] == [True])
    assert await last.adopt() == []


async def test_what_nobody_routes_to_any_more_is_not_taken_back(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    await world.maker.up(target)
    await world.start(fleet, target)
    world.targets.clear()
    assert await fleet.adopt() == []


async def test_without_what_activators_share_nothing_is_claimed_and_what_is_ours_stays(
    world: World,
) -> None:
    class Mute(InMemoryPodLeases):
        is_mute = False

        async def claim(
            self, revision: str, instance: str, lives: Sequence[str], *, pods: int
        ) -> str | None:
            return (
                await super().claim(revision, instance, lives, pods=pods)
                if not self.is_mute
                else self._refuse()
            )

        async def state(self) -> frozenset[str]:
            return await super().state() if not self.is_mute else self._refuse()

        def _refuse(self) -> NoReturn:
            raise ClaimsUnreachable("Redis at r:6379 does not answer")

    claims = Mute(member="a-0")
    target, fleet = world.target(), await world.fleet(claims=claims)
    await fleet.adopt()
    await world.maker.up(target)
    first = await world.start(fleet, target, 1)
    claims.is_mute = True
    second = await world.maker.up(target)
    starting = _started(world, fleet, target, 2)
    await world.woken.wait()
    await fleet.claims.state()
    assert [info.id for info in await fleet.adopt()] == [first.id]
    assert not starting.done()
    claims.is_mute = False
    assert (await starting).socket == f"tcp:{second.ip}:8012"


async def test_a_pod_that_another_activator_took_gets_no_more_calls_and_is_not_touched(
    world: World,
) -> None:
    living = {"a-0", "a-1"}
    board = PodLeaseTable(lambda: living)
    one, two = [
        await world.fleet(member, InMemoryPodLeases(board, member=member))
        for member in ("a-0", "a-1")
    ]
    await one.adopt()
    target = world.target()
    pod = await world.maker.up(target)
    mine = await world.start(one, target, 1)
    living.discard("a-0")  # it fell silent
    await world.start(two, target, 2)
    living.add("a-0")
    await one.claims.state()
    event = await _event(one)
    assert (event.kind, event.subject, event.reason) == ("instance_stopping", mine.id, "lost")
    pod.running = 3
    await one.stop(mine.id, grace_s=0.0)
    stored = world.server.get("v1", "Pod", pod.name, pod.namespace)
    assert stored is not None
    assert "deletionTimestamp" not in stored["metadata"], "its calls are the other's"
    assert [info.id for info in await two.adopt()] == [InstanceId(f"i-{2:016x}")]


async def test_a_pod_that_another_takes_while_its_last_calls_are_waited_for_is_not_touched_either(
    world: World,
) -> None:
    living = {"a-0", "a-1"}
    board = PodLeaseTable(lambda: living)
    one, two = [
        await world.fleet(member, InMemoryPodLeases(board, member=member))
        for member in ("a-0", "a-1")
    ]
    await one.adopt()
    given_back: list[str] = []
    one.on_released = lambda pod: given_back.append(pod.name)
    target = world.target()
    pod = await world.maker.up(target)
    mine = await world.start(one, target, 1)
    pod.running = 3
    probes = pod.probes
    stopping = asyncio.create_task(one.stop(mine.id, grace_s=600.0))
    await world.until(lambda: pod.probes > probes)
    living.discard("a-0")
    await world.start(two, target, 2)
    living.add("a-0")
    await one.claims.state()
    await stopping
    stored = world.server.get("v1", "Pod", pod.name, pod.namespace)
    assert stored is not None
    assert "deletionTimestamp" not in stored["metadata"]
    assert given_back == []
    assert [info.id for info in await two.adopt()] == [InstanceId(f"i-{2:016x}")]


async def test_nothing_is_stated_before_what_was_ours_is_ours_again(world: World) -> None:
    target, board = world.target(), PodLeaseTable(lambda: ("a-0",))
    before = await world.fleet("a-0", InMemoryPodLeases(board, member="a-0"))
    pod = await world.maker.up(target)
    info = await world.start(before, target, 1)

    after = await world.fleet("a-0", InMemoryPodLeases(board, member="a-0"))
    await world.until(lambda: after.pods.of(target.key))
    await after.claims.state()

    assert [(one.id, one.socket) for one in await after.adopt()] == [
        (info.id, f"tcp:{pod.ip}:8012")
    ]
