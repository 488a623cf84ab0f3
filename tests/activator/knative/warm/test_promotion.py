"""Starts in warm pods: promoted, refused, lost, and where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from activator.knative.deletion_cost import DeletionCosts
from activator.knative.fleet import KnativeFleet
from activator.knative.leases.pod_leases import InMemoryPodLeases, PodLeaseStore, PodLeaseTable
from activator.knative.warm import promotion as promotion_module
from activator.knative.warm import unclaimed_pods as unclaimed_module
from activator.knative.warm.promotion import WarmPods
from activator.knative.warm.waiting_starts import Promotions
from activator.routing.route_table import CallTarget
from snapshotter import errors
from snapshotter.types import InstanceId, InstanceInfo, StartKind
from tests.fakes.clock import ManualClock
from tests.fakes.small_cluster import World
from tests.fakes.warm_pool import WarmPool

SECRETS = {"TOKEN": "s3cret"}


async def fleet_of(
    world: World,
    pool: WarmPool,
    member: str = "a-0",
    claims: PodLeaseStore | None = None,
    *,
    source: WarmPods | None = None,
    is_called: bool = True,
    patience_s: float = 30.0,
) -> KnativeFleet:
    """An activator's fleet with that pool."""
    promotions = Promotions(
        source=source or pool.source(member),
        has_calls=lambda _: is_called,
        patience_s=patience_s,
    )
    fleet = await world.fleet(member, claims, promotions=promotions)
    await fleet.adopt()
    return fleet


async def start(
    fleet: KnativeFleet, target: CallTarget, number: int = 0, secrets: Mapping[str, str] = SECRETS
) -> InstanceInfo:
    return await fleet.start(target, InstanceId(f"i-{number:016x}"), secrets)


