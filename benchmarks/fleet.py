"""A fleet of functions in a cluster: 500 from nothing, no change, one more revision each, and back
up after a restart of the controller.

    PYTHONPATH=.:functions python -m benchmarks.fleet [--quick] [--json FILE]

The reconciler is the controller's own, its cluster the API server of the tests over real HTTP (in a
thread of this process, so half of what is measured is the server's), with as much of Knative as
makes revisions of Services. No pod runs: a revision is ready as soon as Knative has it. Goals: from
nothing at most 60 s; zero writes where nothing changed. `fleet_scaling` measures the way of a start
from zero.

`--kubeconfig FILE --cluster-config FILE` have 500 functions made on yours
(docs/how-to/test-on-a-cluster.md), with the chart's rights and policies and a pool of warm pods.
There a function is ready when Knative's controller has made the dozen objects that it makes for
each Service, and an ingress is ready."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import fleet_scaling
from benchmarks.clusters import real_cluster
from benchmarks.harness import Options, Report, Row, options
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.kubernetes.desired_state import DesiredState
from pilotlight.controller.kubernetes.function_status import FunctionStatuses
from pilotlight.controller.kubernetes.node_reports import NodeReports
from pilotlight.controller.kubernetes.reconciler import ReconcileLimits, Reconciler
from pilotlight.controller.kubernetes.warm.pool import WarmPool
from pilotlight.controller.kubernetes.warm.status import WarmPods
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.kinds import SERVICE
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.protocol import TenantRecord
from pilotlight.spec.function import FunctionSpec
from tests.e2e.clustered import RealCluster, chart_on, of_its_own
from tests.fakes.fed_platform import FedPlatform, document_of, spec
from tests.fakes.kubernetes.thread import ThreadedApiServer, running_api_server
from tests.fakes.small_serving import SmallServing

FUNCTIONS, TENANTS = 500, 10
QUICK_FUNCTIONS = 100
GOAL_S = 60.0
RUNTIME = "registry.example/runtime@sha256:" + "0" * 64
_LONGEST_S = 600.0
_PATIENCE_S = 300.0
"""For Knative, which makes a dozen objects of each function."""


def main(argv: list[str] | None = None) -> None:
    """Run it."""
    real, rest = real_cluster(argv)
    chosen = options("500 functions become Knative Services", rest)
    report = Report(title="Fleet: functions in a cluster")
    if real is None:
        asyncio.run(measure(chosen, report))
    else:
        measure_on(real, chosen, report)
    report.finish(chosen)


async def measure(chosen: Options, report: Report) -> None:
    """All of it, in one run."""
    count = QUICK_FUNCTIONS if chosen.quick else FUNCTIONS
    with tempfile.TemporaryDirectory(prefix="pl") as directory, running_api_server() as threaded:
        home = Path(directory)
        serving = SmallServing(threaded.server)
        threaded.call(serving.__enter__)
        kubeconfig = threaded.server.write_kubeconfig(home / "kubeconfig")
        settings = ClusterSettings(
            kubeconfig=str(kubeconfig), runtime_image=RUNTIME, namespace="default"
        )
        platform = FedPlatform(home, notifier=ChangeNotifier())
        try:
            for tenant in tenants():
                platform.tenant(tenant)
            platform.functions(documents(count, {"v1-000001": spec("embed")}))
            await fleet(platform, settings, threaded, count, report)
        finally:
            platform.close()
        await fleet_scaling.measure(
            home, revisions=count // 2, pokes=20 if chosen.quick else 100, report=report
        )


def measure_on(real: RealCluster, chosen: Options, report: Report) -> None:
    """500 functions from nothing on a real cluster that has warm pods."""
    count = QUICK_FUNCTIONS if chosen.quick else FUNCTIONS
    shape = {"name": "small", "cpu": 0.1, "memory_bytes": 512 << 20, "min_pods": 1, "max_pods": 2}
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pl")))
        given = stack.enter_context(of_its_own(real, home))
        chart = stack.enter_context(chart_on(given, {"warm_pods": [shape]}))
        kubeconfig = home / "kubeconfig"
        kubeconfig.write_text(chart.kubeconfig_of("controller", given.kubeconfig.read_text()))
        settings = ClusterSettings(
            **{**given.settings, "kubeconfig": str(kubeconfig), "warm_pods": [shape]}
        )
        asyncio.run(from_nothing(home, settings, count, report))


async def from_nothing(home: Path, settings: ClusterSettings, count: int, report: Report) -> None:
    """Until each function is written, until a pod is warm, and until each function is ready."""
    statuses, pool = FunctionStatuses(), WarmPods()
    platform = FedPlatform(home, notifier=ChangeNotifier())
    for tenant in tenants():
        platform.tenant(tenant)
    platform.functions(documents(count, {"v1-000001": spec("embed")}))
    async with await Cluster.connect(settings) as cluster, asyncio.TaskGroup() as tasks:
        reconciler = Reconciler(
            cluster,
            DesiredState(settings=cluster.settings, platform=platform.identity(), key=platform.key),
            store=platform.store,
            notifier=platform.notifier,
            statuses=statuses,
        )
        warm = WarmPool(cluster, reconciler, nodes=NodeReports(), pool=pool)
        began, spent = time.perf_counter(), time.process_time()
        running = [tasks.create_task(reconciler.run()), tasks.create_task(warm.run())]

        async def seen(what: str, is_so: Callable[[], bool], note: str) -> None:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await fleet_scaling.until(is_so, poll_s=0.2)
            except TimeoutError:
                report.missing(what, f"not within {_PATIENCE_S:g} s: {statuses!r}")
                return
            cpu_s = time.process_time() - spent
            said = f"{note}; {cpu_s:.1f} s of this process's CPU time"
            report.rows.append(Row.of(what, "s", [time.perf_counter() - began], said))

        def services() -> int:
            return sum(1 for _ in reconciler.mirror.items(SERVICE))

        def ready() -> int:
            return sum(status.phase == "ready" for status in statuses.known().values())

        name = f"{count} functions from nothing"
        await asyncio.gather(
            seen(f"{name}, written", lambda: services() >= count, f"goal {GOAL_S:g} s"),
            seen("a warm pod", lambda: any(one.warm for one in pool.shapes), "beside them"),
            seen(f"{name}, ready", lambda: ready() >= count, "with what Knative makes of them"),
        )
        writes = reconciler.writer.writes
        report.rows.append(Row.of("writes per function", "", [writes / count], ""))
        for task in running:
            task.cancel()
    platform.close()


def tenants() -> list[TenantRecord]:
    """Ten of them."""
    return [
        TenantRecord(id=f"t-{number:012x}", name=f"tenant{number}", uid=20_000 + number, plan={})
        for number in range(TENANTS)
    ]


def documents(count: int, specs: Mapping[str, FunctionSpec]) -> dict[str, Any]:
    """Routes of so many functions, dealt out over the tenants."""
    known, weights = tenants(), {list(specs)[-1]: 100}
    each = (
        document_of(specs, app=f"app{number}", tenant=known[number % TENANTS], weights=weights)
        for number in range(count)
    )
    return dict(each)


async def fleet(
    platform: FedPlatform,
    settings: ClusterSettings,
    threaded: ThreadedApiServer,
    count: int,
    report: Report,
) -> None:
    """From nothing, no change, another revision of all, and a controller that starts anew."""
    requests, statuses = threaded.server.requests, FunctionStatuses()
    async with await Cluster.connect(settings) as cluster:
        reconciler = Reconciler(
            cluster,
            DesiredState(settings=cluster.settings, platform=platform.identity(), key=platform.key),
            store=platform.store,
            notifier=platform.notifier,
            statuses=statuses,
            pace=ReconcileLimits(feed_s=3600),
        )
        began = time.perf_counter()
        task = asyncio.create_task(reconciler.run())
        try:
            await until_ready(statuses, count, revision="v1-000001")
            took_s = time.perf_counter() - began
            report.rows.append(
                Row.of(
                    f"{count} functions from nothing",
                    "s",
                    [took_s],
                    f"{count / took_s:.0f}/s; goal {GOAL_S:g} s",
                )
            )
            writes, asked = requests.writes(), len(requests)
            report.rows.append(
                Row.of(
                    "writes per function",
                    "",
                    [writes / count],
                    f"{asked / count:.1f} requests with the watches",
                )
            )
            await until_idle(reconciler)
            requests.clear()
            platform.functions(documents(count, {"v1-000001": spec("embed")}))
            platform.notifier.ring()
            await until_idle(reconciler)
            report.rows.append(
                Row.of("writes where nothing changed", "", [float(requests.writes())], "goal 0")
            )
            began = time.perf_counter()
            platform.functions(
                documents(
                    count,
                    {"v1-000001": spec("embed"), "v2-000002": spec("embed", env={"NEW": "1"})},
                )
            )
            await until_ready(statuses, count, revision="v2-000002")
            report.rows.append(
                Row.of(
                    f"a new revision of all {count}",
                    "s",
                    [time.perf_counter() - began],
                    "in, ready, then traffic",
                )
            )
            await until_idle(reconciler)
        finally:
            await stopped(task)
        requests.clear()
        fresh = FunctionStatuses()
        again = Reconciler(
            cluster,
            DesiredState(settings=cluster.settings, platform=platform.identity(), key=platform.key),
            store=platform.store,
            notifier=platform.notifier,
            statuses=fresh,
        )
        began = time.perf_counter()
        task = asyncio.create_task(again.run())
        try:
            await until_ready(fresh, count, revision="v2-000002")
            took_s = time.perf_counter() - began
            await until_idle(again)
            report.rows.append(
                Row.of(
                    "a controller that starts anew",
                    "s",
                    [took_s],
                    f"{requests.writes()} writes, {len(requests)} requests",
                )
            )
        finally:
            await stopped(task)


async def until_ready(statuses: FunctionStatuses, count: int, *, revision: str) -> None:
    """Wait until so many functions are ready with that revision. Raises TimeoutError."""
    async with asyncio.timeout(_LONGEST_S):
        await fleet_scaling.until(
            lambda: (
                sum(
                    status.phase == "ready" and status.revision == revision
                    for status in statuses.known().values()
                )
                >= count
            )
        )


async def until_idle(reconciler: Reconciler) -> None:
    """Wait until nothing has been due for a while: the watches have brought everything."""
    quiet = 0
    while quiet < 50:
        await asyncio.sleep(0.01)
        quiet = quiet + 1 if reconciler.work.is_idle else 0


async def stopped(task: asyncio.Task[None]) -> None:
    """End a reconciler."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


if __name__ == "__main__":
    main()
