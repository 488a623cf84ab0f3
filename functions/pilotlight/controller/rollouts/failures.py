"""What ends a rollout at once, whatever its gates say: instances that cannot start, answers that break their schema, a burn alarm.

The alarm is the first row of the SRE workbook's multi-window table (chapter 5): a burn rate of 14.4 over an hour *and* over five minutes.
Of a candidate the hour is what there is of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pilotlight.controller.rollouts.records import Evidence
from pilotlight.observations import Observation, errors, judged

BURN = 14.4
RECENT_S, HOUR_S = 300.0, 3600.0
MIN_FAILED, MIN_CALLS = 5, 50
"""Below these a burn rate is noise: one failure of ten calls burns at 100."""
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


def burn(seen: Observation, availability: float) -> float | None:
    """How many times faster than allowed the error budget is spent; None by too few calls."""
    calls, failed = judged(seen), errors(seen)
    if calls < MIN_CALLS or failed < MIN_FAILED:
        return None
    return (failed / calls) / (1 - availability)


def _crash_loop(recent: Observation) -> Failure | None:
    if recent.starts_failed < CRASHED_STARTS or recent.starts > recent.starts_failed:
        return None
    return Failure(cause="crash_loop", reason=f"crash loop: {recent.starts_failed} starts failed in the last 5 minutes, and none succeeded")


def _schema(recent: Observation) -> Failure | None:
    calls = judged(recent)
    if recent.invalid < INVALID or recent.invalid < INVALID_SHARE * calls:
        return None
    return Failure(cause="schema", reason=f"{recent.invalid} of {calls} answers in the last 5 minutes break the schema of the function")


def _burning(seen: Evidence, availability: float) -> Failure | None:
    short, long = burn(seen.recent, availability), burn(seen.hour, availability)
    if short is None or long is None or min(short, long) < BURN:
        return None
    rates = f"{short:.1f} over 5 minutes and {long:.1f} over an hour"
    return Failure(cause="burn_rate", reason=f"burn-rate alarm: {rates} (≥ {BURN}) of an objective of {availability:.3%}")
