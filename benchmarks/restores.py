"""Starts from a snapshot on disk: how long until the whole HTTP answer is there, and which part of
it is the restore.

Nothing of the function may be left in memory: before each sample its instances and its Template are
gone. *Dropped* samples begin with an empty page cache as well (`/proc/sys/vm/drop_caches`; the
machine below a virtual one may still cache)."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import stack
from benchmarks.harness import Report, Row, percentile, phase
from benchmarks.stack import StackFailed
from benchmarks.subjects import HOLD_S, Subject
from snapshotter.client import AgentClient
from snapshotter.types import SnapshotInfo, SnapshotState

MIB = 1024**2
_QUIET_S = 0.5
"""How long no Template may have come back in the background."""
_PATIENCE_S = 120.0
_DROP = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One start: the caller's milliseconds, the StartKind, and the phases that the node agent
    reported."""

    milliseconds: float
    start: str
    phases_ms: Mapping[str, float]


@contextmanager
def deployed(
    report: Report, subject: Subject, *, pages: str
) -> Iterator[tuple[stack.Stack, str] | None]:
    """A platform with `subject` deployed and its snapshot proven; None, and a remark, where it has
    none."""
    with stack.running(snapshotter={"snapshot_pages": pages}) as platform:
        app = _app(subject)
        with phase(f"{subject.name}: deploy, {pages}"):
            platform.deploy(subject.source, app=app)
        snapshots = [
            s
            for s in _ask(platform, _snapshots)
            if s.labels.get("app") == app and s.state is SnapshotState.READY
        ]
        if not snapshots:
            report.missing(
                f"{subject.name}/RESTORE {pages}",
                "there is no proven snapshot: `pilotlight doctor` says why",
            )
            yield None
            return
        _describe(report, subject, snapshots[0], pages)
        yield platform, app


def measure(report: Report, subject: Subject, *, pages: str, count: int, dropped: int) -> None:
    """Rows `<name>/RESTORE …` for one way of bringing pages back, with `count` warm samples and
    `dropped` ones without page cache."""
    with deployed(report, subject, pages=pages) as found:
        if found is None:
            return
        platform, app = found
        for name, n, cold_cache in (
            (f"RESTORE {pages}", count, False),
            (f"RESTORE {pages}, page cache dropped", dropped, True),
        ):
            with phase(f"{subject.name}: {n} x {name}"):
                samples = [sample(platform, app, subject, drop_caches=cold_cache) for _ in range(n)]
            restored = [s for s in samples if s.start == "RESTORE"]
            if restored:
                report.rows.append(
                    Row.of(
                        f"{subject.name}/{name}",
                        "ms",
                        [s.milliseconds for s in restored],
                        note=_phases(restored),
                    )
                )
                phase_ms = [s.phases_ms.get("restore", 0.0) for s in restored]
                report.rows.append(Row.of(f"{subject.name}/{name}, restore phase", "ms", phase_ms))
            if others := [s.start for s in samples if s.start != "RESTORE"]:
                report.missing(
                    f"{subject.name}/{name}",
                    f"{len(others)} of {n} starts were {', '.join(sorted(set(others)))}",
                )


def other_rungs(report: Report, subject: Subject, *, cold: int, forks: int) -> None:
    """Rows `<name>/COLD`, of a copy that keeps nothing, and `<name>/FORK` from a resident Template:
    what RESTORE stands between."""
    app = _app(subject)
    with stack.running() as platform:
        with phase(f"{subject.name}: COLD and FORK"):
            platform.deploy(subject.source, app=app)
            platform.deploy(subject.source, app=f"{app}-cold", snapshot=False)
            samples: dict[str, list[float]] = defaultdict(list)
            for name, count in ((app, forks), (f"{app}-cold", cold)):
                for _ in range(count):
                    platform.wait_zero(name)
                    answer = platform.invoke(name, subject.function, subject.arguments)
                    samples[answer.start].append(answer.milliseconds)
        for kind in ("COLD", "FORK"):
            if samples[kind]:
                report.rows.append(Row.of(f"{subject.name}/{kind}", "ms", samples[kind]))


def together(
    report: Report, subject: Subject, *, pages: str, sizes: tuple[int, ...], rounds: int
) -> None:
    """Rows `<name>/N at once`: N calls at zero instances, each held for HOLD_S (not counted), and
    what they came up by."""
    with deployed(report, subject, pages=pages) as found:
        if found is None:
            return
        platform, app = found
        for size in sizes:
            with phase(f"{subject.name}: {size} at once"):
                answers = [a for _ in range(rounds) for a in _at_once(platform, app, size)]
            kinds = ", ".join(
                f"{n} {kind}" for kind, n in sorted(_count(a.start for a in answers).items())
            )
            report.rows.append(
                Row.of(
                    f"{subject.name}/{size} at once",
                    "ms",
                    [a.milliseconds - 1000 * HOLD_S for a in answers],
                    note=kinds,
                )
            )


