"""Report of an experiment: arms, differences to the first arm with their intervals, and whether
the results are valid.

Three problems make a report invalid, whatever its numbers: the distribution of units over the arms
differs from the plan (a sample ratio mismatch), calls were answered by a revision other than their
arm's, or units met two arms although none was stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.experiments.design import METRICS, Design, Guardrail
from pilotlight.controller.experiments.evidence import ArmExposure, ExperimentEvidence, contrasts
from pilotlight.controller.experiments.lifecycle import Experiment
from pilotlight.controller.statistics import estimates
from pilotlight.controller.statistics.estimates import Interval

VALIDITY = (
    "Intervals are confidence sequences: with probability 95 %, each holds at all times at once, "
    "so you may look as often as you like and stop at any time."
)
BREACHED, WITHIN, OPEN, UNKNOWN = "breached", "within", "open", "unknown"
HIGHER, LOWER, NOT_SHOWN, INVALID = "higher", "lower", "not shown", "invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardrailCheck:
    """State of a guardrail for one arm. `interval`: distance of the arm from the bound; entirely
    above 0 if the arm is beyond it."""

    guardrail: Guardrail
    arm: str
    state: str
    interval: Interval | None

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.guardrail}: {self.state}"
        return (
            f"guardrail '{self.guardrail}' is {self.state}: {self.interval.value:.4g} beyond the "
            f"bound, at least {self.interval.low:.4g}"
        )


def make_report(sql: sa.Connection, found: Experiment, *, now: float) -> dict[str, Any]:
    """The full report, as JSON values."""
    evidence = ExperimentEvidence(sql, found.id, found.design)
    met = evidence.met()
    ratio = sample_ratio(found.design, met)
    doubts = troubles(found.design, met, crossed=evidence.crossed(), ratio=ratio)
    metrics = [*METRICS, *evidence.feedback_metrics()]
    values = {metric: evidence.intervals(metric, alpha=estimates.ALPHA) for metric in metrics}
    return {
        "experiment": found.to_json(),
        "at": now,
        "valid": not doubts,
        "problems": doubts,
        "alpha": estimates.ALPHA,
        "peeking": VALIDITY,
        "arms": [_arm(found.design, arm.name, met, values) for arm in found.design.arms],
        "comparisons": _comparisons(evidence, found.design, metrics, values, is_valid=not doubts),
        "sample_ratio": ratio,
        "guardrails": [
            {
                "guardrail": str(one.guardrail),
                "arm": one.arm,
                "state": one.state,
                **_bounds(one.interval),
            }
            for one in check_guardrails(evidence, found.design)
        ],
    }


def problems(sql: sa.Connection, found: Experiment) -> list[str]:
    """The reasons why the report is invalid; empty if it is valid."""
    evidence = ExperimentEvidence(sql, found.id, found.design)
    met = evidence.met()
    return troubles(
        found.design, met, crossed=evidence.crossed(), ratio=sample_ratio(found.design, met)
    )


def sample_ratio(design: Design, met: Mapping[str, ArmExposure]) -> dict[str, Any]:
    """Test of the units per arm against the planned shares, up to the first stop of an arm, which
    changes the shares."""
    observed = [met.get(arm.name, ArmExposure()).units_before for arm in design.arms]
    shares = [arm.share / 100 for arm in design.arms]
    statistic, p = estimates.chi_square(observed, shares)
    names = [arm.name for arm in design.arms]
    return {
        "observed": dict(zip(names, observed, strict=True)),
        "expected": {
            name: sum(observed) * share for name, share in zip(names, shares, strict=True)
        },
        "chi_square": statistic,
        "p_single_look": p,
        "p": estimates.ratio_p(observed, shares),
    }


def troubles(
    design: Design, met: Mapping[str, ArmExposure], *, crossed: int, ratio: Mapping[str, Any]
) -> list[str]:
    """The reasons why the report is invalid; empty if it is valid."""
    out = []
    if ratio["p"] < estimates.SRM_ALPHA:
        seen = ", ".join(
            f"{arm} {count} (planned {ratio['expected'][arm]:.0f})"
            for arm, count in ratio["observed"].items()
        )
        out.append(
            f"sample ratio mismatch: {seen}; by chance this happens in one of "
            f"{1 / max(ratio['p'], 1e-300):.2g} experiments"
        )
    wrong = {
        arm.name: (met.get(arm.name, ArmExposure()).mistagged, arm.revision) for arm in design.arms
    }
    out.extend(
        f"arm {name}: {n} calls were answered by a revision other than {revision}"
        for name, (n, revision) in wrong.items()
        if n
    )
    planned = {arm.name for arm in design.arms}
    out.extend(
        f"{one.calls} calls belong to the arm {name!r}, which is not in the design"
        for name, one in sorted(met.items())
        if name not in planned
    )
    if crossed:
        out.append(f"{crossed} units met more than one arm")
    return out


def check_guardrails(evidence: ExperimentEvidence, design: Design) -> list[GuardrailCheck]:
    """Check every guardrail for every arm that is not stopped. The probability that they ever stop
    an arm that is within its bounds is at most 5 % in total."""
    first, *others = design.arms
    arms = [arm.name for arm in others if arm.name not in design.stopped]
    alpha = estimates.ALPHA / max(1, len(others) * len(design.guardrails))
    out: list[GuardrailCheck] = []
    for guardrail in design.guardrails:
        factor = 1 + guardrail.allowed if guardrail.is_relative else 1.0
        found = contrasts(
            evidence, guardrail.metric, first=first.name, arms=arms, factor=factor, alpha=alpha
        )
        out.extend(_watched(guardrail, arm, found.get(arm)) for arm in arms)
    return out


def _watched(guardrail: Guardrail, arm: str, found: Interval | None) -> GuardrailCheck:
    if found is None:
        return GuardrailCheck(guardrail=guardrail, arm=arm, state=UNKNOWN, interval=None)
    bound = 0.0 if guardrail.is_relative else guardrail.allowed
    sign = 1.0 if guardrail.is_ceiling else -1.0
    low, high = sorted((sign * (found.low - bound), sign * (found.high - bound)))
    beyond = Interval(value=sign * (found.value - bound), low=low, high=high)
    state = BREACHED if beyond.low > 0 else WITHIN if beyond.high < 0 else OPEN
    return GuardrailCheck(guardrail=guardrail, arm=arm, state=state, interval=beyond)


def _arm(
    design: Design,
    name: str,
    met: Mapping[str, ArmExposure],
    values: Mapping[str, Mapping[str, Interval]],
) -> dict[str, Any]:
    arm, one, stopped = design.arm(name), met.get(name, ArmExposure()), design.stopped.get(name)
    counts = {"units": one.units, "calls": one.calls, "mistagged": one.mistagged}
    stop = None if stopped is None else {"at": stopped.at, "reason": stopped.reason}
    known = {metric: _bounds(found[name]) for metric, found in values.items() if name in found}
    return {
        "name": name,
        "revision": arm.revision,
        "share": arm.share,
        "stopped": stop,
        **counts,
        "metrics": known,
    }


def _comparisons(
    evidence: ExperimentEvidence,
    design: Design,
    metrics: list[str],
    values: Mapping[str, Mapping[str, Interval]],
    *,
    is_valid: bool,
) -> list[dict[str, Any]]:
    first, *others = (arm.name for arm in design.arms)
    out = []
    for metric in metrics:
        found = contrasts(evidence, metric, first=first, arms=others, alpha=estimates.ALPHA)
        for arm, difference in found.items():
            base = values[metric][first].value
            share = {"relative": difference.value / base} if base else {"relative": None}
            verdict = _verdict(difference) if is_valid else INVALID
            out.append(
                {
                    "metric": metric,
                    "arm": arm,
                    "first": first,
                    **_bounds(difference),
                    **share,
                    "verdict": verdict,
                }
            )
    return out


def _verdict(difference: Interval) -> str:
    return HIGHER if difference.low > 0 else LOWER if difference.high < 0 else NOT_SHOWN


def _bounds(found: Interval | None) -> dict[str, float | None]:
    """As JSON, which has no infinity: null = no bound."""
    if found is None:
        return {"value": None, "low": None, "high": None}
    return {
        name: value if math.isfinite(value) else None
        for name, value in (("value", found.value), ("low", found.low), ("high", found.high))
    }
