"""Conditions that end a rollout at once, whatever its gates say: instances that cannot start,
answers that violate their schema, a burn-rate alarm.

The alarm is the first of `slo.burn_rate`: a burn rate of 14.4 over one hour *and* over five
minutes. For a candidate younger than an hour, its whole life counts as the hour."""

from __future__ import annotations

from dataclasses import dataclass

from pilotlight.controller.rollouts.records import RevisionEvidence
from pilotlight.controller.slo import burn_rate
from pilotlight.spec.observations import Observation, count_eligible, count_errors

RECENT_S, HOUR_S = float(burn_rate.FAST.short_s), float(burn_rate.FAST.long_s)
CRASHED_STARTS = 3
INVALID, INVALID_SHARE = 3, 0.01
"""Number of answers that violate their schema, and their share of all, that end a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortCondition:
    """A condition that was met; `cause` as in `Decision`."""

    cause: str
    reason: str


def find_abort_condition(seen: RevisionEvidence, availability: float) -> AbortCondition | None:
    """The abort condition that a revision meets, if any; the most obvious one first."""
    return _crash_loop(seen.recent) or _schema(seen.recent) or _burning(seen, availability)


def _crash_loop(recent: Observation) -> AbortCondition | None:
    if recent.starts_failed < CRASHED_STARTS or recent.starts > recent.starts_failed:
        return None
    return AbortCondition(
        cause="crash_loop",
        reason=f"crash loop: {recent.starts_failed} starts failed in the last 5 minutes, and none "
        f"succeeded",
    )


def _schema(recent: Observation) -> AbortCondition | None:
    calls = count_eligible(recent)
    if recent.invalid < INVALID or recent.invalid < INVALID_SHARE * calls:
        return None
    return AbortCondition(
        cause="schema",
        reason=f"{recent.invalid} of {calls} answers in the last 5 minutes violate the schema of "
        f"the function",
    )


def _burning(seen: RevisionEvidence, availability: float) -> AbortCondition | None:
    short, long = _spent(seen.recent, availability), _spent(seen.hour, availability)
    if not burn_rate.exceeds_burn_rate(short, long):
        return None
    rates = (
        f"{short.burn or 0.0:.0f} times what an objective of {availability:.6g} allows, and "
        f"{long.burn or 0.0:.0f} times in the last hour"
    )
    reason = (
        f"burn-rate alarm: {short.bad} of {short.total} calls failed in 5 minutes, {rates} "
        f"(limit {burn_rate.FAST.factor})"
    )
    return AbortCondition(cause="burn_rate", reason=reason)


def _spent(seen: Observation, availability: float) -> burn_rate.BudgetSpend:
    return burn_rate.BudgetSpend(
        bad=count_errors(seen), total=count_eligible(seen), budget=round(1 - availability, 9)
    )
