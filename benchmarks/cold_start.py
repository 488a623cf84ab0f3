"""From zero: a request is sent while a function has no instance, and timed until its answer is
complete.

`hello` and `embed` are the examples themselves. COLD comes from a second copy that is deployed with
`snapshot=False`, so that nothing is kept of it; FORK from a resident Template, whose memory (PSS)
is a row of its own, because a Template is not zero; WARM from an instance that is already there.
FORK is measured twice: as the platform comes, with one fork parked behind each Template in use, and
with none. RESTORE (`benchmarks/restores.py`) is measured for these two, for a function that only
imports torch, and for synthetic models by reference and by value: with all memory back before the
process runs (eager) and with memory that comes when it is touched (lazy), with the page cache warm
and dropped, and 1, 4 and 8 at once. A deploy and a COLD start are timed beside programs that
compute on every processor, and a call to a frozen instance beside one to an idle one. Every sample
is filed under the StartKind that the platform itself reported. With --peers: Ray Serve with
`min_replicas=0` and the same model."""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks import frozen, loaded, peers, restores, stack
from benchmarks.harness import Report, Row, options, percentile, phase
from benchmarks.network import DidNotStart
from benchmarks.subjects import EMBED, HELLO, Subject, model, torch_only
from snapshotter.client import AgentClient
from snapshotter.errors import SnapshotterError

