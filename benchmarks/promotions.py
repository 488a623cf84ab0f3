"""Calls from zero on a cluster: with a warm pod that is promoted, restored or booted, with none
left, and without a pool; a call beside another, for which an instance is forked in the promoted
pod; and the platform's own part of promotions of different functions at once, with workers whose
start takes 0.3 s and no processor (`simulated_worker`; on the cluster of its own only), with the
processor time that each of its processes spends on one.

`python -m benchmarks.promotions [--quick] [--only MEASURE]… [--json FILE]`
brings its own cluster along (`tests.fakes.knative`; root), whose kubelet, network and API server
are quick: the numbers compare ways of starting, they do not tell how long a real cluster takes. For
that, `--kubeconfig FILE --cluster-config FILE` measure on yours, on its node, as the stories of a
cluster run there (docs/how-to/test-on-a-cluster.md)."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import harness, simulated_worker, subjects
from benchmarks.clusters import real_cluster
from benchmarks.harness import Report, Row, percentile, phase
from pilotlight.errors import PilotlightError
from tests.e2e.clustered import ClusterUnderTest, RealCluster, cluster_up
from tests.fakes.knative.volumes import SIMULATED_WORKER

Shape = dict[str, object]
NEEDS = ("criu",)
SOURCE = """
import os
import time

import pilotlight

app = pilotlight.App("hello")


@app.function(cpu=0.1, memory="256MiB", max_instances=12, scaledown_window=2)
def where(seconds: float = 0.0) -> str:
    time.sleep(seconds)
    return os.uname().nodename
"""
SMALL: Shape = {"name": "small", "cpu": 0.1, "memory_bytes": 512 << 20}
NOWHERE: Shape = {**SMALL, "cpu": 250, "min_pods": 1, "max_pods": 1}
"""No node has room for its pods, so none is ever ready."""
MODEL: Shape = {"name": "model", "cpu": 1, "memory_bytes": 3 << 30, "min_pods": 1, "max_pods": 1}
PROMOTED = "pilotlight.dev/promoted"
_FUNCTION = """

@app.function(cpu=0.1, memory="256MiB", scaledown_window=2, snapshot=False)
def f{number}() -> str:
    return ""
"""
PROGRAMS = {
    "activator": b"-m\0activator",
    "controller": b"-m\0pilotlight.controller",
    "node agent": b"-m\0snapshotter",
    "its server for pods": b"snapshotter.pods.entry.server",
    "launcher": b"-m\0pilotlight.launcher",
    "simulated worker": b"worker/boot.py",
}
"""Processes by a part of their command line."""
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
AT_ONCE = 10
PATIENCE_S = 240.0
"""Knative scales to zero after a window and a grace, a minute and a half together."""
HELD_S = 3.0
"""Calls that come at once stay so long, so that each needs an instance of its own."""
RETRY_S = 3.0
TRACES_S = 2.0
"""Activators send traces each second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One call from zero: the caller's milliseconds, how its instance started, the call's id, and
    the parts of its trace in milliseconds."""

    milliseconds: float
    kind: str
    is_promoted: bool
    call_id: str
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is called: a source, its function, and the arguments of a call that stays for some
    seconds, and of one that does not."""

    name: str
    source: str
    function: str
    arguments: Callable[[float], dict[str, object]]

    @property
    def selectors(self) -> tuple[str, str]:
        """Of its pods: its own, and promoted ones."""
        own = self.function.partition("/")[2].partition(".")[0]
        return f"pilotlight.dev/function={own}", PROMOTED


HELLO = Subject(
    name="hello",
    source=SOURCE,
    function="hello/where",
    arguments=lambda seconds: {"seconds": seconds},
)
EMBED = Subject(
    name="embed",
    source=subjects.EMBED.source.read_text().replace("scaledown_window=60", "scaledown_window=2"),
    function="search/Embedder.embed",
    arguments=lambda _: {"text": "a happy person"},
)


