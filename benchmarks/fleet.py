"""A fleet of functions in a cluster: 500 from nothing, no change, one more revision each, and back
up after a restart of the controller.

    PYTHONPATH=.:functions python -m benchmarks.fleet [--quick] [--json FILE]

The reconciler is the controller's own, its cluster the API server of the tests over real HTTP (in a
thread of this process, so half of what is measured is the server's), with as much of Knative as
makes revisions of Services. No pod runs: a revision is ready as soon as Knative has it. Goals: from
nothing at most 60 s; zero writes where nothing changed. `fleet_scaling` measures the way of a start
from zero."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import fleet_scaling
from benchmarks.harness import Options, Report, Row, options
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.kubernetes.desired_state import DesiredState
from pilotlight.controller.kubernetes.function_status import FunctionStatuses
from pilotlight.controller.kubernetes.reconciler import ReconcileLimits, Reconciler
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.protocol import TenantRecord
from pilotlight.spec.function import FunctionSpec
from tests.fakes.fed_platform import FedPlatform, document_of, spec
from tests.fakes.kubernetes.thread import ThreadedApiServer, running_api_server
from tests.fakes.small_serving import SmallServing

FUNCTIONS, TENANTS = 500, 10
QUICK_FUNCTIONS = 100
GOAL_S = 60.0
RUNTIME = "registry.example/runtime@sha256:" + "0" * 64
_LONGEST_S = 600.0


def main(argv: list[str] | None = None) -> None:
    """Run it."""
    chosen = options("500 functions become Knative Services", argv)
    report = Report(title="Fleet: functions in a cluster")
    asyncio.run(measure(chosen, report))
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