def sample(platform: stack.Stack, app: str, subject: Subject, *, drop_caches: bool) -> Sample:
    """One start from nothing in memory. Raises StackFailed."""
    to_nothing(platform, app)
    if drop_caches:
        _DROP.write_text("3\n")
    answer = platform.invoke(app, subject.function, subject.arguments)
    return Sample(
        milliseconds=answer.milliseconds,
        start=answer.start,
        phases_ms=_ask(platform, lambda agent: _phases_of(agent, app)),
    )


def to_nothing(platform: stack.Stack, app: str) -> None:
    """Stop the app's instances and drop its Templates, until none comes back (the autoscaler may
    want one more). Raises StackFailed."""
    deadline, quiet_since = time.monotonic() + _PATIENCE_S, 0.0
    while quiet_since == 0 or time.monotonic() - quiet_since < _QUIET_S:
        platform.wait_zero(app)
        if _ask(platform, lambda agent: _drop(agent, app)) or quiet_since == 0:
            quiet_since = time.monotonic()
        if quiet_since > deadline:
            raise StackFailed(f"{app} comes back again and again")
        time.sleep(0.05)
    platform.wait_zero(app)


def instance_memory(report: Report, subject: Subject, *, instances: int) -> None:
    """Row `<name>/PSS per instance`: what one more fork of the same Template costs, each having
    answered a call."""
    with stack.running() as platform:
        platform.deploy(
            subject.source,
            app="bench-density",
            min_instances=instances,
            max_instances=instances,
            scaledown_window=600,
        )
        deadline = time.monotonic() + _PATIENCE_S
        while (
            len(_ask(platform, lambda agent: _usages(agent, "bench-density"))) < instances
            and time.monotonic() < deadline
        ):
            time.sleep(0.2)
        for _ in range(8 * instances):
            platform.invoke("bench-density", subject.function, subject.arguments)
        used = _ask(platform, lambda agent: _usages(agent, "bench-density"))
        report.rows.append(
            Row.of(
                f"{subject.name}/PSS per instance",
                "MiB",
                [u / MIB for u in used],
                note=f"{len(used)} forks of one Template",
            )
        )


def _app(subject: Subject) -> str:
    return f"bench-{subject.source.parent.name if subject.source.stem == 'app' else subject.source.stem}"


def _at_once(platform: stack.Stack, app: str, size: int) -> list[stack.Answer]:
    to_nothing(platform, app)
    answers: list[stack.Answer] = []
    barrier = threading.Barrier(size)

    def call() -> None:
        barrier.wait()
        answers.append(platform.invoke(app, "Adder.hold", {"seconds": HOLD_S}))

    threads = [threading.Thread(target=call) for _ in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _describe(report: Report, subject: Subject, snapshot: SnapshotInfo, pages: str) -> None:
    made_ms = sum(snapshot.phases_ms.get(name, 0.0) for name in ("quiesce", "dump", "publish"))
    note = ", ".join(f"{name} {ms:.0f}" for name, ms in snapshot.phases_ms.items())
    report.rows.append(Row.of(f"{subject.name}/image {pages}", "MiB", [snapshot.image_bytes / MIB]))
    report.rows.append(Row.of(f"{subject.name}/snapshot made {pages}", "ms", [made_ms], note=note))


def _ask(platform: stack.Stack, question: Any) -> Any:
    """Ask the node agent over its own socket."""

    async def ask() -> Any:
        agent = AgentClient(_socket(platform))
        try:
            return await question(agent)
        finally:
            await agent.aclose()

    return asyncio.run(ask())


@functools.lru_cache
def _socket(platform: stack.Stack) -> Path:
    return platform.run_directory() / "snapshotter.sock"


async def _snapshots(agent: AgentClient) -> list[SnapshotInfo]:
    return await agent.snapshots()


async def _phases_of(agent: AgentClient, app: str) -> Mapping[str, float]:
    infos = await agent.instances({"app": app})
    return max(infos, key=lambda info: info.started_at).phases_ms if infos else {}


async def _drop(agent: AgentClient, app: str) -> int:
    templates = [t for t in await agent.templates() if t.labels.get("app") == app]
    for template in templates:
        await agent.drop_template(template.revision)
    return len(templates)


async def _usages(agent: AgentClient, app: str) -> list[int]:
    return [
        int((await agent.usage(info.id))["pss_bytes"])
        for info in await agent.instances({"app": app})
    ]


def _count(kinds: Iterator[str]) -> Mapping[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for kind in kinds:
        counts[kind] += 1
    return counts


def _phases(samples: list[Sample]) -> str:
    names = list(dict.fromkeys(name for s in samples for name in s.phases_ms))
    return ", ".join(
        f"{name} {percentile([s.phases_ms.get(name, 0.0) for s in samples], 50):.1f}"
        for name in names
    )
