"""Changing which version answers: how soon, at what cost, and who notices.

- a change of weights to the first call on the new split, and a rollback to the first good answer;
- deploys and rollbacks under 500 requests a second: every request that was not answered 200 is
  counted;
- sticky callers: who moves when weights change, against who must;
- the caller's p99 beside a shadow that may take 15 % of the compute, and throughput with traces of
  1 % of the calls: taking turns;
- canaries judged in simulation (`canary_sim`): how often a good one is rolled back, and how soon a
  bad one is caught."""

from __future__ import annotations

import dataclasses
import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks import canary_sim, stack
from benchmarks.harness import (
    ROOT,
    Report,
    Row,
    interleave,
    options,
    paired_ratio,
    percentile,
    phase,
    progress,
)
from benchmarks.load import Load, LoadFailed, flood, steady, wrk
from pilotlight.protocol import HEADER_REVISION
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json

NEEDS = ("wrk", "h2load")
ECHO = ROOT / "benchmarks" / "functions" / "echo.py"
FUNCTION = "echo"
BODY = '{"text":"hi"}'
LOAD_PER_S = 500.0
CONNECTIONS = 32
USERS = 2000
USER = "x-user-id"
PATIENCE_S = 10.0
SETTLE_S = 1.0
SHADOW_PER_S = 100.0
NO_SNAPSHOTS = {"snapshots": False}
"""Making them in the background would take CPU from what is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured."""

    changes: int
    deploys: int
    rollbacks: int
    users: int
    seconds: float
    rounds: int