@contextmanager
def deployed(
    real: RealCluster | None,
    *shapes: Shape,
    restores: bool = False,
    subject: Subject = HELLO,
) -> Iterator[ClusterUnderTest]:
    """A cluster with a pool of these shapes, and the function at zero."""
    with cluster_up(
        real,
        warm_pods=list(shapes),
        handover_s=3600,
        idle_templates=0,
        restore_into_pods=restores,
    ) as cluster:
        file = cluster.directory / "app" / "app.py"
        file.parent.mkdir()
        file.write_text(subject.source)
        cluster.platform.deploy(str(file))
        yield cluster


def kept(count: int) -> Shape:
    """A shape that always has so many warm pods."""
    return {**SMALL, "min_pods": count, "max_pods": count}


def wait_until(look: Callable[[], bool], what: str) -> None:
    """Until it is so. Raises TimeoutError."""
    until = time.monotonic() + PATIENCE_S
    while not look():
        if time.monotonic() > until:
            raise TimeoutError(what)
        time.sleep(0.05)


def settle(cluster: ClusterUnderTest, warm_pods: int, subject: Subject = HELLO) -> None:
    """Until the function has no pod, and the pool is full."""

    def is_settled() -> bool:
        warm = cluster.items("/api/v1/pods", "pilotlight.dev/warm-shape")
        ready = [
            pod
            for pod in warm
            for one in pod["status"].get("conditions", ())
            if one["type"] == "Ready" and one["status"] == "True"
        ]
        return len(ready) >= warm_pods and not any(
            cluster.items("/api/v1/pods", selector) for selector in subject.selectors
        )

    wait_until(is_settled, "the function to be at zero and the pool to be full")


def call(cluster: ClusterUnderTest, seconds: float = 0.0, subject: Subject = HELLO) -> Start:
    """Call it. Raises RuntimeError where that fails."""
    began = time.monotonic()
    answer = cluster.platform.post(subject.function, subject.arguments(seconds), timeout=PATIENCE_S)
    took_s = time.monotonic() - began - seconds
    if answer.status_code != 200:
        raise RuntimeError(f"{answer.status_code} {answer.text[:300]}")
    said = answer.json()
    return Start(
        milliseconds=took_s * 1000,
        kind=answer.headers["pilotlight-start"],
        call_id=answer.headers["x-request-id"],
        is_promoted=said.startswith("small-")
        if isinstance(said, str)
        else bool(cluster.items("/api/v1/pods", PROMOTED)),
    )


def from_zero(
    cluster: ClusterUnderTest, warm_pods: int, count: int, subject: Subject = HELLO
) -> list[Start]:
    """Calls one after the other, each from zero."""
    starts = []
    for _ in range(count):
        settle(cluster, warm_pods, subject)
        starts.append(call(cluster, subject=subject))
    return starts


def traced(cluster: ClusterUnderTest, starts: list[Start]) -> list[Start]:
    """These starts with the parts of their traces, as far as the control plane has them by now."""
    time.sleep(TRACES_S)
    found = []
    with cluster.platform.client() as client:
        for start in starts:
            with contextlib.suppress(PilotlightError):
                spans = client.trace(start.call_id)["spans"]
                start = replace(start, parts={span["name"]: span["ms"] for span in spans})
            found.append(start)
    return found


def parts_of(starts: list[Start]) -> str:
    """Medians of the parts of calls, without the whole and what has parts of its own."""
    names = list(dict.fromkeys(name for start in starts for name in start.parts))
    return ", ".join(
        f"{name} {percentile([start.parts.get(name, 0.0) for start in starts], 50):.0f}"
        for name in names
        if not name.startswith("POST ") and name != "start"
    )


def until_restored(cluster: ClusterUnderTest, subject: Subject = HELLO) -> bool:
    """Whether a start comes to be a RESTORE, once the node has a proven snapshot."""
    until = time.monotonic() + PATIENCE_S
    with phase("until a start is a RESTORE"):
        while time.monotonic() < until:
            settle(cluster, 1, subject)
            if call(cluster, subject=subject).kind == "RESTORE":
                return True
            time.sleep(RETRY_S)
    return False


def beside_another(cluster: ClusterUnderTest) -> Start:
    """A call while another one runs in the only instance."""
    settle(cluster, 1)
    call(cluster)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(call, cluster, HELD_S)
        time.sleep(HELD_S / 6)
        start = call(cluster)
        other.result()
    return start


