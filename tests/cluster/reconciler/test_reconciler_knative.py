"""The reconciler beside Knative's controllers, as the tests restate them: what it writes is taken,
and does what it should."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.kubernetes.buffer_floors import BufferFloors
from pilotlight.controller.slo import observations
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.kinds import POD_AUTOSCALER, REVISION
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.observations import Observation
from pilotlight.spec.policies import RolloutTerms, ScalingSchedule
from tests.cluster.reconciler.conftest import RUNTIME, Bench
from tests.cluster.reconciler.test_reconciler import ONE, SERVING, TWO, traffic_of
from tests.fakes.fed_platform import FedPlatform, spec
from tests.fakes.knative.cluster import FakeKnative
from tests.fakes.small_serving import SmallServing

SPECS = {
    "v1-000001": spec(),
    "v2-000002": spec(env={"NEW": "1"}, rollout=RolloutTerms(keep_previous_s=100)),
}


@pytest.fixture
async def knative(
    short_tmp: Path, tmp_path: Path, real_kubeconfig: Path | None
) -> AsyncIterator[Bench]:
    """Serving's controllers, and no node."""
    if real_kubeconfig is not None:
        pytest.skip("looks behind the API: not on a real cluster")
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(FakeKnative(short_tmp, nodes=0))
        settings = ClusterSettings(
            kubeconfig=str(cluster.kubeconfig), runtime_image=RUNTIME, namespace="default"
        )
        platform = FedPlatform(tmp_path, notifier=ChangeNotifier())
        stack.callback(platform.close)
        unused = SmallServing(cluster.api)
        yield Bench(
            server=cluster.api,
            serving=unused,
            platform=platform,
            kubeconfig=cluster.kubeconfig,
            settings=settings,
        )


async def test_a_functions_life_from_canary_to_the_way_back(knative: Bench) -> None:
    bench = knative
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running() as reconciler:
        await bench.until_phase("ready")
        bench.platform.function(SPECS, weights={"v1-000001": 90, "v2-000002": 10})
        await bench.until(lambda: traffic_of(bench) == [(ONE, 90, ""), (TWO, 10, "")])
        await bench.until_phase("ready")
        bench.platform.function({"v2-000002": SPECS["v2-000002"]})
        await bench.until(lambda: traffic_of(bench) == [(TWO, 100, ""), (ONE, 0, "previous")])
        bench.platform.function({"v1-000001": SPECS["v1-000001"]})
        await bench.until(lambda: traffic_of(bench)[:1] == [(ONE, 100, "")])
        await bench.until_phase("ready")
        await bench.until_quiet()
        written = reconciler.writer.writes
        bench.platform.notifier.ring()
        await bench.until_quiet()
        assert reconciler.writer.writes == written


async def test_a_deleted_revision_comes_back_under_its_name(knative: Bench) -> None:
    bench = knative
    bench.platform.tenant()
    bench.platform.function(SPECS, weights={"v1-000001": 90, "v2-000002": 10})
    async with bench.running():
        await bench.until(lambda: traffic_of(bench) == [(ONE, 90, ""), (TWO, 10, "")])
        await bench.until_phase("ready")
        before = bench.server.get(SERVING, "Revision", ONE, "fn-acme")
        assert before is not None
        async with await Cluster.connect(bench.settings) as operator:
            await operator.delete(REVISION, ONE, "fn-acme")
        await bench.until(
            lambda: (
                (now := bench.server.get(SERVING, "Revision", ONE, "fn-acme")) is not None
                and _other(now, before)
            )
        )
        await bench.until_phase("ready")
        after = bench.server.get(SERVING, "Revision", ONE, "fn-acme")
        assert after is not None
        assert after["spec"] == before["spec"]
        assert traffic_of(bench) == [(ONE, 90, ""), (TWO, 10, "")]


def _other(now: dict[str, dict[str, str]], before: dict[str, dict[str, str]]) -> bool:
    return now["metadata"]["uid"] != before["metadata"]["uid"]


