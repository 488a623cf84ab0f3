"""Proofs of the terms of a plan."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from activator.fairness.share_policy import share_of
from pilotlight import errors
from pilotlight.controller.analytics.environment_usage import EnvironmentUsage
from pilotlight.controller.analytics.rollup_queries import UsageSums
from pilotlight.controller.analytics.time_range import TimeRange
from pilotlight.controller.billing import price_lists
from pilotlight.controller.dashboard import page_stats
from pilotlight.controller.deployments.fleet_checks import check_cluster
from pilotlight.controller.settings import ControllerConfig
from pilotlight.core.settings import SettingsInvalid
from pilotlight.errors import InvalidInput
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.function import Resources
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.pricing import PriceSettings
from pilotlight.spec.quotas import Plan
from snapshotter.errors import NoCapacity
from snapshotter.slots.log_pruning import LogPruner
from snapshotter.slots.logs import Logs
from snapshotter.starts.node_capacity import NodeCapacity
from snapshotter.types import TenantShare
from tests.activator.conftest import Edge
from tests.activator.fairness.test_start_admission import MIB, SIZE, World
from tests.activator.llm.asking import Door, chat, model
from tests.activator.test_gateway import until
from tests.fakes.fed_platform import spec
from tests.fakes.routes import TENANT, route_of, spec_of
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import BUNDLE, refused
from tests.functions.controller.parts import spec as json_spec
from tests.functions.controller.test_figures import NOW, cell_of
from tests.functions.controller.test_storage import allow, build, deploy, push, put
from tests.options.contract import CLUSTER, LOCAL, proves
from tests.options.test_function_spec import hang
from tests.options.world import SETTINGS, namespace, on_fleet, pod


async def acme(controller: Controller, **overrides: Any) -> httpx.AsyncClient:
    """A tenant's client, with terms of its own."""
    key = await controller.other_tenant()
    await allow(controller, "acme", **overrides)
    return controller.client(key)