NEEDS = ("criu",)
MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Samples per StartKind."""

    fork: int
    cold: int
    warm: int
    ray: int
    restore: int
    dropped: int
    loaded: int
    models_mib: tuple[int, ...]
    at_once: tuple[int, ...]


QUICK = Counts(
    fork=7, cold=2, warm=50, ray=2, restore=7, dropped=0, loaded=3, models_mib=(), at_once=()
)
FULL = Counts(
    fork=40,
    cold=7,
    warm=500,
    ray=7,
    restore=15,
    dropped=4,
    loaded=7,
    models_mib=(256, 1024, 4096),
    at_once=(1, 4, 8),
)


def main() -> None:
    """Run it."""
    given = options(__doc__ or "", name="benchmarks.cold_start", needs=NEEDS)
    counts = QUICK if given.quick else FULL
    report = Report("cold start: sent at zero instances, until the whole answer is there")
    with stack.running() as platform:
        for subject in (HELLO, EMBED):
            measure(report, platform, subject, counts)
        template_memory(report, platform)
    with stack.running(snapshotter={"parked_per_template": 0}) as platform:
        for subject in (HELLO, EMBED):
            plain_forks(report, platform, subject, counts.fork)
        template_memory(report, platform, suffix=" without a parked fork")
    loaded.measure(report, rounds=counts.loaded)
    frozen.measure(report, count=counts.fork)
    restored(report, counts, quick=given.quick)
    if given.peers:
        ray(report, counts)
    ratios(report)
    report.finish(given)


def restored(report: Report, counts: Counts, *, quick: bool) -> None:
    """Everything that comes back from a snapshot. With --quick: the examples, as the platform
    brings their pages back by itself."""
    if quick:
        for subject in (HELLO, EMBED):
            restores.measure(report, subject, pages="auto", count=counts.restore, dropped=0)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch = torch_only(Path(folder))
        for subject in (HELLO, torch, EMBED):
            for pages in ("auto", "eager", "lazy"):
                restores.measure(
                    report,
                    subject,
                    pages=pages,
                    count=counts.restore,
                    dropped=counts.dropped if pages != "auto" else 0,
                )
        restores.other_rungs(report, torch, cold=counts.cold, forks=counts.restore)
        for mib in counts.models_mib:
            for by in ("reference", "value"):
                subject = model(Path(folder), mib=mib, by=by)
                restores.other_rungs(report, subject, cold=2, forks=5)
                for pages in ("eager", "lazy"):
                    restores.measure(
                        report,
                        subject,
                        pages=pages,
                        count=max(3, counts.restore // 4),
                        dropped=counts.dropped // 2,
                    )
        restores.together(report, torch, pages="auto", sizes=counts.at_once, rounds=5)
    restores.instance_memory(report, EMBED, instances=4)


def measure(report: Report, platform: stack.Stack, subject: Subject, counts: Counts) -> None:
    """Rows `<name>/<StartKind>`, and what the first call after the deploy cost."""
    warm_app, cold_app = f"bench-{subject.name}", f"bench-{subject.name}-cold"
    samples: dict[str, list[stack.Answer]] = defaultdict(list)
    with phase(f"{subject.name}: deploy"):
        platform.deploy(subject.source, app=warm_app, scaledown_window=2)
        platform.deploy(subject.source, app=cold_app, scaledown_window=2, snapshot=False)
    with phase(f"{subject.name}: first call after deploy"):
        first = platform.invoke(warm_app, subject.function, subject.arguments)
    report.rows.append(
        Row.of(
            f"{subject.name}/first call",
            "ms",
            [first.milliseconds],
            note=f"came up by {first.start}",
        )
    )
    with phase(f"{subject.name}: WARM"):
        for _ in range(counts.warm):
            answer = platform.invoke(warm_app, subject.function, subject.arguments)
            samples[answer.start].append(answer)
    for app, count in ((warm_app, counts.fork), (cold_app, counts.cold)):
        with phase(f"{subject.name}: {count} starts of {app}"):
            for _ in range(count):
                platform.wait_zero(app)
                answer = platform.invoke(app, subject.function, subject.arguments)
                samples[answer.start].append(answer)
    for kind, answers in sorted(samples.items()):
        report.rows.append(
            Row.of(
                f"{subject.name}/{kind}",
                "ms",
                [a.milliseconds for a in answers],
                note=_timings(answers),
            )
        )


def plain_forks(report: Report, platform: stack.Stack, subject: Subject, count: int) -> None:
    """Rows `<name>/FORK unparked`: nothing was forked ahead."""
    app = f"bench-{subject.name}"
    platform.deploy(subject.source, app=app, scaledown_window=2)
    answers = []
    with phase(f"{subject.name}: {count} plain forks"):
        for _ in range(count):
            platform.wait_zero(app)
            answers.append(platform.invoke(app, subject.function, subject.arguments))
    forks = [a for a in answers if a.start == "FORK"]
    report.rows.append(
        Row.of(
            f"{subject.name}/FORK unparked",
            "ms",
            [a.milliseconds for a in forks],
            note=_timings(forks),
        )
    )


def template_memory(report: Report, platform: stack.Stack, suffix: str = "") -> None:
    """What it costs to keep the Templates that make FORK possible."""
    try:
        templates = asyncio.run(_templates(platform.run_directory() / "snapshotter.sock"))
    except SnapshotterError as e:
        report.missing("Template memory", str(e))
        return
    for name, pss_bytes in sorted(templates):
        report.rows.append(Row.of(f"{name}/Template PSS{suffix}", "MiB", [pss_bytes / MIB]))


async def _templates(socket: Path) -> list[tuple[str, int]]:
    agent = AgentClient(socket)
    try:
        return [
            (t.labels.get("app", t.revision).removeprefix("bench-"), t.pss_bytes)
            for t in await agent.templates()
        ]
    finally:
        await agent.aclose()


def ray(report: Report, counts: Counts) -> None:
    """Ray Serve, the same model, `min_replicas=0`: cold from zero replicas, and warm."""
    try:
        with peers.running(peers.RAY_EMBED) as server, phase("ray serve: embed from zero"):
            cold = []
            for _ in range(counts.ray):
                server.ask("zero")
                cold.append(_post(server.url))
            warm = [_post(server.url) for _ in range(counts.warm)]
    except (peers.PeerFailed, DidNotStart) as e:
        report.missing("ray serve", str(e))
        return
    report.rows.append(Row.of("embed/ray serve from zero", "ms", cold))
    report.rows.append(Row.of("embed/ray serve warm", "ms", warm))


def _post(url: str) -> float:
    host, _, path = url.removeprefix("http://").partition("/")
    return stack.post(
        host, f"/{path}", peers.ECHO_BODY.encode(), {"Content-Type": "application/json"}
    ).milliseconds


def ratios(report: Report) -> None:
    """From the medians of the rows; a start that did not happen gives no ratio."""
    medians = {row.name: row.p50 for row in report.rows}
    wanted = {
        "cold_loaded_over_idle": ("hello/COLD loaded", "hello/COLD idle"),
        "deploy_loaded_over_idle": ("hello/deploy loaded", "hello/deploy idle"),
        "embed_cold_over_fork": ("embed/COLD", "embed/FORK"),
        "embed_cold_over_restore": ("embed/COLD", "embed/RESTORE auto"),
        "hello_cold_over_fork": ("hello/COLD", "hello/FORK"),
        "restore_4g_over_256m_by_reference": (
            "model 4096 MiB by reference/RESTORE eager, restore phase",
            "model 256 MiB by reference/RESTORE eager, restore phase",
        ),
        "restore_eight_over_one": ("torch/8 at once", "torch/1 at once"),
        "ray_over_fork": ("embed/ray serve from zero", "embed/FORK"),
    }
    for key, (above, below) in wanted.items():
        if above in medians and below in medians:
            report.ratio(key, medians[above] / medians[below])


def _timings(answers: list[stack.Answer]) -> str:
    """Medians of the platform's own Server-Timing."""
    names = sorted({name for answer in answers for name in answer.timing})
    return ", ".join(
        f"{name} {percentile([a.timing.get(name, 0.0) for a in answers], 50):.1f}" for name in names
    )


if __name__ == "__main__":
    main()