async def test_spare_instances_are_a_min_scale_while_there_are_calls(knative: Bench) -> None:
    bench = knative
    bench.platform.tenant()
    function = bench.platform.function(spec(scaling=Scaling(buffer_instances=2)))
    async with bench.running() as reconciler, await Cluster.connect(bench.settings) as cluster:
        await bench.until_phase("ready")
        floors = BufferFloors(
            cluster, reconciler.state, bench.platform.store, wall=lambda: bench.wall_s
        )
        await floors.update()
        assert (floors.writes, min_scale(bench)) == (0, "0")
        with bench.platform.store.write() as write:
            observations.add(write, [calls_of(function, minute=int(bench.wall_s // 60))])
        await floors.update()
        await bench.until(lambda: min_scale(bench) == "5")
        assert await pods_of(bench) == 5
        await floors.update()
        assert floors.writes == 1, "what is so is not written again"
        bench.wall_s += 120
        await floors.update()
        await bench.until(lambda: min_scale(bench) == "0")


async def test_the_windows_of_a_schedule_are_a_min_scale(knative: Bench) -> None:
    bench = knative
    bench.platform.tenant()
    morning = ScalingSchedule(cron="0 8 * * *", duration_s=3600, min_instances=3)
    bench.platform.function(spec(scaling=Scaling(schedules=(morning,))))
    async with bench.running() as reconciler, await Cluster.connect(bench.settings) as cluster:
        await bench.until_phase("ready")
        floors = BufferFloors(
            cluster,
            reconciler.state,
            bench.platform.store,
            counts_spare=False,
            wall=lambda: bench.wall_s,
        )
        bench.wall_s = bench.wall_s // 86_400 * 86_400 + 7.9 * 3600
        await floors.update()
        assert (floors.writes, min_scale(bench)) == (0, "0")
        bench.wall_s += 0.2 * 3600
        await floors.update()
        await bench.until(lambda: min_scale(bench) == "3")
        bench.wall_s += 3600
        await floors.update()
        await bench.until(lambda: min_scale(bench) == "0")


async def test_another_autoscaler_in_the_settings_takes_over_the_revisions_that_are_there(
    knative: Bench,
) -> None:
    bench = knative
    bench.platform.tenant()
    bench.platform.function(spec(scaling=Scaling(buffer_instances=2)))
    async with bench.running(), await Cluster.connect(bench.settings) as operator:
        await bench.until_phase("ready")
        assert autoscaling(bench)["class"] == "kpa.autoscaling.knative.dev"
        raised = {"metadata": {"annotations": {"autoscaling.knative.dev/min-scale": "3"}}}
        await operator.patch(REVISION, ONE, "fn-acme", raised)  # its spare instances
        await bench.until(lambda: min_scale(bench) == "3")
    before = autoscaling(bench)
    object.__setattr__(bench.settings, "autoscaler", "pilotlight")
    async with bench.running():
        await bench.until(lambda: autoscaling(bench)["class"] == "pilotlight.dev")
        ours = autoscaling(bench)
        assert (ours["min-scale"], ours["max-scale"]) == ("0", before["max-scale"])
        assert "window" not in ours
        await bench.until_quiet()
    bench.server.requests.clear()
    async with bench.running():
        await bench.until_quiet()
        assert bench.server.requests.writes() == 0
    object.__setattr__(bench.settings, "autoscaler", "kpa")
    async with bench.running():
        await bench.until(lambda: autoscaling(bench) == {**before, "min-scale": "0"})


async def test_knative_puts_right_a_min_scale_that_is_changed_beside_the_revision(
    knative: Bench,
) -> None:
    bench = knative
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running(), await Cluster.connect(bench.settings) as operator:
        await bench.until_phase("ready")
        changed = {"metadata": {"annotations": {"autoscaling.knative.dev/min-scale": "7"}}}
        await operator.patch(POD_AUTOSCALER, ONE, "fn-acme", changed)
        await bench.until(lambda: min_scale(bench) == "0")


def calls_of(function: str, *, minute: int) -> Observation:
    """Of `v1-000001`, three at once in the last minute and in the current one, which begins."""
    return Observation(
        tenant="t-0123456789ab",
        function_id=function,
        revision="v1-000001",
        minute=minute,
        answered=100,
        exec_ms=180_000,
    )


def min_scale(bench: Bench) -> str:
    return autoscaling(bench)["min-scale"]


def autoscaling(bench: Bench) -> dict[str, str]:
    """What the PodAutoscaler says to its autoscaler, without the keys' domain."""
    scaler = bench.server.get(
        "autoscaling.internal.knative.dev/v1alpha1", "PodAutoscaler", ONE, "fn-acme"
    )
    assert scaler is not None
    return {
        key.removeprefix("autoscaling.knative.dev/"): str(value)
        for key, value in scaler["metadata"]["annotations"].items()
        if key.startswith("autoscaling.knative.dev/")
    }


async def pods_of(bench: Bench) -> int:
    """What KPA makes of it."""

    def replicas() -> int:
        made = bench.server.get("apps/v1", "Deployment", f"{ONE}-deployment", "fn-acme")
        return int(made["spec"]["replicas"]) if made is not None else 0

    await bench.until(lambda: replicas() == 5)
    return replicas()