async def test_a_call_from_zero_gets_a_warm_pod_with_the_secrets_and_knative_is_not_woken(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    (warm,) = await pool.add()
    info = await start(fleet, target)
    assert info.start_kind is StartKind.RESTORE
    assert info.socket == f"tcp:{warm.pod.ip}:8080"  # there is no queue-proxy
    assert list(info.phases_ms) == ["warm", "pod", "boot", "enter", "claim"]
    (document,) = warm.documents
    assert document["secrets"] == SECRETS
    assert document["launch"]["seal"] == warm.pod.uid
    (asked,) = pool.asked
    assert (asked["attempt"], asked["member"], asked["exclude"]) == (str(info.id), "a-0", [])
    assert world.wakes == []
    owned = fleet.owned(warm.pod.uid)
    assert owned is not None  # so that functions in it call others


async def test_ten_starts_at_once_get_ten_pods(world: World, pool: WarmPool) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    await pool.add(10)
    infos = await asyncio.gather(*(start(fleet, target, number) for number in range(10)))
    assert len({info.socket for info in infos}) == 10
    assert {info.start_kind for info in infos} == {StartKind.RESTORE}
    assert world.wakes == []


async def test_without_a_warm_pod_a_start_goes_the_ordinary_way_and_soon_does_not_ask(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    starting = asyncio.create_task(start(fleet, target))
    await world.woken.wait()
    await world.maker.up(target)
    info = await starting
    assert info.socket.endswith(":8012")
    other = asyncio.create_task(start(fleet, target, 1))
    await world.until(lambda: repr(fleet).endswith("not synced>") or "1 starts wait" in repr(fleet))
    await world.maker.up(target)
    await other
    assert len(pool.asked) == 1


async def test_starts_are_promised_a_promoted_pod_until_they_have_one_or_request_an_own_pod(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    await pool.add(1)
    assert fleet.starts.promised(target.key) == 0
    starts = [asyncio.create_task(start(fleet, target, number)) for number in range(2)]
    await world.until(lambda: fleet.starts.promised(target.key) > 0)
    await world.woken.wait()
    await world.until(lambda: "1 starts wait" in repr(fleet))  # the other one has the warm pod
    await world.until(lambda: fleet.starts.promised(target.key) == 0)  # or its promotion is asked
    await world.maker.up(target)
    await asyncio.gather(*starts)


async def test_more_starts_than_warm_pods_are_served_by_both(world: World, pool: WarmPool) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    await pool.add(1)
    starts = [asyncio.create_task(start(fleet, target, number)) for number in range(2)]
    await world.woken.wait()
    await world.maker.up(target)
    ports = sorted(info.socket.rpartition(":")[2] for info in await asyncio.gather(*starts))
    assert ports == ["8012", "8080"]


async def test_what_no_call_waits_for_is_not_promoted(world: World, pool: WarmPool) -> None:
    target, fleet = world.target(), await fleet_of(world, pool, is_called=False)
    await pool.add()
    starting = asyncio.create_task(start(fleet, target))
    await world.woken.wait()
    await world.maker.up(target)
    await starting
    assert pool.asked == []


async def test_a_pod_that_refuses_is_deleted_and_another_one_tried(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    refusing, good = await pool.add(2)
    refusing.refuses = 409
    info = await start(fleet, target)
    assert info.socket == f"tcp:{good.pod.ip}:8080"
    assert [one["exclude"] for one in pool.asked] == [[], [refusing.pod.uid]]
    await world.until(lambda: [one["uid"] for one in pool.deleted] == [refusing.pod.uid])


async def test_after_two_pods_that_do_not_answer_the_start_goes_the_ordinary_way(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    pods = await pool.add(3)
    for warm in pods:  # their launchers are dead, and Kubernetes has not noticed
        await world.maker.dies(warm.pod)
    starting = asyncio.create_task(start(fleet, target))
    await world.woken.wait()
    await world.maker.up(target)
    assert (await starting).socket.endswith(":8012")
    assert len(pool.asked) == 2
    await world.until(lambda: len(pool.deleted) == 2)


async def test_a_promoted_pod_that_dies_before_it_serves_leaves_the_start_to_knative(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    (warm,) = await pool.add()
    warm.is_slow = True
    starting = asyncio.create_task(start(fleet, target))
    await world.until(lambda: warm.documents)
    assert world.wakes == []
    await world.maker.gone(warm.pod)  # its node was lost: nothing that the worker did
    await world.woken.wait()
    await world.maker.up(target)
    assert (await starting).socket.endswith(":8012")


async def test_a_worker_that_ends_in_a_promoted_pod_fails_the_start_with_its_words(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    (warm,) = await pool.add()
    warm.is_slow = True
    starting = asyncio.create_task(start(fleet, target))
    world.maker.called_ready(warm.pod)  # as every warm pod is
    await world.until(lambda: any(pod.is_ready for pod in fleet.pods.of(target.key)))
    world.maker.restarted(warm.pod, message="ModuleNotFoundError: No module named 'torch'")
    with pytest.raises(errors.StartFailed, match="No module named 'torch'"):
        await starting
    # the restarted container runs nothing, and nobody takes it for an instance
    assert [pod.is_usable for pod in fleet.pods.of(target.key)] == [False]


async def test_a_promoted_pod_that_the_node_agent_refuses_leaves_the_start_to_knative(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    (warm,) = await pool.add()
    warm.is_slow = True
    starting = asyncio.create_task(start(fleet, target))
    await world.until(lambda: fleet.pods.of(target.key))
    world.maker.restarted(warm.pod, exit_code=69, message="launcher.refused")
    await world.woken.wait()
    await world.maker.up(target)
    assert (await starting).socket.endswith(":8012")


async def test_a_slow_promotion_is_accompanied_by_a_request_after_the_patience(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool, patience_s=0.1)
    (warm,) = await pool.add()
    warm.is_slow = True
    starting = asyncio.create_task(start(fleet, target))
    await world.woken.wait()
    await pool.serves(warm, "COLD")
    info = await starting
    assert (info.start_kind, info.socket) == (StartKind.COLD, f"tcp:{warm.pod.ip}:8080")


async def test_an_abandoned_start_leaves_its_promoted_pod_to_the_next(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    (warm,) = await pool.add()
    warm.is_slow = True
    starting = asyncio.create_task(start(fleet, target))
    await world.until(lambda: pool.asked)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await world.until(lambda: warm.documents)
    await pool.serves(warm)
    await world.until(lambda: fleet.pods.of(target.key))
    assert (await start(fleet, target, 1)).socket == f"tcp:{warm.pod.ip}:8080"


async def test_two_activators_that_ask_at_once_have_a_pod_each_and_never_one_together(
    world: World, pool: WarmPool
) -> None:
    board = PodLeaseTable(lambda: {"a-0", "a-1"})
    one, two = [
        await fleet_of(world, pool, member, InMemoryPodLeases(board, member=member))
        for member in ("a-0", "a-1")
    ]
    target = world.target()
    await pool.add(2)
    infos = await asyncio.gather(start(one, target, 1), start(two, target, 2))
    assert len({info.socket for info in infos}) == 2
    assert len(board.owners) == 2


# -- the controller --------------------------------------------------------------------------------


async def test_while_the_controller_is_away_starts_go_the_ordinary_way_and_soon_ask_no_more(
    world: World, pool: WarmPool
) -> None:
    clock = ManualClock()
    source = pool.source(clock=clock)
    target, fleet = world.target(), await fleet_of(world, pool, source=source)
    await pool.add(3)
    pool.status = 503
    for number in range(4):
        starting = asyncio.create_task(start(fleet, target, number))
        await world.until(lambda: "1 starts wait" in repr(fleet))
        await world.maker.up(target)
        await starting
    assert "controller open" in repr(source)
    pool.status = 0
    clock.advance(60.0)
    assert (await start(fleet, target, 9)).socket.endswith(":8080")
    assert "controller closed" in repr(source)


async def test_a_silent_controller_costs_a_start_its_time_out_and_no_more(
    world: World, pool: WarmPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion_module, "ASK_S", 0.1)
    target, fleet = world.target(), await fleet_of(world, pool)
    pool.is_silent = True
    starting = asyncio.create_task(start(fleet, target))
    await world.woken.wait()
    await world.maker.up(target)
    await starting


async def test_a_pod_whose_claim_was_not_answered_is_found_again(
    world: World, pool: WarmPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an API server that takes longer for the claim than the activator waits."""
    monkeypatch.setattr(promotion_module, "FIND_PAUSES_S", (0.3, 0.1, 0.1))
    target, fleet = world.target(), await fleet_of(world, pool)
    (warm, other) = await pool.add(2)
    pool.loses_answers = True
    starting = asyncio.create_task(start(fleet, target))
    await world.woken.wait()  # meanwhile it goes the ordinary way
    another = asyncio.create_task(start(fleet, target, 1))
    await world.until(lambda: "2 starts wait" in repr(fleet))
    pool.loses_answers = False
    info = next(
        done.result()
        for done in (await asyncio.wait((starting, another), return_when="FIRST_COMPLETED"))[0]
    )
    assert info.socket == f"tcp:{warm.pod.ip}:8080"
    assert other.documents == []  # neither start took a second one
    assert [(one["attempt"], one.get("claimed_only")) for one in pool.asked] == [
        ("i-0000000000000000", None),
        ("i-0000000000000000", True),
    ]
    await world.maker.up(target)
    await asyncio.gather(starting, another)


async def test_a_late_pod_that_no_start_waits_for_is_deleted(
    world: World, pool: WarmPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion_module, "FIND_PAUSES_S", (0.1, 0.1, 0.1, 0.1))
    target, fleet = world.target(), await fleet_of(world, pool)
    (warm,) = await pool.add()
    pool.loses_answers = True
    starting = asyncio.create_task(start(fleet, target))
    await world.woken.wait()
    await world.maker.up(target)
    await starting
    pool.loses_answers = False
    await world.until(lambda: [one["uid"] for one in pool.deleted] == [warm.pod.uid])
    assert warm.documents == []


# -- the end ---------------------------------------------------------------------------------------


async def test_a_promoted_pod_that_is_not_needed_is_left_to_others_and_then_deleted(
    world: World, pool: WarmPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unclaimed_module, "RELEASED_S", 0.3)
    target, fleet = world.target(), await fleet_of(world, pool)
    (warm,) = await pool.add()
    info = await start(fleet, target)
    await fleet.stop(info.id, grace_s=1.0)
    again = await start(fleet, target, 1)
    assert again.socket == info.socket
    await asyncio.sleep(0.4)
    assert pool.deleted == []  # it is somebody's
    await fleet.stop(again.id, grace_s=1.0)
    await world.until(lambda: [one["uid"] for one in pool.deleted] == [warm.pod.uid])
    assert pool.deleted[0]["reason"] == "it was idle"


async def test_a_promoted_pod_whose_calls_do_not_end_is_deleted_through_the_controller(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    (warm,) = await pool.add()
    info = await start(fleet, target)
    warm.pod.running = 1
    await fleet.stop(info.id, grace_s=0.0)
    assert [one["reason"] for one in pool.deleted] == ["its calls do not end"]


async def test_a_promoted_pod_whose_worker_ended_while_it_served_is_deleted_at_once(
    world: World, pool: WarmPool
) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    (warm,) = await pool.add()
    await start(fleet, target)
    writes = world.server.requests.writes()
    world.maker.ended(warm.pod)
    await world.until(lambda: [one["uid"] for one in pool.deleted] == [warm.pod.uid])
    assert world.server.requests.writes() - writes <= 1  # the activator itself wrote nothing


async def test_the_order_of_deletion_is_of_own_pods_only(world: World, pool: WarmPool) -> None:
    target, fleet = world.target(), await fleet_of(world, pool)
    (warm,) = await pool.add()
    await start(fleet, target)
    own = await world.maker.up(target)
    await world.until(lambda: len(fleet.pods.of(target.key)) == 2)
    loads = {warm.pod.uid: (target.key, 1), own.uid: (target.key, 1)}
    world.server.requests.clear()
    await DeletionCosts(fleet.pods, world.cluster, load_of=lambda: loads).update()
    assert [asked.name for asked in world.server.requests if asked.wrote] == [own.name]
