"""What ends a rollout at once, whatever its gates say: instances that cannot start, answers that
break their schema, a burn alarm.

The alarm is the first of `objectives.burn`: a burn rate of 14.4 over an hour *and* over five
minutes. Of a candidate the hour is what there is of it."""

from __future__ import annotations

from dataclasses import dataclass

from pilotlight.controller.objectives import burn
from pilotlight.controller.rollouts.records import Evidence
from pilotlight.observations import Observation, errors, judged

RECENT_S, HOUR_S = float(burn.FAST.short_s), float(burn.FAST.long_s)
CRASHED_STARTS = 3
INVALID, INVALID_SHARE = 3, 0.01
"""Answers that break their schema, and their share of all, that no version may give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A hard failure; `cause` as in `Decision`."""

    cause: str
    reason: str


def of(seen: Evidence, availability: float) -> Failure | None:
    """The hard failure of a revision, the plainest first."""
    return _crash_loop(seen.recent) or _schema(seen.recent) or _burning(seen, availability)


def _crash_loop(recent: Observation) -> Failure | None:
    if recent.starts_failed < CRASHED_STARTS or recent.starts > recent.starts_failed:
        return None
    return Failure(
        cause="crash_loop",
        reason=f"crash loop: {recent.starts_failed} starts failed in the last 5 minutes, and none "
        f"succeeded",
    )


def _schema(recent: Observation) -> Failure | None:
    calls = judged(recent)
    if recent.invalid < INVALID or recent.invalid < INVALID_SHARE * calls:
        return None
    return Failure(
        cause="schema",
        reason=f"{recent.invalid} of {calls} answers in the last 5 minutes break the schema of "
        f"the function",
    )


def _burning(seen: Evidence, availability: float) -> Failure | None:
    short, long = _spent(seen.recent, availability), _spent(seen.hour, availability)
    if not burn.fires(short, long):
        return None
    rates = (
        f"{short.burn or 0.0:.0f} times what {availability:.6g} allows, and "
        f"{long.burn or 0.0:.0f} times in the last hour"
    )
    reason = (
        f"burn-rate alarm: {short.bad} of {short.total} calls failed in 5 minutes, {rates} "
        f"(limit {burn.FAST.factor})"
    )
    return Failure(cause="burn_rate", reason=reason)


def _spent(seen: Observation, availability: float) -> burn.Spent:
    return burn.Spent(bad=errors(seen), total=judged(seen), budget=round(1 - availability, 9))