FULL = Sizes(changes=100, deploys=100, rollbacks=20, users=USERS, seconds=8.0, rounds=8)
QUICK = Sizes(changes=10, deploys=5, rollbacks=2, users=200, seconds=1.0, rounds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A deployed echo with several revisions."""

    platform: stack.Stack
    app: str

    @property
    def url(self) -> str:
        """Where it is called."""
        return self.platform.invoke_url(self.app, FUNCTION)

    def deploy(self, note: str, **more: Any) -> str:
        """A revision of its own, told apart by its description; returns its name."""
        with self.platform.client as client:
            document = next(
                f["spec"] for f in client.app(self.app)["functions"] if f["name"] == FUNCTION
            )
            spec = dataclasses.replace(from_json(FunctionSpec, document), description=note)
            return str(client.deploy(self.app, [spec], **more).functions[0].revision)

    def split(self, weights: Mapping[str, int], **more: Any) -> None:
        """Change who gets how much."""
        with self.platform.client as client:
            client.change_traffic(self.app, FUNCTION, weights=dict(weights), **more)


class Callers:
    """One connection that is kept, and asks which revision answers."""

    def __init__(self, subject: Subject) -> None:
        self._connection = http.client.HTTPConnection(
            subject.platform.url.removeprefix("http://"), timeout=PATIENCE_S
        )
        self._path = f"/v1/functions/{subject.app}/{FUNCTION}:invoke"
        self._headers = subject.platform.headers

    def revision(self, user: str = "") -> str:
        """The revision that answers this user. Raises LoadFailed for anything but 200."""
        self._connection.request(
            "POST", self._path, BODY, {**self._headers, **({USER: user} if user else {})}
        )
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise LoadFailed(f"answered {answer.status}: {body[:300]!r}")
        return str(answer.headers[HEADER_REVISION])

    def until(self, revision: str) -> float:
        """Milliseconds until this revision answers. Raises LoadFailed when it does not."""
        began = time.perf_counter()
        while self.revision() != revision:
            if time.perf_counter() - began > PATIENCE_S:
                raise LoadFailed(f"{revision} does not answer after {PATIENCE_S:g} s")
        return (time.perf_counter() - began) * 1000


def main() -> None:
    """Run it."""
    given = options(__doc__ or "", name="benchmarks.traffic", needs=NEEDS)
    sizes = QUICK if given.quick else FULL
    report = Report("traffic")
    with stack.running(snapshotter=NO_SNAPSHOTS) as platform:
        parts: Mapping[str, Callable[[], None]] = {
            "changes": lambda: changes(report, platform, count=sizes.changes),
            "deploys": lambda: deploys(
                report, platform, deployments=sizes.deploys, rollbacks=sizes.rollbacks
            ),
            "sticky": lambda: sticky(report, platform, users=sizes.users),
            "shadow": lambda: shadow(report, platform, seconds=sizes.seconds, rounds=sizes.rounds),
        }
        for name, part in parts.items():
            _attempt(report, name, part)
    _attempt(report, "traces", lambda: traces(report, seconds=sizes.seconds, rounds=sizes.rounds))
    with phase("canaries"):
        canary_sim.add(report, runs=50 if given.quick else 1000)
    report.finish(given)


def changes(report: Report, platform: stack.Stack, *, count: int) -> None:
    """All traffic from one revision to the other and back, both warm; and the same by
    `rollback`."""
    subject, first = _deployed(platform, "bench-split")
    second = subject.deploy("second")
    callers = Callers(subject)
    callers.until(second)
    # what has a name is not retired
    subject.split({second: 100}, tags={"one": first, "two": second})
    kept_ms = _to_and_fro(subject, callers, first, second, count=count)
    report.rows.append(
        Row.of(
            "split_change_ms",
            "ms",
            kept_ms,
            note="asked → first call on the new split; both have instances",
        )
    )
    subject.split({second: 100}, tags={"one": None, "two": None})
    retired_ms = _to_and_fro(subject, callers, first, second, count=count // 5)
    note = (
        "the other revision was retired: until its first instance is up, who answered before "
        "goes on"
    )
    report.rows.append(Row.of("split change, a start included", "ms", retired_ms, note=note))
    back_ms: list[float] = []
    with platform.client as client:
        for number in range(count // 5):
            subject.split({first: 100})
            callers.until(first)
            bad = subject.deploy(f"bad {number}")
            callers.until(bad)
            began = time.perf_counter()
            client.rollback(subject.app, function=FUNCTION, to=first)
            callers.until(first)
            back_ms.append((time.perf_counter() - began) * 1000)
            progress(f"rollback {number + 1}/{count // 5}")
    report.rows.append(
        Row.of("rollback_ms", "ms", back_ms, note="asked → first answer of the good revision")
    )


def _to_and_fro(
    subject: Subject, callers: Callers, first: str, second: str, *, count: int
) -> list[float]:
    took_ms: list[float] = []
    for number in range(count):
        goal = first if number % 2 == 0 else second
        began = time.perf_counter()
        subject.split({goal: 100})
        callers.until(goal)
        took_ms.append((time.perf_counter() - began) * 1000)
        progress(f"change {number + 1}/{count}")
    return took_ms


def deploys(report: Report, platform: stack.Stack, *, deployments: int, rollbacks: int) -> None:
    """New revisions and rollbacks while callers call."""
    subject, first = _deployed(platform, "bench-deploys")
    every = max(1, deployments // rollbacks)
    last_ms: list[float] = []
    with flood(
        subject.url, body=BODY, headers=platform.headers, per_s=LOAD_PER_S, connections=CONNECTIONS
    ) as statuses:
        time.sleep(SETTLE_S)
        callers = Callers(subject)
        with platform.client as client:
            for number in range(deployments):
                began = time.perf_counter()
                made = subject.deploy(f"revision {number}")
                callers.until(made)
                last_ms.append((time.perf_counter() - began) * 1000)
                if number % every == every - 1:
                    client.rollback(subject.app, function=FUNCTION, to=first)
                    callers.until(first)
                progress(f"deploy {number + 1}/{deployments}")
        counted = statuses()
    failed = counted.total() - counted[200]
    note = (
        f"{counted.total():,} requests under {LOAD_PER_S:g}/s, {deployments} deploys, "
        f"{rollbacks} rollbacks; by status {dict(counted)}"
    )
    report.rows.append(
        Row(name="failed requests", unit="", n=counted.total(), p50=failed, p99=failed, note=note)
    )
    report.rows.append(
        Row.of(
            "deploy → its first answer",
            "ms",
            last_ms,
            note="under that load, a cold start included",
        )
    )


def sticky(report: Report, platform: stack.Stack, *, users: int) -> None:
    """Users that are told apart by a header, before and after a change of weights."""
    subject, first = _deployed(platform, "bench-sticky")
    second = subject.deploy("second", no_traffic=True)
    callers = Callers(subject)
    names = [f"user-{number}" for number in range(users)]
    before: dict[str, str] = {}
    for share in (5, 10, 50, 25):
        subject.split({first: 100 - share, second: share}, sticky=f"header:{USER}")
        time.sleep(SETTLE_S)
        now = {name: callers.revision(name) for name in names}
        if before:
            moved = [name for name in names if now[name] != before[name]]
            gaining = (
                second
                if sum(r == second for r in now.values())
                >= sum(r == second for r in before.values())
                else first
            )
            astray = sum(now[name] != gaining for name in moved)
            note = f"{len(moved)} of {users} users moved; those who moved the wrong way"
            report.rows.append(
                Row(
                    name=f"moved astray, canary to {share} %",
                    unit="users",
                    n=users,
                    p50=astray,
                    p99=astray,
                    note=note,
                )
            )
        before = now


def shadow(report: Report, platform: stack.Stack, *, seconds: float, rounds: int) -> None:
    """A steady load with and without copies."""
    subject, first = _deployed(platform, "bench-shadow")
    second = subject.deploy("second", no_traffic=True)

    def run(**document: Any) -> list[float]:
        subject.split({first: 100}, **document)
        time.sleep(SETTLE_S)
        with steady(
            subject.url, body=BODY, headers=platform.headers, per_s=SHADOW_PER_S, connections=4
        ) as requests:
            time.sleep(seconds)
            found = [request.milliseconds for request in requests()]
        time.sleep(SETTLE_S)
        return found

    arms = {
        "off": lambda: run(shadow=None),
        "shadow": lambda: run(shadow={"revision": second, "percent": 100.0, "max_compute": 0.15}),
    }
    arms["shadow"]()  # its instance is up
    runs = interleave(arms, rounds=rounds)
    for name, found in runs.items():
        report.rows.append(Row.of(f"calls, {name}", "ms", [ms for one in found for ms in one]))
    p99 = {
        name: percentile([ms for one in found for ms in one], 99) for name, found in runs.items()
    }
    report.ratio("p99_shadow_over_off", p99["shadow"] / p99["off"])
    single = paired_ratio(
        *([percentile(one, 99) for one in runs[name]] for name in ("shadow", "off"))
    )
    report.remarks.append(f"p99_shadow_over_off: of single rounds {single}")


def traces(report: Report, *, seconds: float, rounds: int) -> None:
    """Two platforms that differ in one setting."""
    with ExitStack() as both:
        urls = {share: both.enter_context(_traced(share)) for share in (0.0, 0.01)}

        def through(share: float) -> Callable[[], Load]:
            subject = urls[share]

            def run() -> Load:
                load = wrk(
                    subject.url, body=BODY, headers=subject.platform.headers, seconds=seconds
                )
                time.sleep(SETTLE_S)
                return load

            return run

        loads = interleave(
            {"traces off": through(0.0), "traces of 1 %": through(0.01)}, rounds=max(rounds, 2)
        )
    for name, runs in loads.items():
        report.rows.append(Row.of(name, "req/s", [run.rps for run in runs]))
    report.ratio(
        "rps_traced_vs_off",
        paired_ratio(
            *([run.rps for run in loads[name]] for name in ("traces of 1 %", "traces off"))
        ),
    )


@contextmanager
def _traced(share: float) -> Iterator[Subject]:
    with stack.running(snapshotter=NO_SNAPSHOTS, activator={"traces_sampled": share}) as platform:
        subject, _ = _deployed(platform, "bench-traces")
        yield subject


def _deployed(platform: stack.Stack, app: str) -> tuple[Subject, str]:
    """The echo under this name, warm, and its first revision."""
    platform.deploy(ECHO, app=app)
    platform.invoke(app, FUNCTION, json.loads(BODY))
    subject = Subject(platform=platform, app=app)
    return subject, Callers(subject).revision()


def _attempt(report: Report, name: str, part: Callable[[], None]) -> None:
    """A part that cannot be measured is said to be missing; the others are measured all the
    same."""
    try:
        with phase(name):
            part()
    except (LoadFailed, stack.StackFailed) as e:
        report.missing(name, str(e))


if __name__ == "__main__":
    main()
