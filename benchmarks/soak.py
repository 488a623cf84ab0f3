"""A long mixed load: does anything grow that the load does not explain, and is a call lost?

A hundred functions in ten apps, nine of ten at zero; one is called 20 times a second, all others
in turn, and beside them run calls that raise, submitted calls, dicts and queues, refused requests,
and deploys of new code. In the middle third of the run, one of the four processes is killed
(SIGKILL) at regular intervals, each in turn. Every few seconds the memory and the descriptors of
the processes, the files below the home and the time of a usage report are sampled; growth is from
the beginning to the end of the calm stretches before and after the kills.

It takes 45 minutes, with --quick three. With --json FILE, the samples are in the file too, and its
picture beside it (`.svg`)."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from benchmarks import soak_picture, stack
from benchmarks.harness import ROOT, Report, Row, machine_facts, options, phase
from benchmarks.soak_samples import (
    MODULES,
    Growth,
    Sample,
    Sampler,
    growth_of_process,
    process_ids,
)
from pilotlight.client.client import Client
from pilotlight.errors import PilotlightError
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.record_json import from_json

APP = "bench-soak"
SOURCE = ROOT / "benchmarks" / "functions" / "soak.py"
APPS, PER_APP = 10, 10
PER_SECOND = {"hot": 20.0, "from zero": 1.0, "raises": 1.0, "stores": 1.0, "refused": 2.0}
"""Calls per second of each kind; those of a kind are one after the other."""
SUBMITTED_PER_S, DEPLOYS_PER_S = 0.5, 1 / 30
QUIET_S = 120.0
"""Longest wait at the end for the last records to reach the ledger."""
SMALLEST_FOLDER_BYTES = 100_000
"""What is smaller has no line in the table."""
WARMING_SHARE = 0.3
"""Of the calm stretch before the kills: caches fill, and every function starts for the first
time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Lengths in seconds: of the run, between two kills, between two samples."""

    run_s: float
    kill_every_s: float
    sample_every_s: float

    @property
    def kills_from_s(self) -> float:
        """When kills begin."""
        return self.run_s / 3

    @property
    def kills_until_s(self) -> float:
        """When they end."""
        return self.run_s * 2 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A field of ProcessSample as the table shows it: divided by `scale`, in `unit`."""

    field: str
    label: str
    unit: str
    scale: float


QUANTITIES = (
    Quantity(field="anonymous_kib", label="anonymous memory", unit="MiB", scale=1024.0),
    Quantity(field="descriptors", label="descriptors", unit="", scale=1.0),
)
LONG = Plan(run_s=2700.0, kill_every_s=30.0, sample_every_s=5.0)
QUICK = Plan(run_s=180.0, kill_every_s=15.0, sample_every_s=2.0)


