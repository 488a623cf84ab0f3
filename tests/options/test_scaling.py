"""Proofs of how a function scales, its clocks, retries, batches, and how a revision replaces
another."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from activator.async_calls.records import queued
from activator.autoscaler.decider import decide, initial_state
from activator.autoscaler.observation import RevisionObservation
from activator.autoscaler.scaling_decision import DeciderSpec
from activator.balancing.instance import slots_of
from activator.knative.autoscaler.load_aggregation import RevisionLoad
from activator.knative.autoscaler.podautoscalers import Scalable, parsed
from activator.knative.autoscaler.scaling import RevisionScale, RevisionStatus
from activator.knative.autoscaler.scaling import spec_of as spec_of_pods
from activator.resilience.declared_retries import delay_s
from activator.routing.api_keys import Principal
from pilotlight.controller.deployments.fleet_checks import check_cluster
from pilotlight.controller.kubernetes.buffer_floors import ObservedTraffic, floor_of
from pilotlight.controller.kubernetes.rollout_step import KEPT, next_step
from pilotlight.errors import InvalidInput
from pilotlight.kubernetes.manifests.autoscaling import concurrency
from pilotlight.kubernetes.manifests.knative_service import revision_names
from pilotlight.kubernetes.manifests.revisions import RevisionOf
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.protocol import FunctionRoute, KeyRecord
from pilotlight.schedules.scaling_schedules import floor_at
from pilotlight.spec.function import Clocks, FunctionSpec, MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.policies import (
    BatchPolicy,
    RetryPolicy,
    RolloutStrategy,
    RolloutTerms,
    ScalingSchedule,
)
from pilotlight.spec.quotas import Plan
from pilotlight.spec.record_json import from_json
from pilotlight.worker.batching.batch_key import batch_key_for
from pilotlight.worker.batching.latency_model import LatencyFit
from pilotlight.worker.batching.release_policy import BatchState, ReleaseReason, decide_release
from pilotlight.worker.snapshot.hooks import warm_up
from pilotlight.worker.user_code.target import make_target
from snapshotter import errors as agent_errors
from tests.activator.conftest import Edge
from tests.activator.test_gateway import until
from tests.fakes.calls import call_of
from tests.fakes.fake_worker import Flaky, WorkerAnswer, WorkerRequest
from tests.fakes.fed_platform import document_of, spec
from tests.fakes.routes import TENANT, change, route_of, spec_of, split_route
from tests.functions.worker.batching.test_gathering import World as BatchWorld
from tests.options.contract import CLUSTER, LOCAL, proves
from tests.options.world import (
    SETTINGS,
    launched,
    pod,
    scaling,
    scaling_annotations,
    serving,
    template,
    tenancy_of,
)

OURS = replace(SETTINGS, autoscaler="pilotlight")
BUSY = RevisionObservation(stable=2.0, panic=2.0, ready=2, in_flight=2)
"""Two instances run one call each."""


def decided(made: FunctionSpec, seen: RevisionObservation, fleet: str) -> dict[str, int]:
    """What each signal of the autoscaler wants: of an activator, or of the leader that scales pods
    of class pilotlight.dev."""
    own = DeciderSpec.of(made, slots=slots_of(made))
    if fleet == CLUSTER:
        own = spec_of_pods(scalable_of(made), made)
    decision, _ = decide(100.0, seen, own, initial_state(0.0, spec=own, ready=seen.ready))
    return {**dict(decision.want), "desired": decision.desired}


def scalable_of(made: FunctionSpec) -> Scalable:
    """The PodAutoscaler that Knative makes of a revision."""
    metadata = template(made, settings=OURS)["metadata"]
    metadata = {**metadata, "namespace": "fn-acme", "uid": "u"}
    return parsed({"metadata": metadata, "spec": {"containerConcurrency": concurrency(made)}})


@proves("Scaling.max_inputs", "Scaling.target_inputs")
def test_load_per_instance_decides_their_number(fleet: str) -> None:
    seen = replace(BUSY, stable=8.0, panic=8.0, in_flight=8)
    wants = {
        (limit, target): decided(
            spec(scaling=Scaling(max_inputs=limit, target_inputs=target)), seen, fleet
        )["desired"]
        for limit, target in ((1, None), (4, None), (4, 2))
    }
    assert wants == {(1, None): 8, (4, None): 2, (4, 2): 4}
    if fleet == CLUSTER:
        limited = spec(scaling=Scaling(max_inputs=4, target_inputs=2))
        assert pod(limited)["containerConcurrency"] == limited.scaling.max_inputs
        assert scaling_annotations(limited)["target"] == "2"


@proves("Scaling.min_instances", "Scaling.max_instances")
def test_the_number_of_instances_has_bounds(fleet: str) -> None:
    bounded = spec(scaling=Scaling(min_instances=3, max_instances=5))
    idle = RevisionObservation(stable=0.0, panic=0.0, ready=3, idle_s=(900.0,) * 3)
    assert decided(bounded, idle, fleet)["desired"] == 3
    flood = replace(BUSY, stable=50.0, panic=50.0, in_flight=50)
    assert decided(bounded, flood, fleet)["desired"] == 5
    if fleet == CLUSTER:
        told = scaling_annotations(bounded)
        assert (told["min-scale"], told["max-scale"]) == ("3", "5")


@proves("Scaling.buffer_instances")
def test_spare_instances_are_kept_while_there_are_calls(fleet: str) -> None:
    buffered = spec(scaling=Scaling(buffer_instances=3))
    assert decided(buffered, BUSY, fleet)["desired"] == 5
    if fleet == CLUSTER:  # and with Knative's autoscaler
        traffic = ObservedTraffic(calls=9, exec_s=120.0, seconds=60.0)
        assert floor_of(buffered.scaling, traffic) == 5
        assert floor_of(buffered.scaling, replace(traffic, calls=0)) == 0


@proves(
    *("ScalingSchedule.cron", "ScalingSchedule.timezone"),
    *("ScalingSchedule.duration_s", "ScalingSchedule.min_instances"),
)
async def test_instances_are_kept_in_the_windows_of_a_schedule(fleet: str, short_tmp: Path) -> None:
    morning = ScalingSchedule(
        cron="0 8 * * *", timezone="Asia/Tokyo", duration_s=3600, min_instances=2
    )
    made = spec_of(scaling=Scaling(schedules=(morning,)))
    async with scaling(short_tmp, fleet) as world:
        world.table.apply(change(1, route_of(made)))
        (target,) = world.table.targets_of(f"{TENANT}/main/shop/hello")
        throttler = world.scaler.throttler_of(target)
        kept = []
        for utc_hour in (22.9, 23.1, 23.9, 24.1):  # 08:00 in Tokyo is 23:00 UTC
            world.scaler.floors.wall = lambda now=utc_hour: now * 3600  # type: ignore[misc]
            world.scaler.apply_schedules()
            kept.append(throttler.min_instances)
            if fleet == CLUSTER:  # whichever autoscaler counts the pods
                floor = floor_at(made.scaling.schedules, utc_hour * 3600).min_instances
                none = ObservedTraffic(calls=0, exec_s=0.0, seconds=1.0)
                assert floor_of(made.scaling, none, scheduled=floor) == kept[-1]
    assert kept == [0, 2, 2, 0]


@proves("Scaling.scaledown_window_s", fleets=(LOCAL,))
async def test_an_idle_instance_is_kept_for_its_window(fleet: str, short_tmp: Path) -> None:
    async with scaling(short_tmp, fleet) as world:
        made = spec_of(scaling=Scaling(scaledown_window_s=10))
        world.table.apply(change(1, route_of(made)))
        (target,) = world.table.targets_of(f"{TENANT}/main/shop/hello")
        throttler = world.scaler.throttler_of(target)
        (await throttler.reserve(5.0)).release()
        world.pass_s(8)
        assert len(throttler.instances) == 1
        world.pass_s(6)
        assert len(throttler.instances) == 0


@proves("Scaling.scaledown_window_s", fleets=(CLUSTER,))
def test_an_idle_pod_is_kept_for_its_window(fleet: str) -> None:
    told = scaling_annotations(spec(scaling=Scaling(scaledown_window_s=300)))
    assert (told["window"], told["scale-down-delay"]) == ("60s", "240s")


@proves("Scaling.waiting_cost", fleets=(LOCAL,))
def test_waiting_callers_are_weighed_against_idle_instances(fleet: str) -> None:
    for waiting_cost in (3.0, 30.0):
        keep = DeciderSpec.from_scaling(Scaling(waiting_cost=waiting_cost)).keep
        assert keep is not None
        assert keep.waiting_cost == waiting_cost
    assert DeciderSpec.from_scaling(Scaling()).keep is None


@proves("Scaling.waiting_cost", fleets=(CLUSTER,))
def test_waiting_cost_is_refused_with_knatives_autoscaler(fleet: str) -> None:
    made = spec(scaling=Scaling(waiting_cost=3.0))
    refused_by_name(made, "waiting_cost")
    check_cluster([made], Plan(), OURS)
    keep = spec_of_pods(scalable_of(made), made).keep
    assert keep is not None
    assert keep.waiting_cost == 3.0


@proves("Scaling.keep_asleep_s", fleets=(LOCAL,))
async def test_an_idle_instance_sleeps_before_it_ends(fleet: str, short_tmp: Path) -> None:
    async with scaling(short_tmp, fleet) as world:
        made = spec_of(scaling=Scaling(scaledown_window_s=10, keep_asleep_s=100))
        world.table.apply(change(1, route_of(made)))
        (target,) = world.table.targets_of(f"{TENANT}/main/shop/hello")
        throttler = world.scaler.throttler_of(target)
        (await throttler.reserve(5.0)).release()
        world.pass_s(14)
        await until(lambda: [state for state, _ in world.fleet.naps] == ["ASLEEP"])


@proves("Scaling.keep_asleep_s", fleets=(CLUSTER,))
def test_sleep_is_refused(fleet: str) -> None:
    refused_by_name(spec(scaling=Scaling(keep_asleep_s=100)), "keep_asleep")


def refused_by_name(made: FunctionSpec, option: str, settings: ClusterSettings = SETTINGS) -> None:
    with pytest.raises(InvalidInput, match=f"{option} = .*: on a cluster") as caught:
        check_cluster([made], Plan(), settings)
    assert caught.value.detail["parameter"] == option


@proves("Scaling.max_queued")
async def test_calls_beyond_the_queue_are_429(fleet: str, edge: Edge) -> None:
    edge.add(route_of(spec_of(scaling=Scaling(max_instances=1, max_queued=1))))
    edge.fleet.gate.clear()
    first = asyncio.create_task(edge.call(json={"x": 1}))
    await until(lambda: edge.queue.waiting == 1)
    assert (await edge.call(json={"x": 2})).status_code == 429
    edge.fleet.gate.set()
    assert (await first).status_code == 200


@proves("Scaling.latency_objective_s")
def test_a_call_that_waits_too_long_starts_instances(fleet: str) -> None:
    waiting = replace(BUSY, waiting=4, oldest_wait_s=3.0, start_s=60.0, call_s=1.0)
    patient = decided(spec(scaling=Scaling(latency_objective_s=5.0)), waiting, fleet)
    assert "backlog_age" not in patient
    late = decided(spec(scaling=Scaling(latency_objective_s=2.0)), waiting, fleet)
    assert late["backlog_age"] > patient["backlog"]
    if fleet == CLUSTER:  # the leader's decision, from an activator's report
        made = spec(scaling=Scaling(latency_objective_s=2.0))
        scale = RevisionScale(spec_of_pods(scalable_of(made), made), 0.0, ready=2)
        scale.record(99.0, 6.0)
        load = RevisionLoad(
            concurrency=6.0,
            in_flight=2,
            waiting=4,
            held={"a": 1, "b": 1},
            oldest_wait_s=3.0,
            start_s=60.0,
            call_s=1.0,
        )
        known = RevisionStatus(replicas=2, ready=2)
        decision = scale.decide(100.0, scalable_of(made), load, known, may_shrink=True)
        assert decision.wanted > 2


# -- clocks ----------------------------------------------------------------------------------------
@proves("Clocks.queue_s", "Clocks.execution_s")
async def test_calls_end_when_their_clock_does(fleet: str, edge: Edge) -> None:
    from tests.options.test_function_spec import hang

    edge.add(route_of(spec_of(clocks=Clocks(execution_s=0.1))))
    edge.fleet.behaviours["hello"] = hang
    answer = await edge.call(json={"x": 1})
    assert (answer.status_code, answer.json()["clock"]) == (504, "execution")
    edge.add(route_of(spec_of("late", clocks=Clocks(queue_s=0.1))))
    edge.fleet.gate.clear()
    answer = await edge.call("shop/late:invoke", json={"x": 1})
    assert (answer.status_code, answer.json()["clock"]) == (504, "queue")
    edge.fleet.gate.set()


@proves("Clocks.startup_s")
def test_a_start_has_its_clock(fleet: str) -> None:
    made = spec(clocks=Clocks(startup_s=42.0))
    assert launched(made, fleet).startup_timeout_s == 42.0
    if fleet == CLUSTER:
        assert pod(made)["containers"][0]["startupProbe"]["failureThreshold"] == 42
        assert pod(made)["timeoutSeconds"] == 342


@proves("Clocks.result_ttl_s")
async def test_results_of_submitted_calls_are_kept_for_their_time(fleet: str, edge: Edge) -> None:
    edge.add(route_of(spec_of(clocks=Clocks(result_ttl_s=120.0))))
    (target,) = edge.table.targets_of(f"{TENANT}/main/shop/hello")
    caller = Principal(KeyRecord(id="k-1", hash="", tenant=TENANT, scope="invoke"))
    record = queued(caller, call_of(target), fingerprint="", webhook="")
    assert record.expires_at - record.submitted_at == target.spec.clocks.result_ttl_s == 120


# -- retries, batches ------------------------------------------------------------------------------
@proves(
    "RetryPolicy.max_retries",
    "RetryPolicy.initial_delay_s",
    "RetryPolicy.backoff_coefficient",
    "RetryPolicy.max_delay_s",
    "RetryPolicy.jitter",
)
async def test_failures_are_tried_again_by_the_policy(fleet: str, short_tmp: Path) -> None:
    policy = RetryPolicy(
        max_retries=2, initial_delay_s=0.01, backoff_coefficient=3, max_delay_s=0.05, jitter=0
    )
    assert [delay_s(policy, n, random.Random(0)) for n in (1, 2, 3)] == [0.01, 0.03, 0.05]
    spread = replace(policy, jitter=1.0)
    assert len({delay_s(spread, 1, random.Random(n)) for n in range(5)}) == 5
    for failures, status in ((2, 200), (3, 500)):
        flaky = Flaky(failures)
        directory = short_tmp / str(failures)
        directory.mkdir()
        async with serving(directory, fleet, behaviour=flaky) as edge:
            edge.add(route_of(spec_of(retries=policy)))
            assert (await edge.call(json={"x": 1})).status_code == status
            assert len(flaky.attempts) == 3


@proves("RetryPolicy.exceptions")
async def test_only_named_exceptions_are_tried_again(fleet: str, short_tmp: Path) -> None:
    policy = RetryPolicy(max_retries=2, initial_delay_s=0, exceptions=("OSError",))
    entry = launched(spec(retries=policy), fleet).entry
    method = make_target(lambda: None, from_json(FunctionSpec, entry)).methods[""]
    assert method.is_retried(ConnectionError())
    assert not method.is_retried(ValueError())
    attempts: list[str] = []

    async def refuse(request: WorkerRequest) -> WorkerAnswer:
        attempts.append(request.headers["pilotlight-call"])
        again = () if b"2" in request.body else ("pilotlight-retry: no",)
        return WorkerAnswer(
            status=500, body=b'{"type":"function-raised"}', outcome="raised", headers=again
        )

    async with serving(short_tmp, fleet, behaviour=refuse) as edge:
        edge.add(route_of(spec_of(retries=policy)))
        assert (await edge.call(json={"x": 1})).status_code == 500
        assert len(attempts) == 1
        assert (await edge.call(json={"x": 2})).status_code == 500
        assert len(attempts) == 4


@proves("BatchPolicy.max_batch_size", "BatchPolicy.wait_ms", "BatchPolicy.adaptive")
def test_a_batch_runs_when_it_is_full_or_waited(fleet: str) -> None:
    given = BatchPolicy(max_batch_size=4, wait_ms=50, adaptive=False)
    made = spec(methods=(MethodSpec(batch=given),))
    entry = launched(made, fleet).entry["methods"][0]["batch"]
    policy = BatchPolicy(**{**entry, "buckets": tuple(entry["buckets"])})
    assert policy.max_batch_size == 4
    seen = BatchState(size=3, oldest_at=10.0, silent_since=10.0, cost=None, patience_s=0.0)
    assert decide_release(10.0, seen, policy).look_again_at == pytest.approx(10.05)
    assert policy.wait_ms == 50
    assert decide_release(10.0, replace(seen, size=4), policy).reason is ReleaseReason.FULL
    measured = replace(seen, cost=LatencyFit(per_item_s=0.001, fixed_s=0.02))
    eager = decide_release(10.0, measured, replace(policy, adaptive=True))
    assert eager.reason is ReleaseReason.ENOUGH


@proves("BatchPolicy.buckets")
def test_only_calls_of_one_bucket_share_a_batch(fleet: str) -> None:
    policy = BatchPolicy(max_batch_size=8, wait_ms=5, buckets=(4, 16))
    keys = [batch_key_for("f", policy, (text,)) for text in ("abc", "abcd", "abcdefgh")]
    assert keys[0] == keys[1] != keys[2]


@proves("BatchPolicy.retry_alone")
@pytest.mark.parametrize("retry_alone, batches", [(True, 4), (False, 1)])
async def test_a_failed_batch_is_repeated_call_by_call(
    fleet: str, *, retry_alone: bool, batches: int
) -> None:
    async def body(_: list[Any]) -> list[Any]:
        raise LookupError("unlucky")

    world = BatchWorld(BatchPolicy(max_batch_size=3, wait_ms=1, retry_alone=retry_alone), body=body)
    await world.calls(1, 2, 3)
    assert len(world.batches) == batches


@proves("MethodSpec.example", "MethodSpec.has_check")
async def test_examples_are_run_before_the_snapshot_and_shown(fleet: str, controller: Any) -> None:
    from tests.functions.controller.parts import spec as json_spec

    calls: list[int] = []
    made = spec(methods=(MethodSpec(example=[7]),))
    known = await asyncio.to_thread(warm_up, make_target(calls.append, made))
    assert (calls, list(known)) == ([7], [""])
    method = {"name": "", "example": [7], "has_check": True}
    body = {"functions": [json_spec(methods=[method])]}
    answer = await controller.http.post("/v1/apps/search/deploy", json=body)
    (done,) = answer.json()["functions"]
    path = f"/v1/apps/search/functions/hello/revisions/{done['revision']}"
    (shown,) = (await controller.http.get(path)).json()["schemas"]
    assert (shown["example"], shown["has_check"]) == ([7], True)


# -- rollouts --------------------------------------------------------------------------------------
@proves("RolloutTerms.strategy")
@pytest.mark.parametrize("strategy", list(RolloutStrategy))
async def test_a_revision_without_room_replaces_the_old_one_as_it_says(
    fleet: str, edge: Edge, strategy: RolloutStrategy
) -> None:
    edge.table.handovers = edge.handovers
    edge.add(route_of(spec_of(), revision="v1-aaaaaa"))
    await edge.call(json={"x": 0})
    edge.fleet.failures += [agent_errors.NoCapacity("full", {"memory_bytes": 1})] * 50
    edge.handovers.again_s = 0.02
    terms = RolloutTerms(strategy=strategy)
    new = spec_of(rollout=terms, clocks=Clocks(startup_s=0.3))
    edge.add(split_route(new, {"v2-bbbbbb": 100}))
    if strategy is RolloutStrategy.SWAP:
        await until(lambda: len(edge.fleet.stopped) == 1)
        return
    if strategy is RolloutStrategy.SURGE:
        await until(lambda: edge.fleet.stopped and not edge.handovers.running)
    else:
        await asyncio.sleep(0.5)  # beyond the time of the start
    assert bool(edge.fleet.stopped) is (strategy is RolloutStrategy.SURGE)
    assert bool(edge.handovers.running) is (strategy is RolloutStrategy.WAIT)


@proves("RolloutTerms.keep_previous_s", fleets=(LOCAL,))
def test_the_previous_revision_stays_warm(fleet: str, short_tmp: Path) -> None:
    from tests.fakes.routes import empty_table

    table = empty_table()
    table.apply(change(1, route_of(spec_of(rollout=RolloutTerms(keep_previous_s=90)))))
    assert table.previous_retention_s(f"{TENANT}/main/shop/hello") == 90


@proves("RolloutTerms.keep_previous_s", fleets=(CLUSTER,))
def test_the_previous_revision_stays_named(fleet: str) -> None:
    new = spec(rollout=RolloutTerms(keep_previous_s=90))
    route = FunctionRoute.from_json(document_of({"v2-000002": new}, weights={"v2-000002": 100})[1])
    ready = {
        "metadata": {"generation": 1},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    old, name = "search-embed-v1-000001", "search-embed-v2-000002"
    live = {
        "metadata": {"annotations": {}},
        "spec": {
            "template": {"metadata": {"name": name}, "spec": {}},
            "traffic": [{"revisionName": old, "percent": 100}],
        },
    }
    tenancy = tenancy_of()
    named = [RevisionOf.of(route, tenancy, revision) for revision in revision_names(route)]
    there = {old: ready, name: ready}
    step = next_step(route, tenancy, named=named, live=live, there=there, now=1000.0)
    assert step.service is not None
    assert step.service["metadata"]["annotations"][KEPT] == f"{old} 1090"
    assert math.isclose(step.again_s or 0.0, 90.0)
