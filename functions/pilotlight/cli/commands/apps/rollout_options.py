"""The options of `deploy` that make it a rollout: `--canary 5,25,50,100 --every 5m`, and what a
gate is written as. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from pilotlight.cli.core.formatting import parse_duration_s
from pilotlight.errors import InvalidInput

_PANEL = "Canary"
_EXAMPLE = (
    "Write METRIC, METRIC<=NUMBER, METRIC+20%, or METRIC-2% where more is better: "
    "error_ratio, latency_p99+20%, feedback:score>=0.9."
)

Canary = Annotated[
    str | None,
    typer.Option(
        "--canary",
        metavar="PERCENTS",
        help="Take over step by step, on evidence: 5,25,50,100.",
        rich_help_panel=_PANEL,
    ),
]
Every = Annotated[
    str | None,
    typer.Option(
        "--every",
        metavar="DURATION",
        help="Shortest time of a step. Default: 5m.",
        rich_help_panel=_PANEL,
    ),
]
MinSamples = Annotated[
    int | None,
    typer.Option(
        "--min-samples",
        min=1,
        help="Calls that a step must have seen. Default: 200.",
        rich_help_panel=_PANEL,
    ),
]
Gates = Annotated[
    list[str] | None,
    typer.Option(
        "--gate",
        metavar="GATE",
        help="Veto, several times: error_ratio, latency_p99+20%, cost_per_call<=0.001. Default: "
        "errors, "
        "warm p99 and cost per call, against stable.",
        rich_help_panel=_PANEL,
    ),
]


def parse_rollout_plan(
    canary: str | None, every: str | None, min_samples: int | None, gates: Sequence[str] | None
) -> dict[str, Any] | None:
    """The rollout that the options ask for, as the control plane takes it; None without --canary.
    Raises InvalidInput."""
    if canary is None:
        if every or min_samples or gates:
            raise InvalidInput(
                "--every, --min-samples and --gate are of a canary",
                hint="Add --canary 5,25,50,100.",
            )
        return None
    plan: dict[str, Any] = {"steps": _steps(canary)}
    if every:
        plan["every_s"] = parse_duration_s(every)
    if min_samples:
        plan["min_samples"] = min_samples
    if gates:
        plan["gates"] = [parse_rollout_gate(text) for text in gates]
    return plan


def _steps(text: str) -> list[int]:
    try:
        return [int(part.strip().removesuffix("%")) for part in text.split(",")]
    except ValueError:
        raise InvalidInput(
            f"--canary {text!r} is no list of percents", hint="Write --canary 5,25,50,100."
        ) from None


def parse_rollout_gate(text: str) -> dict[str, Any]:
    """A veto from its text: a metric alone, with a bound of its own, or with what it may worsen.
    Raises InvalidInput."""
    for sign, key in (("<=", "max"), (">=", "min")):
        name, found, number = text.partition(sign)
        if found:
            return {"metric": name.strip(), key: _number(number, text)}
    for sign in "+-":
        name, found, number = text.rpartition(sign)
        if found and number.strip().endswith("%"):
            return {
                "metric": name.strip(),
                "max_increase": _number(number.strip()[:-1], text) / 100,
            }
    if not text.strip() or any(sign in text for sign in "<>=%"):
        raise InvalidInput(f"--gate {text!r} is not clear", hint=_EXAMPLE)
    return {"metric": text.strip()}


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"--gate {whole!r} is not clear", hint=_EXAMPLE) from None