@dataclass(slots=True)
class Traffic:
    """Calls and what became of them. Owner: a lock; each thread counts its own kind.

    Attributes:
        outcomes: number of calls by (kind, status); status `lost`: the connection broke.
        failures: lost and submitted calls and deploys that failed: when (seconds since the epoch), the
            kind, and the error."""

    platform: stack.Stack
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[tuple[float, str, str]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self) -> int:
        """Calls answered so far."""
        with self._lock:
            return sum(n for (_, status), n in self.outcomes.items() if status != "lost")

    def count(self, kind: str, status: str) -> None:
        """Count one."""
        with self._lock:
            self.outcomes[kind, status] += 1

    def failed(self, kind: str, status: str, error: Exception, *, began: float) -> None:
        """Count one that failed, and record why."""
        self.count(kind, status)
        after_s = time.time() - began
        with self._lock:
            self.failures.append((began, kind, f"after {after_s:.1f} s: {error!r}"))

    def call(self, kind: str, path: str, body: bytes, **headers: str) -> None:
        """Send a request and count its status."""
        host = self.platform.url.removeprefix("http://")
        began = time.time()
        try:
            answer = stack.post(host, path, body, {**self.platform.headers, **headers})
        except (OSError, http.client.HTTPException) as e:
            self.failed(kind, "lost", e, began=began)
        else:
            self.count(kind, str(answer.status))

    def paced(self, per_s: float, once: Callable[[int], None]) -> None:
        """Do `once` at a steady rate until stopped; what is late is not made up for."""
        for i in range(10**9):
            due_s = time.monotonic() + 1 / per_s
            once(i)
            if self.stop.wait(max(0.0, due_s - time.monotonic())):
                return

    # -- kinds -------------------------------------------------------------------------------------
    def hot(self, number: int) -> None:
        """The function that always has an instance."""
        self.call("hot", _path(APP, "echo"), json.dumps([f"call {number}"]).encode())

    def from_zero(self, number: int) -> None:
        """One of the hundred, most of which have none."""
        app, function = f"soak-{number % APPS}", f"f{number // APPS % PER_APP}"
        self.call("from zero", _path(app, function), b'["hi"]')

    def raises(self, number: int) -> None:
        """A function that raises."""
        self.call("raises", _path(APP, "fails"), json.dumps([number]).encode())

    def stores(self, number: int) -> None:
        """A function that writes to a dict and a queue."""
        self.call("stores", _path(APP, "stores"), json.dumps([number]).encode())

    def refused(self, number: int) -> None:
        """What a stranger sends: no valid key, no JSON, no such function."""
        path, body, key = (
            (_path(APP, "echo"), b'["hi"]', "Bearer pl_wrong_key"),
            (_path(APP, "echo"), b"{not json", self.platform.headers["Authorization"]),
            (_path(APP, f"none-{number}"), b"[]", self.platform.headers["Authorization"]),
        )[number % 3]
        self.call("refused", path, body, Authorization=key)

    def submitted(self, number: int) -> None:
        """A submitted call, until it has ended."""
        began, state = time.time(), "QUEUED"
        try:
            with self.platform.client as client:
                call = client.submit_json(APP, "stores", [number])
                while state in {"QUEUED", "RUNNING"} and not self.stop.is_set():
                    state = client.call(call, wait_s=5.0).state
        except PilotlightError as e:
            self.failed("submitted", type(e).__name__, e, began=began)
        else:
            self.count("submitted", state)

    def deploy(self, number: int) -> None:
        """New code, proven as every deploy is."""
        folder = self.platform.directory / "deployed"
        folder.mkdir(exist_ok=True)
        file = folder / "deployed.py"
        text = stack.variant(SOURCE.read_text(), app=f"soak-new-{number % 5}")
        file.write_text(f"{text}\nNUMBER = {number}\n")
        began = time.time()
        try:
            self.platform.command("deploy", str(file))
        except stack.StackFailed as e:
            self.failed("deploys", "failed", e, began=began)
        else:
            self.count("deploys", "done")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """All kinds at once, until the block ends."""
        kinds: list[tuple[float, Callable[[int], None]]] = [
            (PER_SECOND["hot"], self.hot),
            (PER_SECOND["from zero"], self.from_zero),
            (PER_SECOND["raises"], self.raises),
            (PER_SECOND["stores"], self.stores),
            (PER_SECOND["refused"], self.refused),
            (SUBMITTED_PER_S, self.submitted),
            (DEPLOYS_PER_S, self.deploy),
        ]
        threads = [threading.Thread(target=self.paced, args=kind, daemon=True) for kind in kinds]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run leaves: samples, outcomes, failures (seconds since it began, kind, error), kills
    (seconds since it began, and the name), and the ledger at its end."""

    plan: Plan
    samples: Sequence[Sample]
    outcomes: Counter[tuple[str, str]]
    failures: Sequence[tuple[float, str, str]]
    kills: Sequence[tuple[float, str]]
    charged: int
    differences: int

    def calm(self) -> tuple[list[Sample], list[Sample]]:
        """Samples before the kills, without those of warming up, and after them."""
        warm_s = self.plan.kills_from_s * WARMING_SHARE
        # processes that were killed last warm up as well
        again_s = self.plan.kills_until_s + warm_s
        return (
            [s for s in self.samples if warm_s <= s.at_s < self.plan.kills_from_s],
            [s for s in self.samples if s.at_s >= again_s],
        )


def main() -> None:
    """Run it."""
    given = options(__doc__ or "")
    run = soak(QUICK if given.quick else LONG)
    report, machine = reported(run), machine_facts()
    print(report.table(machine))
    if given.json is not None:
        written = report.to_json(machine) | {
            "samples": [asdict(sample) for sample in run.samples],
            "kills": list(run.kills),
            "failures": list(run.failures),
        }
        given.json.write_text(json.dumps(written) + "\n")
        given.json.with_suffix(".svg").write_text(
            soak_picture.drawn(run.samples, run.kills, machine=machine)
        )


def soak(plan: Plan) -> Run:
    """Run the load on a platform of its own."""
    with stack.running() as platform:
        with phase("deploy"):
            platform.deploy(SOURCE)
            with platform.client as client:
                _fill(client)
        traffic = Traffic(platform)
        sampler = Sampler(platform, every_s=plan.sample_every_s, calls=traffic.answered)
        kills: list[tuple[float, str]] = []
        sampler.start()
        with traffic.running():
            with phase(f"{plan.kills_from_s:.0f} s of load"):
                time.sleep(plan.kills_from_s)
            with phase(f"a process is killed every {plan.kill_every_s:.0f} s"):
                while sampler.elapsed_s < plan.kills_until_s:
                    kills.append((sampler.elapsed_s, _kill(platform, len(kills))))
                    time.sleep(plan.kill_every_s)
            with phase("load again"):
                time.sleep(max(0.0, plan.run_s - sampler.elapsed_s))
        began = time.time() - sampler.elapsed_s
        sampler.stop()
        with phase("the last records"):
            charged = _charged(platform)
        with platform.client as client:
            differences = len(client.verify_ledger()["differences"])
        return Run(
            plan=plan,
            samples=sampler.samples,
            outcomes=traffic.outcomes,
            failures=[(at - began, kind, error) for at, kind, error in traffic.failures],
            kills=kills,
            charged=charged,
            differences=differences,
        )


def reported(run: Run) -> Report:
    """The table: what grew, what became of the calls, and what the ledger says."""
    report = Report(
        f"soak: {run.plan.run_s / 60:.0f} minutes, {len(run.kills)} kills, "
        f"{sum(run.outcomes.values()):,} calls"
    )
    before, after = run.calm()
    for name in MODULES.values():
        for quantity in QUANTITIES:
            for when, samples in (("before the kills", before), ("after them", after)):
                _process_row(report, when, samples, name, quantity)
    ledger = [(s.at_s, s.ledger_ms) for s in run.samples if s.ledger_ms is not None]
    _row(report, "usage report", "ms", ledger)
    _disk_rows(report, run)
    for kind in dict.fromkeys(kind for kind, _ in run.outcomes):
        found = {s: n for (k, s), n in sorted(run.outcomes.items()) if k == kind}
        report.remarks.append(f"{kind}: " + ", ".join(f"{n:,} x {s}" for s, n in found.items()))
    for at_s, kind, error in run.failures:
        killed = max((kill for kill in run.kills if kill[0] <= at_s), default=None)
        since = "" if killed is None else f", {at_s - killed[0]:.1f} s after {killed[1]} was killed"
        report.remarks.append(f"failed: {kind} at {at_s:.1f} s{since}, {error}")
    answered = run.outcomes["hot", "200"]
    lost = run.outcomes["hot", "lost"]
    report.remarks.append(
        f"records of calls that the hot function answered: {run.charged:,}; answers that callers "
        f"got: {answered:,}; connections that broke: {lost:,}; ledger: {run.differences} differences"
    )
    report.ratio("records_missing", max(0, answered - run.charged))
    report.ratio("records_unexplained", max(0, run.charged - answered - lost))
    report.ratio("ledger_differences", run.differences)
    return report


def _process_row(
    report: Report, when: str, samples: Sequence[Sample], name: str, quantity: Quantity
) -> None:
    label = f"{name} {when}: {quantity.label}"
    values = [
        getattr(s.processes[name], quantity.field) / quantity.scale
        for s in samples
        if name in s.processes
    ]
    try:
        growth = growth_of_process(samples, name, quantity.field)
    except ValueError as e:
        report.missing(label, str(e))
        return
    report.rows.append(Row.of(label, quantity.unit, values, _note(growth, quantity.scale)))


def _row(report: Report, label: str, unit: str, points: Sequence[tuple[float, float]]) -> None:
    try:
        growth = Growth.of(points)
    except ValueError as e:
        report.missing(label, str(e))
        return
    report.rows.append(Row.of(label, unit, [value for _, value in points], _note(growth, 1.0)))


def _note(growth: Growth, scale: float) -> str:
    begin, end = growth.begin / scale, growth.end / scale
    return f"{begin:,.1f} -> {end:,.1f} ({growth.per_hour / scale:+,.1f} an hour)"


def _disk_rows(report: Report, run: Run) -> None:
    first, last = run.samples[0], run.samples[-1]
    calls = max(1, last.calls - first.calls)
    for folder, size in last.disk_bytes.items():
        if size < SMALLEST_FOLDER_BYTES:
            continue
        grown = size - first.disk_bytes.get(folder, 0)
        report.rows.append(
            Row.of(
                f"disk: {folder}",
                "MiB",
                [s.disk_bytes.get(folder, 0) / 2**20 for s in run.samples],
                f"{grown / 2**20:+,.1f} in all, {grown / calls:,.0f} B a call",
            )
        )


def _fill(client: Client) -> None:
    """Deploy the hundred functions, as variants of the echo with no instance."""
    document = next(f["spec"] for f in client.app(APP)["functions"] if f["name"] == "echo")
    spec = replace(
        from_json(FunctionSpec, document),
        scaling=Scaling(max_inputs=64, max_instances=1, scaledown_window_s=2.0),
    )
    for i in range(APPS):
        client.deploy(f"soak-{i}", [replace(spec, name=f"f{j}") for j in range(PER_APP)])


def _kill(platform: stack.Stack, number: int) -> str:
    """Kill the next process in turn; wait for it if it has not come back yet. Returns its name."""
    name = list(MODULES.values())[number % len(MODULES)]
    while (pid := process_ids(platform).get(name)) is None:
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    return name


def _charged(platform: stack.Stack) -> int:
    """Records of answered calls of the hot function, once their number has stayed the same for ten
    seconds."""
    deadline_s, same_since_s, last = time.monotonic() + QUIET_S, time.monotonic(), -1
    while time.monotonic() < deadline_s:
        with contextlib.suppress(PilotlightError), platform.client as client:
            rows = client.billing_report(by="function", app=APP, function="echo")["rows"]
            found = sum(row["records"] - row["errors"] for row in rows if row["kind"] == "CALL")
            if found != last:
                last, same_since_s = found, time.monotonic()
        if time.monotonic() - same_since_s > 10:
            break
        time.sleep(1.0)
    return last


def _path(app: str, function: str) -> str:
    return f"/v1/functions/{app}/{function}:invoke"


if __name__ == "__main__":
    main()
