"""Make before break: who answered before goes on until a revision that was given traffic has an
instance."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from activator.balancing.preemptible_instances import PreemptibleInstances
from activator.balancing.throttler import Throttler
from activator.quotas.store_protocol import QuotaStore
from activator.settings import ActivatorSettings
from pilotlight.spec.function import Clocks
from pilotlight.spec.policies import RolloutStrategy, RolloutTerms
from snapshotter import errors as agent_errors
from snapshotter.types import InstanceId
from tests.activator.conftest import Edge, served
from tests.activator.gateway.test_fast_path import in_flight
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import Behaviour
from tests.fakes.routes import TENANT, route_of, spec_of, split_route, target_of

V1, V2, V3 = "v1-aaaaaa", "v2-bbbbbb", "v3-cccccc"
NAME = f"{TENANT}/main/shop/hello"


@pytest.fixture(name="site")
async def _site(edge: Edge) -> Edge:
    """The first revision answers, and has its instance; the next starts wait until they are let
    go."""
    edge.table.handovers = edge.handovers
    edge.add(route_of(spec_of(), revision=V1))
    await edge.call(json={"x": 0})
    edge.fleet.gate.clear()
    return edge


def throttler(edge: Edge, revision: str) -> Throttler:
    return next(
        s.throttler
        for s in edge.scaler.revisions.values()
        if s.throttler.target.revision == revision
    )


def split(edge: Edge, weights: Mapping[str, int], **more: Any) -> None:
    edge.add(split_route(spec_of(**more.pop("spec", {})), weights, **more))


async def revision(edge: Edge, path: str = "shop/hello:invoke", **more: Any) -> str:
    answer = await edge.call(path, json={"x": 1}, **more)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["pilotlight-revision"])


async def test_calls_never_wait_for_the_new_revisions_start(site: Edge) -> None:
    split(site, {V2: 100})
    assert [await revision(site) for _ in range(4)] == [V1] * 4
    assert len(site.fleet.started) == 2  # the deploy began it, no call did
    site.fleet.gate.set()
    await until(lambda: not site.handovers.running)
    assert [await revision(site) for _ in range(3)] == [V2] * 3
    # the old one is drained, once nobody needs it
    await until(lambda: len(site.fleet.stopped) == 1)
    assert {t.revision for t in site.table.targets_of(NAME)} == {V2}


async def test_a_change_without_a_call_in_between_forgets_nobody(site: Edge) -> None:
    split(site, {V1: 100}, tags={"old": V1})
    split(site, {V2: 100})
    assert await revision(site) == V1
    site.fleet.gate.set()
    await until(lambda: not site.handovers.running)
    site.fleet.gate.clear()
    split(site, {V3: 100})  # right after the cutover
    assert await revision(site) == V2


async def test_calls_in_flight_end_where_they_began(site: Edge) -> None:
    answers = [
        asyncio.create_task(site.call(json={"x": 1}, headers={"pilotlight-timeout": "9"}))
        for _ in range(20)
    ]
    split(site, {V2: 100})
    site.fleet.gate.set()
    answers += [asyncio.create_task(site.call(json={"x": 2})) for _ in range(20)]
    statuses = {answer.status_code for answer in await asyncio.gather(*answers)}
    assert statuses == {200}
    await until(lambda: in_flight(site) == 0)


async def test_a_canary_without_an_instance_takes_nothing_until_it_has_one(site: Edge) -> None:
    split(site, {V1: 50, V2: 50}, sticky="header:x-user")
    users = [{"x-user": f"u-{n}"} for n in range(20)]
    assert {await revision(site, headers=user) for user in users} == {V1}
    site.fleet.gate.set()
    await until(lambda: not site.handovers.running)
    assert {await revision(site, headers=user) for user in users} == {V1, V2}


async def test_going_back_is_at_once(site: Edge) -> None:
    split(site, {V2: 100})
    assert await revision(site) == V1
    split(site, {V1: 100})
    assert not site.handovers.running
    assert await revision(site) == V1


async def test_who_goes_back_has_no_more_answers_of_what_was_bad(site: Edge) -> None:
    split(site, {V2: 100}, at_once=True)
    assert not site.handovers.running
    await until(lambda: len(site.fleet.started) == 2)  # begun by the change, not by a call
    call = asyncio.create_task(revision(site))
    await until(lambda: throttler(site, V2).waiting == 1)
    site.fleet.gate.set()
    assert await call == V2


async def test_several_deploys_while_one_is_handed_over_end_at_the_last(site: Edge) -> None:
    split(site, {V2: 100})
    split(site, {V3: 100})
    assert await revision(site) == V1
    site.fleet.gate.set()
    await until(lambda: not site.handovers.running)
    assert await revision(site) == V3
    await until(
        lambda: (
            throttler(site, V3).in_flight == 0
            and {i.id for i in throttler(site, V3).live()} == set(site.fleet.infos)
        )
    )


async def test_a_start_that_fails_is_made_again_and_nobody_notices(site: Edge) -> None:
    site.handovers.again_s = 0.0
    site.fleet.failures.append(agent_errors.StartFailed("the first one dies"))
    site.fleet.gate.set()
    split(site, {V2: 100})
    assert await revision(site) == V1
    await until(lambda: not site.handovers.running)
    assert await revision(site) == V2


async def test_a_revision_that_does_not_come_up_in_time_gets_its_traffic_all_the_same(
    site: Edge,
) -> None:
    split(site, {V2: 100}, spec={"clocks": Clocks(startup_s=0.05)})
    await until(lambda: not site.handovers.running)
    call = asyncio.create_task(revision(site))
    await until(lambda: throttler(site, V2).waiting == 1)
    site.fleet.gate.set()
    assert await call == V2


async def test_who_asks_for_the_new_revision_waits_for_it(site: Edge) -> None:
    split(site, {V2: 100}, tags={"next": V2})
    call = asyncio.create_task(revision(site, "shop/hello@next:invoke"))
    await until(lambda: throttler(site, V2).waiting == 1)
    assert await revision(site) == V1
    site.fleet.gate.set()
    assert await call == V2


async def test_a_function_without_an_instance_hands_nothing_over(edge: Edge) -> None:
    edge.table.handovers = edge.handovers
    edge.add(route_of(spec_of(), revision=V1))
    split(edge, {V2: 100})
    assert (edge.handovers.running, edge.fleet.started) == ({}, [])
    assert await revision(edge) == V2


async def test_a_function_that_goes_away_is_not_handed_over_any_more(site: Edge) -> None:
    split(site, {V2: 100})
    site.tell("function", NAME, None)
    assert not site.handovers.running
    assert (await site.call(json={"x": 1})).status_code == 404
    site.fleet.gate.set()


async def test_a_warm_up_brings_up_what_is_to_answer_not_what_answers_meanwhile(site: Edge) -> None:
    split(site, {V2: 100})
    warming = asyncio.create_task(site.call("shop/hello:warmup?snapshot=false"))
    await until(lambda: throttler(site, V2).waiting == 1)
    assert await revision(site) == V1
    site.fleet.gate.set()
    assert (await warming).json()["revision"] == V2


async def test_who_answered_before_and_is_gone_is_not_waited_for(site: Edge) -> None:
    split(site, {V2: 100})
    (old,) = throttler(site, V1).live()
    await site.fleet.kill(old.id, "crashed")
    await until(lambda: not throttler(site, V1).instances)
    call = asyncio.create_task(revision(site))
    await until(lambda: throttler(site, V2).waiting == 1)
    site.fleet.gate.set()
    assert await call == V2


# -- where there is no room for both ---------------------------------------------------------------
NO_ROOM = agent_errors.NoCapacity("1 GPUs wanted, 0 of 1 free on this node", {"resource": "gpu"})


async def test_a_process_that_was_restarted_goes_on_with_the_cutover_of_the_one_before(
    short_tmp: Path, settings: ActivatorSettings, behaviour: Behaviour, quota_store: QuotaStore
) -> None:
    edge = Edge(short_tmp, settings, behaviour, quota_store)
    edge.table.handovers = edge.handovers
    edge.table.on_function = edge.scaler.route_changed
    left = target_of(spec_of(), revision=V1)
    await edge.fleet.start(left, InstanceId("i-left"), {})
    edge.fleet.gate.clear()  # the new revision fits no node
    split(edge, {V2: 100}, named=(V1,), previous={V1: 100}, awaited=(V2,))
    async with served(edge):
        await edge.scaler.reconciled.wait()
        assert [await revision(edge) for _ in range(3)] == [V1] * 3
        edge.fleet.gate.set()
        await until(lambda: not edge.handovers.running)
        assert await revision(edge) == V2
        await until(lambda: [name for name, _ in edge.fleet.stopped] == ["i-left"])


async def test_who_answered_before_is_left_where_nobody_is_awaited_or_it_has_no_instance(
    short_tmp: Path, settings: ActivatorSettings, behaviour: Behaviour
) -> None:
    edge = Edge(short_tmp, settings, behaviour)
    edge.table.handovers = edge.handovers
    left = target_of(spec_of(), revision=V1)
    await edge.fleet.start(left, InstanceId("i-left"), {})
    split(edge, {V2: 100}, awaited=(V2,))  # it never ran, and neither did another
    assert edge.table.refused == 0
    async with served(edge):
        await until(lambda: [name for name, _ in edge.fleet.stopped] == ["i-left"])
        await edge.scaler.reconciled.wait()
        split(edge, {V3: 100}, named=(V2,), previous={V2: 100}, awaited=(V3,))
        assert await revision(edge) == V3  # a change while it runs is no restart


def terms(strategy: RolloutStrategy, keep_s: float = 0.0) -> dict[str, Any]:
    return {"rollout": RolloutTerms(strategy=strategy, keep_previous_s=keep_s)}


async def refuse_once(site: Edge, strategy: RolloutStrategy, **spec: Any) -> None:
    """The second revision is deployed; its first start finds no room, the next ones wait until they
    are let go."""
    site.handovers.again_s = 0.05
    site.fleet.failures.append(NO_ROOM)
    site.fleet.waits_after_failures = True
    site.fleet.gate.set()
    split(site, {V2: 100}, spec={**terms(strategy), **spec})
    await until(lambda: bool(site.handovers.running[NAME].lacking))
    site.fleet.waits_after_failures = False


async def test_swap_drains_the_old_one_when_the_new_one_lacks_room_and_calls_wait_in_between(
    site: Edge,
) -> None:
    await refuse_once(site, RolloutStrategy.SWAP)
    await until(lambda: len(site.fleet.stopped) == 1)  # room is made
    call = asyncio.create_task(revision(site))
    await until(lambda: throttler(site, V2).waiting == 1)
    site.fleet.gate.set()
    assert await call == V2
    await until(lambda: not site.handovers.running)


async def test_swap_lets_the_old_one_be_where_there_is_room_for_both(site: Edge) -> None:
    site.handovers.again_s = 0.0
    split(site, {V2: 100}, spec=terms(RolloutStrategy.SWAP))
    for _ in range(5):
        assert await revision(site) == V1
    assert site.fleet.stopped == []


async def test_swap_goes_back_to_the_old_one_while_the_new_one_does_not_start(site: Edge) -> None:
    await refuse_once(site, RolloutStrategy.SWAP)
    await until(lambda: len(site.fleet.stopped) == 1)
    site.fleet.failures.append(agent_errors.StartFailed("it raises"))
    site.handovers.again_s = 60.0
    site.fleet.gate.set()
    await until(lambda: bool(site.handovers.running[NAME].broken))
    assert await revision(site) == V1  # a start of its own


async def test_wait_leaves_the_old_one_alone_for_as_long_as_there_is_no_room(
    site: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await refuse_once(site, RolloutStrategy.WAIT, clocks=Clocks(startup_s=0.5))
    await until(lambda: "cutover waits for capacity" in caplog.text)
    assert await revision(site) == V1
    assert site.fleet.stopped == []
    site.fleet.gate.set()
    await until(lambda: not site.handovers.running)
    assert await revision(site) == V2


async def test_nothing_starts_once_instances_are_let_go(site: Edge) -> None:
    assert await revision(site) == V1
    own, before = throttler(site, V1), len(site.fleet.started)
    await site.scaler.aclose()
    own.start(1)
    await asyncio.sleep(0)
    assert (own.starting, len(site.fleet.started)) == (0, before)


async def test_the_revision_before_keeps_one_instance_for_the_way_back(site: Edge) -> None:
    split(site, {V2: 100}, spec=terms(RolloutStrategy.SURGE, keep_s=600))
    site.fleet.gate.set()
    await until(lambda: not site.handovers.running)
    assert await revision(site) == V2
    assert (len(list(throttler(site, V1).live())), site.fleet.stopped) == (1, [])
    candidates = PreemptibleInstances(site.scaler.throttlers).tenures()
    assert next(candidates).is_spare, "the first to go when somebody needs its room"
    split(site, {V1: 100}, at_once=True)
    started = len(site.fleet.started)
    assert await revision(site) == V1
    assert len(site.fleet.started) == started
    await until(lambda: len(site.fleet.stopped) == 1)  # the bad one: nobody goes back to it


async def test_what_is_kept_for_the_way_back_goes_when_its_time_is_over(site: Edge) -> None:
    split(site, {V2: 100}, spec=terms(RolloutStrategy.SURGE, keep_s=600))
    site.fleet.gate.set()
    await until(lambda: not site.handovers.running)
    old = throttler(site, V1)
    assert list(old.live())
    old.kept_until = 0.0
    site.scaler.apply(site.scaler.revisions[old.target.key], asyncio.get_running_loop().time())
    await until(lambda: len(site.fleet.stopped) == 1)