def add(report: Report, name: str, starts: list[Start], *, kind: str, is_promoted: bool) -> None:
    """A row of the starts of that kind; a remark says how many others there were."""
    good = [s.milliseconds for s in starts if s.kind == kind and s.is_promoted == is_promoted]
    others = len(starts) - len(good)
    if good:
        parts = parts_of([s for s in starts if s.kind == kind and s.is_promoted == is_promoted])
        note = "; ".join(said for said in (f"{others} others" if others else "", parts) if said)
        report.rows.append(Row.of(name, "ms", good, note))
    else:
        said = ", ".join(sorted({f"{s.kind} promoted={s.is_promoted}" for s in starts}))
        report.missing(name, f"the starts were {said}")


def measure_booted(report: Report, real: RealCluster | None, count: int, at_once: int) -> None:
    """COLD in a warm pod, one at a time and several at once."""
    with deployed(real, kept(at_once)) as cluster:
        with phase(f"{count} calls from zero, booted in a warm pod"):
            starts = from_zero(cluster, at_once, count)
        starts = traced(cluster, starts)
        add(report, "hello/COLD in a warm pod", starts, kind="COLD", is_promoted=True)
        with phase(f"{at_once} at once"), ThreadPoolExecutor(at_once) as pool:
            settle(cluster, at_once)
            together = list(pool.map(lambda _: call(cluster, HELD_S), range(at_once)))
        promoted = [one.milliseconds for one in together if one.is_promoted]
        others = at_once - len(promoted)
        note = f"{others} others" if others else ""
        report.rows.append(Row.of(f"hello/{at_once} at once, in warm pods", "ms", promoted, note))
        alone = percentile([start.milliseconds for start in starts], 50)
        report.ratio("at_once_to_one", max(promoted) / alone)


def measure_restored(report: Report, real: RealCluster | None, count: int) -> None:
    """RESTORE in a warm pod, and further instances beside it."""
    name = "hello/RESTORE in a warm pod"
    with deployed(real, kept(1), restores=True) as cluster:
        if not until_restored(cluster):
            report.missing(name, "no start was a RESTORE: the node agent's log says why")
            return
        with phase(f"{count} calls from zero, restored into a warm pod"):
            starts = traced(cluster, from_zero(cluster, 1, count))
        add(report, name, starts, kind="RESTORE", is_promoted=True)
        with phase(f"{count} calls beside another, forked in its pod"):
            starts = traced(cluster, [beside_another(cluster) for _ in range(count)])
        add(report, "hello/FORK in a promoted pod", starts, kind="FORK", is_promoted=True)


def measure_model(report: Report, real: RealCluster | None, count: int) -> None:
    """RESTORE of a model of 23 million parameters in a warm pod. Its first start is a boot, for
    which `runtime_image` of a real cluster needs the packages of examples/embed.py."""
    name = "embed/RESTORE in a warm pod"
    with deployed(real, MODEL, restores=True, subject=EMBED) as cluster:
        settle(cluster, 1, EMBED)
        try:
            first = call(cluster, subject=EMBED)
        except RuntimeError as e:
            report.missing(name, f"the first call failed: {e}")
            return
        row = Row.of(f"embed/first call, {first.kind} in a warm pod", "ms", [first.milliseconds])
        report.rows.append(row)
        if not until_restored(cluster, EMBED):
            report.missing(name, "no start was a RESTORE: the node agent's log says why")
            return
        with phase(f"{count} calls from zero of a model"):
            starts = traced(cluster, from_zero(cluster, 1, count, EMBED))
        add(report, name, starts, kind="RESTORE", is_promoted=True)


