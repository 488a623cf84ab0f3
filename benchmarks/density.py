"""Many functions at zero: what each costs in memory, and whether their number slows anything down.

A warm function is measured while 10 functions are deployed, then while 1,000 are (10,000 without
--quick): resident bytes per function in controller and activator, time to deploy one more, latency
of the warm one. Then a hot function's latency is taken with and without 100 starts per minute of
other functions beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks import stack
from benchmarks.harness import ROOT, Report, Row, options, percentile, phase
from pilotlight.client.client import Client
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.record_json import from_json

APP, FUNCTION = "bench-echo", "echo"
SOURCE = ROOT / "benchmarks" / "functions" / "echo.py"
FEW = 10
PER_APP = 100
CHURNED = 10
"""Functions that are started in turn: all of their Templates fit on the node."""
STARTS_PER_MINUTE = 100
CALLS_PER_S = 100
"""Of the hot function: below saturation, so that its latency is not its queue."""


def main() -> None:
    """Run it."""
    given = options(__doc__ or "")
    many, calls, churn_s = (1_000, 500, 15.0) if given.quick else (10_000, 5_000, 180.0)
    report = Report(f"density: {many:,} functions at zero")
    with stack.running() as platform, platform.client as client:
        with phase("deploy the warm one"):
            platform.deploy(SOURCE)
            platform.invoke(APP, FUNCTION, {"text": "ready"})
        spec = deployed_spec(client)
        with phase(f"{FEW} functions"):
            fill(client, spec, 0, FEW)
            few_ms = latencies(platform, calls)
            few_bytes = resident_bytes(platform)
        with phase(f"{many:,} functions"):
            fill(client, spec, FEW, many)
            many_ms = latencies(platform, calls)
            many_bytes = resident_bytes(platform)
        one_more(report, client, spec, many)
        report.rows.append(Row.of(f"warm call beside {FEW} functions", "ms", few_ms))
        report.rows.append(Row.of(f"warm call beside {many:,} functions", "ms", many_ms))
        for name, before in few_bytes.items():
            per_function = (many_bytes[name] - before) / (many - FEW)
            report.rows.append(Row.of(f"bytes_per_function in {name}", "B", [per_function]))
        total = sum(many_bytes.values()) - sum(few_bytes.values())
        report.rows.append(Row.of("bytes_per_function", "B", [total / (many - FEW)]))
        report.ratio(
            "latency_1000_over_10_functions", percentile(many_ms, 50) / percentile(few_ms, 50)
        )
        churn(report, platform, seconds=churn_s)
    report.finish(given)


def deployed_spec(client: Client) -> FunctionSpec:
    """The echo's specification as the registry has it, but with zero instances: a pattern for
    others, whose bundle is already there."""
    document = next(f["spec"] for f in client.app(APP)["functions"] if f["name"] == FUNCTION)
    spec = from_json(FunctionSpec, document)
    return replace(spec, scaling=Scaling(max_inputs=64, max_instances=1, scaledown_window_s=2.0))


def fill(client: Client, spec: FunctionSpec, first: int, end: int) -> None:
    """Deploy functions number `first` to `end`, PER_APP to an app; no instance and no Template is
    made."""
    for start in range(first, end, PER_APP):
        names = [f"f{i}" for i in range(start, min(end, start + PER_APP))]
        client.deploy(f"many-{start}", [replace(spec, name=name) for name in names])


def one_more(report: Report, client: Client, spec: FunctionSpec, many: int) -> None:
    """The time that the registry takes for one more app with one function."""
    took_ms = []
    for i in range(10):
        started = time.perf_counter()
        client.deploy(f"more-{i}", [replace(spec, name="f")])
        took_ms.append((time.perf_counter() - started) * 1000)
    report.rows.append(Row.of(f"deploy one more beside {many:,}", "ms", took_ms))


def latencies(platform: stack.Stack, calls: int) -> list[float]:
    """Milliseconds of `calls` calls of the warm function, one after the other."""
    return [platform.invoke(APP, FUNCTION, {"text": "hi"}).milliseconds for _ in range(calls)]


def resident_bytes(platform: stack.Stack) -> dict[str, int]:
    """Proportional set size of controller and activator, so that pages they share count once."""
    pids = platform.processes()
    return {name: _pss_bytes(pids[name]) for name in ("controller", "activator")}


def churn(report: Report, platform: stack.Stack, *, seconds: float) -> None:
    """The hot function alone, then with starts beside it."""
    names = [
        (f"many-{i // PER_APP * PER_APP}" if i >= FEW else "many-0", f"f{i}")
        for i in range(CHURNED)
    ]
    with phase("first starts of the churned functions"):
        for app, function in names:
            platform.invoke(app, function, {"text": "ready"})
    with phase("hot function alone"):
        alone = paced(platform, seconds=seconds)
    kinds: list[str] = []
    stop = threading.Event()

    def start_others() -> None:
        for i in range(10**9):
            if stop.wait(60 / STARTS_PER_MINUTE):
                return
            app, function = names[i % len(names)]
            kinds.append(platform.invoke(app, function, {"text": "hi"}).start)

    with phase("hot function beside starts"):
        beside = _with_thread(start_others, stop, lambda: paced(platform, seconds=seconds))
    report.rows.append(Row.of("hot function alone", "ms", alone))
    summary = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    report.rows.append(
        Row.of(
            f"hot function beside {STARTS_PER_MINUTE} calls/min to idle functions",
            "ms",
            beside,
            note=summary,
        )
    )
    report.ratio("hot_p99_beside_starts_over_alone", percentile(beside, 99) / percentile(alone, 99))


def paced(platform: stack.Stack, *, seconds: float) -> list[float]:
    """Milliseconds of calls at a fixed rate, each from the moment when it was due: a stall counts
    for all that it delayed."""
    origin = time.perf_counter()
    took_ms = []
    for i in range(int(seconds * CALLS_PER_S)):
        due = origin + i / CALLS_PER_S
        if (wait_s := due - time.perf_counter()) > 0:
            time.sleep(wait_s)
        platform.invoke(APP, FUNCTION, {"text": "hi"})
        took_ms.append((time.perf_counter() - due) * 1000)
    return took_ms


def _with_thread(
    work: Callable[[], None], stop: threading.Event, measure: Callable[[], list[float]]
) -> list[float]:
    thread = threading.Thread(target=work, name="starts")
    thread.start()
    try:
        return measure()
    finally:
        stop.set()
        thread.join()


def _pss_bytes(pid: int) -> int:
    """`Pss` of /proc/<pid>/smaps_rollup (proc(5)), which is in KiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no Pss")


if __name__ == "__main__":
    main()