@proves("Plan.requests_per_s", "Plan.burst")
async def test_requests_beyond_the_bucket_are_429(fleet: str, edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    edge.add_tenant("acme", requests_per_s=0.001, burst=2)
    statuses = [(await edge.call(json={"x": 1})).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]


@proves("Plan.concurrent")
async def test_concurrent_calls_beyond_the_quota_are_429(fleet: str, edge: Edge) -> None:
    edge.add(route_of(spec_of(scaling=Scaling(max_inputs=8))))
    edge.add_tenant("acme", concurrent=1)
    edge.fleet.behaviours["hello"] = hang
    first = asyncio.create_task(edge.call(json={"x": 1}))
    await until(lambda: any(worker.requests for worker in edge.fleet.workers.values()))
    answer = await edge.call(json={"x": 2})
    assert (answer.status_code, answer.json()["quota"]) == (429, "concurrent")
    first.cancel()


@proves("Plan.queued")
async def test_waiting_calls_beyond_the_quota_are_429(fleet: str, edge: Edge) -> None:
    edge.add(route_of(spec_of(scaling=Scaling(max_instances=1))))
    edge.add_tenant("acme", queued=1)
    edge.fleet.gate.clear()
    first = asyncio.create_task(edge.call(json={"x": 1}))
    await until(lambda: edge.queue.waiting == 1)
    assert "queued" in (await edge.call(json={"x": 2})).text
    edge.fleet.gate.set()
    assert (await first).status_code == 200


@proves("Plan.instances", "Plan.gpus")
async def test_instances_and_gpus_are_counted(fleet: str, short_tmp: Path) -> None:
    gpus = Resources(memory_bytes=SIZE, gpu=("H100",), gpu_count=2)
    async with World.running(short_tmp) as world:
        on_fleet(world.fleet, fleet)
        world.tenant("a", instances=0)
        world.tenant("b", gpus=1)
        for throttler, quota in (
            (world.throttler("a"), "instances"),
            (world.throttler("b", resources=gpus), "gpus"),
        ):
            with pytest.raises(errors.OverQuota) as caught:
                await throttler.reserve(5)
            assert caught.value.detail["quota"] == quota
    if fleet == CLUSTER:
        hard = namespace(instances=3, gpus=1)["ResourceQuota"]["spec"]["hard"]
        assert (hard["pods"], hard["requests.nvidia.com/gpu"]) == ("6", "1")


@proves("Plan.body_bytes")
async def test_larger_bodies_are_413(fleet: str, edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    edge.add_tenant("acme", body_bytes=10)
    assert (await edge.call(json={"x": 1})).status_code == 200
    assert (await edge.call(json={"x": 1, "y": 10_000})).status_code == 413


@proves("Plan.tokens_per_min")
async def test_tokens_are_counted(fleet: str) -> None:
    from activator.llm.token_admission import TokenAdmission

    desk = TokenAdmission(waiting_of=lambda _: 0)
    door = Door(model(), plan={"tokens_per_min": 600})
    for is_over in (False, True):
        admitting = desk.admit(
            door.entry(), "/v1/chat/completions", chat(max_tokens=500), began_ns=0
        )
        if not is_over:
            await admitting
            continue
        with pytest.raises(errors.OverQuota, match="tokens_per_min"):
            await admitting


@proves("Plan.weight", "Plan.priority")
async def test_calls_have_the_plans_weight_and_priority(fleet: str, edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    edge.add_tenant("acme", weight=3, priority="batch")
    key = edge.table.authenticate(b"Bearer pl_test", 0.0)
    target = edge.table.targets_of(f"{TENANT}/main/shop/hello")[0]
    rank = edge.entrance.entry(key, target).caller_of({}).rank
    assert (rank.weight, rank.priority) == (3, "batch")
    headers = {"pilotlight-priority": "realtime"}
    assert (
        edge.entrance.entry(key, target)
        .caller_of({name.encode(): value.encode() for name, value in headers.items()})
        .rank.priority
        == "batch"
    )


@proves("Plan.isolation", "Plan.reserved_memory_bytes", fleets=(LOCAL,))
async def test_the_node_keeps_dedicated_and_reserved_tenants_apart(
    fleet: str, short_tmp: Path
) -> None:
    async with World.running(short_tmp) as world:
        world.tenant("d", isolation="dedicated")
        share = share_of(world.table, "d")
        assert share.is_dedicated
        with pytest.raises(NoCapacity, match="dedicated"):
            NodeCapacity(memory_bytes=MIB).require_tenant_allowed(share)
        NodeCapacity(memory_bytes=MIB, dedicated_to="D").require_tenant_allowed(share)
        world.tenant("r", isolation="reserved", reserved_memory_bytes=3 * SIZE)
        room = NodeCapacity(memory_bytes=10 * SIZE)
        assert room.free_bytes([], share_of(world.table, "other")) == 7 * SIZE
        assert room.free_bytes([], share_of(world.table, "r")) == 10 * SIZE


@proves("Plan.isolation", fleets=(CLUSTER,))
def test_pods_of_dedicated_and_reserved_tenants_are_kept_apart(fleet: str) -> None:
    dedicated = pod(spec(), isolation="dedicated")
    assert dedicated["nodeSelector"] == {"pilotlight.dev/dedicated-to": "acme"}
    assert dedicated["tolerations"] == [
        {
            "key": "pilotlight.dev/dedicated-to",
            "operator": "Equal",
            "value": "acme",
            "effect": "NoSchedule",
        }
    ]
    given = ClusterSettings(runtime_image=SETTINGS.runtime_image, reserved_priority_class="paid")
    assert pod(spec(), settings=given, isolation="reserved")["priorityClassName"] == "paid"
    with pytest.raises(InvalidInput, match="isolation = reserved, but on a cluster"):
        check_cluster([spec()], Plan(isolation="reserved"), SETTINGS)  # type: ignore[arg-type]


@proves("Plan.reserved_memory_bytes", fleets=(CLUSTER,))
def test_a_reservation_of_memory_is_refused(fleet: str) -> None:
    plan = Plan(isolation="reserved", reserved_memory_bytes=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput) as caught:
        check_cluster([spec()], plan, ClusterSettings(reserved_priority_class="paid"))
    assert caught.value.detail["parameter"] == "reserved_memory_bytes"


@proves("Plan.latency_p99_ms", "Plan.availability", "Plan.utilisation")
def test_objectives_of_a_plan_are_shown(fleet: str) -> None:
    plan = Plan(name="own", latency_p99_ms=250, availability=0.99, utilisation=0.5)
    calls = UsageSums(records=1000, errors=5)
    usage = EnvironmentUsage(span=TimeRange.of("24h", NOW), cells=(cell_of(calls),), currency="USD")
    shown = {row.name: row.target for row in page_stats.objectives(plan, usage, [])}
    assert shown == {
        "Latency, p99": "at most 250 ms",
        "Calls answered": "at least 99 %",
        "Utilisation": "at least 50 %",
    }


@proves("Plan.prices")
async def test_a_plan_has_its_price_list(fleet: str, controller: Controller) -> None:
    config = controller.context.config
    prices = PriceSettings(others={"partner": {"cpu_core_s": "7"}})
    object.__setattr__(config, "prices", prices)
    object.__setattr__(config, "plans", {**config.plans, "p": Plan(name="p", prices="partner")})
    answer = await controller.http.post("/v1/tenants", json={"name": "acme", "plan": "p"})
    tenant = answer.json()["id"]
    with controller.context.store.read() as sql:
        assert price_lists.of_tenant(sql, config, tenant).cpu_core_s == Decimal(7)
        own = await controller.tenant()
        assert price_lists.of_tenant(sql, config, own).version == prices.version


@proves("Plan.name")
async def test_a_plan_is_known_by_its_name(fleet: str, controller: Controller) -> None:
    answer = await controller.http.post("/v1/tenants", json={"name": "acme", "plan": "gold"})
    assert "plan 'gold' does not exist" in refused(answer, 400)
    await controller.http.post("/v1/tenants", json={"name": "acme", "plan": "free"})
    plans = (await controller.http.get("/v1/tenants")).json()
    assert '"free"' in json.dumps(plans)


@proves("Plan.stored_bytes")
async def test_uploads_beyond_the_plan_are_507(fleet: str, controller: Controller) -> None:
    tenant = await acme(controller, stored_bytes=100)
    assert (await put(tenant, b"a" * 60)).status_code in (200, 201, 204)
    over = await put(tenant, b"b" * 60)
    refused(over, 507)
    assert over.json()["quota"] == "stored_bytes"


@proves("Plan.builds_at_once", fleets=(LOCAL,))
async def test_builds_at_once_are_bounded(fleet: str, controller: Controller) -> None:
    tenant = await acme(controller, builds_at_once=1)
    controller.agent.build_may_end = asyncio.Event()
    first = asyncio.create_task(build(tenant))
    await controller.agent.building.wait()
    assert "builds_at_once = 1" in refused(await build(tenant), 429)
    controller.agent.build_may_end.set()
    await first


@proves("Plan.builds_at_once", fleets=(CLUSTER,))
async def test_a_cluster_builds_nothing(fleet: str) -> None:
    """So that there is nothing for `builds_at_once` to bound."""
    from pilotlight.controller.kubernetes.cluster_backend import ClusterBackend
    from snapshotter.errors import Unsupported

    parts = ClusterBackend(SETTINGS).build_image({"python": "3.11"}, uid=None)
    with pytest.raises(Unsupported, match="images are not built in a cluster"):
        await anext(parts)


@proves("Plan.pinned_bytes")
async def test_pins_beyond_the_plan_are_507(
    fleet: str, controller: Controller, tmp_path: Path
) -> None:
    tenant = await acme(controller, pinned_bytes=50)
    directory = tmp_path / "pushed"
    directory.mkdir()
    await push(tenant, directory, "one", b"1" * 100)
    over = await tenant.post("/v1/weights/one/pin")
    refused(over, 507)
    assert over.json()["quota"] == "pinned_bytes"


@proves("Plan.log_bytes", fleets=(LOCAL,))
async def test_logs_beyond_the_plan_are_deleted(
    fleet: str, short_tmp: Path, tmp_path: Path
) -> None:
    async with World.running(short_tmp) as world:
        world.tenant("a", log_bytes=250)
        share: TenantShare = share_of(world.table, "a")
    logs = Logs(tmp_path)
    for number in range(4):
        labels = {"tenant": "a"}
        logs.register(
            f"a-{number}", labels=labels, revision="r", now=float(number), log_bytes=share.log_bytes
        )
        (logs.directory / f"a-{number}.log").write_bytes(b"x" * 100)
    LogPruner(tmp_path).prune(alive=set(), keep_s=1e9, total_bytes=10**9, now=10.0)
    assert sorted(path.name for path in tmp_path.glob("*.log")) == ["a-2.log", "a-3.log"]


@proves("Plan.log_bytes", fleets=(CLUSTER,))
def test_a_bound_on_logs_is_refused_at_the_start(fleet: str, tmp_path: Path) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text("platform: {fleet: knative}\nplans: {own: {log_bytes: 1000}}\n")
    with pytest.raises(SettingsInvalid, match=r"plans\.own\.log_bytes = 1000: on a cluster"):
        ControllerConfig.read(file)


@proves("Plan.functions")
async def test_more_functions_than_the_plan_are_refused(fleet: str, controller: Controller) -> None:
    tenant = await acme(controller, functions=1)
    await put(tenant, BUNDLE)
    assert (await deploy(tenant)).status_code == 200
    body = {"functions": [json_spec("one"), json_spec("two")]}
    over = await tenant.post("/v1/apps/other/deploy", json=body)
    refused(over, 507)
    assert over.json()["quota"] == "functions"


@proves("Plan.volume_files")
async def test_more_files_of_a_volume_than_the_plan_are_refused(
    fleet: str, controller: Controller
) -> None:
    tenant = await acme(controller, volume_files=1)
    await tenant.put("/v1/volumes/data")
    put = [{"path": path, "kind": "directory"} for path in ("a", "b")]
    over = await tenant.post("/v1/volumes/data/commit", json={"put": put})
    refused(over, 507)
    assert over.json()["quota"] == "volume_files"
    assert (await tenant.post("/v1/volumes/data/commit", json={"put": put[:1]})).status_code == 200


@proves("Plan.result_bytes")
async def test_results_beyond_the_plan_are_deleted(fleet: str, controller: Controller) -> None:
    tenant = await acme(controller, result_bytes=3_500_000)
    whose = (await tenant.get("/v1/whoami")).json()["tenant"]["id"]
    for number in range(1, 6):
        record = {
            "id": f"req-{number}",
            "tenant": whose,
            "environment": "main",
            "app": "a",
            "function": "f",
            "method": "",
            "state": "SUCCEEDED",
            "sequence": 2,
            "submitted_at": controller.clock() + number,
            "expires_at": controller.clock() + 1000,
            "result": "A" * 1_000_000,
        }
        answer = await controller.internal("/internal/calls", {"calls": [record]})
        assert answer.status_code == 200, answer.text
    kept = [one["id"] for one in (await tenant.get("/v1/calls")).json()["calls"]]
    assert kept == ["req-5", "req-4", "req-3"]
    assert "result_bytes" in refused(await tenant.get("/v1/calls/req-1"), 404)