def processor_ms() -> dict[str, float]:
    """What this program's descendants have used until now, by program, ended children included."""
    used, parents, stats = dict.fromkeys(PROGRAMS, 0.0), {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                ticks = sum(int(field) for field in fields[11:15])
                stats[int(entry.name)] = (entry / "cmdline").read_bytes(), ticks * TICK_MS
    for pid, (command, spent_ms) in stats.items():
        ancestors = [pid]
        while ancestors[-1] in parents:
            ancestors.append(parents[ancestors[-1]])
        if os.getpid() in ancestors:
            for program, part in PROGRAMS.items():
                used[program] += spent_ms if part in command else 0.0
    return used


def measure_simulated(report: Report, count: int) -> None:
    """Promotions of different functions, one at a time and several at once, with workers that use
    no processor."""
    source = 'import pilotlight\n\napp = pilotlight.App("many")\n' + "".join(
        _FUNCTION.format(number=number) for number in range(AT_ONCE)
    )
    many = [
        Subject(name="many", source=source, function=f"many/f{number}", arguments=lambda _: {})
        for number in range(AT_ONCE)
    ]
    os.environ[SIMULATED_WORKER] = simulated_worker.__file__
    try:
        with deployed(None, kept(AT_ONCE), subject=many[0]) as cluster:
            ones, together, used = [], [], []
            with phase(f"{count} times one and {AT_ONCE} functions at once, simulated workers"):
                for _ in range(count):
                    settle(cluster, AT_ONCE, many[0])
                    ones.append(call(cluster, subject=many[0]))
                    settle(cluster, AT_ONCE, many[0])
                    before = processor_ms()
                    with ThreadPoolExecutor(AT_ONCE) as pool:
                        calls = [pool.submit(call, cluster, subject=one) for one in many]
                        together += [one.result() for one in calls]
                    used.append({key: ms - before[key] for key, ms in processor_ms().items()})
    finally:
        del os.environ[SIMULATED_WORKER]
    one_ms = [start.milliseconds for start in ones if start.is_promoted]
    all_ms = [start.milliseconds for start in together if start.is_promoted]
    others = len(ones) + len(together) - len(one_ms) - len(all_ms)
    note = f"{others} others" if others else ""
    report.rows.append(Row.of("simulated/one", "ms", one_ms, note))
    report.rows.append(Row.of(f"simulated/{AT_ONCE} functions at once", "ms", all_ms))
    for program in PROGRAMS:
        samples = [one[program] / AT_ONCE for one in used]
        report.rows.append(Row.of(f"simulated/processor time, {program}", "ms", samples))
    report.ratio("simulated_at_once_to_one", percentile(all_ms, 50) / percentile(one_ms, 50))


def measure_without(report: Report, real: RealCluster | None, count: int) -> None:
    """Without a pool, and with one that has no pod left, in turns."""
    with (
        deployed(real) as without,
        deployed(real, NOWHERE) as empty,
        phase(f"{count} calls from zero without a warm pod, and {count} with none left"),
    ):
        starts: dict[bool, list[Start]] = {False: [], True: []}
        for number in range(count):
            for has_pool in (False, True) if number % 2 else (True, False):
                settle(without, 0)
                settle(empty, 0)
                starts[has_pool].append(call(empty if has_pool else without))
        starts = {False: traced(without, starts[False]), True: traced(empty, starts[True])}
    add(report, "hello/without a pool", starts[False], kind="COLD", is_promoted=False)
    add(report, "hello/no warm pod left", starts[True], kind="COLD", is_promoted=False)
    medians = [percentile([one.milliseconds for one in starts[has]], 50) for has in (True, False)]
    report.ratio("none_left_to_without_a_pool", medians[0] / medians[1])


MEASURES = ("simulated", "restored", "booted", "model", "without")


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", choices=MEASURES, action="append")
    given, rest = parser.parse_known_args()
    chosen = given.only or MEASURES
    real, rest = real_cluster(rest)
    options = harness.options(__doc__ or "", rest, name="benchmarks.promotions", needs=NEEDS)
    if os.geteuid() != 0:
        print("promotions: needs root: containers are processes in namespaces", file=sys.stderr)
        return 2
    count, at_once = (3, 3) if options.quick else (10, AT_ONCE)
    report = Report("Calls from zero on a cluster")
    for measure in chosen:
        if measure == "simulated":
            if real is None:
                measure_simulated(report, count)
        elif measure == "restored":
            measure_restored(report, real, count)
        elif measure == "booted":
            measure_booted(report, real, count, at_once)
        elif measure == "model":
            measure_model(report, real, count)
        else:
            measure_without(report, real, count)
    report.finish(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
