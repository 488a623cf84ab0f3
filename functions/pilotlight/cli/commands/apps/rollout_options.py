"""Rollout options of the deploy and promote commands, such as `--canary 5,25,50,100 --every 5m`,
and the syntax of gates. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from pilotlight.cli.core.formatting import parse_duration_s
from pilotlight.errors import InvalidInput

_PANEL = "Canary"
_EXAMPLE = (
    "Write METRIC, METRIC<=NUMBER, METRIC>=NUMBER, METRIC+20%, or METRIC-2% if higher is better, "
    "such as error_ratio, latency_p99+20% or feedback:score>=0.9."
)

Canary = Annotated[
    str | None,
    typer.Option(
        "--canary",
        metavar="PERCENTS",
        help="Shift traffic step by step as long as all gates pass, such as 5,25,50,100.",
        rich_help_panel=_PANEL,
    ),
]
Every = Annotated[
    str | None,
    typer.Option(
        "--every",
        metavar="DURATION",
        help="Minimum duration of a step. Default: 5m.",
        rich_help_panel=_PANEL,
    ),
]
MinSamples = Annotated[
    int | None,
    typer.Option(
        "--min-samples",
        min=1,
        help="Minimum number of calls in a step. Default: 200.",
        rich_help_panel=_PANEL,
    ),
]
Gates = Annotated[
    list[str] | None,
    typer.Option(
        "--gate",
        metavar="GATE",
        help="Condition for the next step, such as error_ratio, latency_p99+20% or "
        "cost_per_call<=0.001; may be repeated. Default: error ratio, warm p99 and cost per call, "
        "compared with stable.",
        rich_help_panel=_PANEL,
    ),
]


def parse_rollout_plan(
    canary: str | None, every: str | None, min_samples: int | None, gates: Sequence[str] | None
) -> dict[str, Any] | None:
    """The rollout plan of the options, as the control plane expects it; None without --canary.
    Raises InvalidInput."""
    if canary is None:
        if every or min_samples or gates:
            raise InvalidInput(
                "--every, --min-samples and --gate require --canary",
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
            f"--canary {text!r} is not a list of percentages", hint="Write --canary 5,25,50,100."
        ) from None


def parse_rollout_gate(text: str) -> dict[str, Any]:
    """Parse a gate: a metric alone, with an absolute bound, or with a permitted relative change.
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
        raise InvalidInput(f"--gate {text!r} is not a valid gate", hint=_EXAMPLE)
    return {"metric": text.strip()}


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"--gate {whole!r} is not a valid gate", hint=_EXAMPLE) from None
