"""What calls spend of their objectives' error budgets, and how fast. Pure.

A *burn rate* of 1 spends exactly the budget of the window (30 days, say) in the window; 14.4 spends 2 % of it in an hour. An alarm goes off
when a long window (is it real?) and a short one (is it still so?) burn faster than its factor, with enough bad calls in both: one failure
of three is a ratio of 33 % and no news. Multi-window, multi-burn-rate alerts: Google's "Site Reliability Workbook", chapter 5.

The indicators do not overlap: a failure spends availability alone, a slow success its latency alone (cold, first token or warm, by what
kind of call it was), a stream that broke completion alone, and a degraded answer its own budget alone.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from pilotlight.observations import Observation, judged, slower_than
from pilotlight.policies import Objectives


class Sli(enum.StrEnum):
    """Indicators; the value stands in addresses, alerts and rules."""

    AVAILABILITY = "availability"
    WARM_LATENCY = "warm_latency"
    FIRST_TOKEN = "first_token"
    COLD_LATENCY = "cold_latency"
    COMPLETION = "completion"
    DEGRADED = "degraded"


MEASURED = frozenset({Sli.AVAILABILITY, Sli.COMPLETION})
"""What every function promises, also one that declares no objectives: of the rest nobody is told who promised nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Calls that count for an indicator, those of them that were bad, and the share that may be.

    Attributes:
        budget: 1 - target; 0: none may be bad.
    """

    bad: int
    total: int
    budget: float

    @property
    def ratio(self) -> float | None:
        """The bad share; None without any call."""
        return self.bad / self.total if self.total else None

    @property
    def burn(self) -> float | None:
        """The burn rate; None without any call: no data is neither good nor bad."""
        if not self.total:
            return None
        if not self.budget:
            return float("inf") if self.bad else 0.0
        return self.bad / self.total / self.budget

    @property
    def left(self) -> float | None:
        """The share of the budget that is left, of the calls that there were; below 0 when it is overspent. None without any call."""
        burn = self.burn
        return None if burn is None else 1 - burn

    def __add__(self, other: Spent) -> Spent:
        return Spent(bad=self.bad + other.bad, total=self.total + other.total, budget=self.budget)


def spent(observation: Observation | None, objectives: Objectives, sli: Sli | str) -> Spent:
    """What these calls spent of one budget; nothing without an observation."""
    budget = budget_of(objectives, sli)
    if observation is None:
        return Spent(bad=0, total=0, budget=budget)
    latency = observation.latency
    match Sli(sli):
        case Sli.AVAILABILITY:
            return Spent(bad=observation.failed, total=judged(observation), budget=budget)
        case Sli.WARM_LATENCY:
            return _slow(latency.get("warm", {}), objectives.warm_latency_s, budget)
        case Sli.FIRST_TOKEN:
            return _slow(latency.get("first_byte", {}), objectives.first_token_s, budget)
        case Sli.COLD_LATENCY:
            return _slow(latency.get("cold", {}), objectives.cold_latency_s, budget)
        case Sli.COMPLETION:
            return Spent(bad=observation.streams - observation.streams_completed, total=observation.streams, budget=budget)
        case Sli.DEGRADED:
            return Spent(bad=observation.degraded, total=observation.answered, budget=budget)


def burn(observation: Observation | None, objectives: Objectives, sli: Sli | str = Sli.AVAILABILITY) -> float | None:
    """The burn rate of these calls; None where none of them counts for the indicator."""
    return spent(observation, objectives, sli).burn


def budget_of(objectives: Objectives, sli: Sli | str) -> float:
    """The share of the calls that may be bad."""
    match Sli(sli):
        case Sli.AVAILABILITY:
            target = objectives.availability
        case Sli.WARM_LATENCY:
            target = objectives.warm_ratio
        case Sli.FIRST_TOKEN:
            target = objectives.first_token_ratio
        case Sli.COLD_LATENCY:
            target = objectives.cold_ratio
        case Sli.COMPLETION:
            target = objectives.completion_ratio
        case Sli.DEGRADED:
            return objectives.degraded_ratio
    return round(1 - target, 9)  # 1 - 0.999 is a little more than 0.001


def _slow(buckets: Mapping[int, int], seconds: float, budget: float) -> Spent:
    return Spent(bad=slower_than(buckets, seconds), total=sum(buckets.values()), budget=budget)


# -- alarms -----------------------------------------------------------------------------------------------------------
class Severity(enum.StrEnum):
    """`page`: somebody is woken. `ticket`: somebody looks tomorrow."""

    PAGE = "page"
    TICKET = "ticket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A pair of windows, in seconds, and the burn rate above which both must be.

    Attributes:
        min_bad_long, min_bad_short, min_total: calls below which nothing is concluded, bad ones in either window, all in the long one.
    """

    severity: Severity
    factor: float
    long_s: int
    short_s: int
    min_bad_long: int = 5
    min_bad_short: int = 3
    min_total: int = 20

    @property
    def name(self) -> str:
        """`1h/5m`."""
        return f"{_text(self.long_s)}/{_text(self.short_s)}"


MINUTE, HOUR, DAY = 60, 3600, 86_400
ALARMS = (
    Alarm(severity=Severity.PAGE, factor=14.4, long_s=HOUR, short_s=5 * MINUTE),
    Alarm(severity=Severity.PAGE, factor=6.0, long_s=6 * HOUR, short_s=30 * MINUTE),
    Alarm(severity=Severity.TICKET, factor=3.0, long_s=DAY, short_s=2 * HOUR),
    Alarm(severity=Severity.TICKET, factor=1.0, long_s=3 * DAY, short_s=6 * HOUR),
)
"""Of 30 days' budget these spend 2 % in an hour, 5 % in six, 10 % in a day and in three. The same numbers are in
deploy/monitoring/rules.yml."""
WINDOWS_S = tuple(sorted({seconds for alarm in ALARMS for seconds in (alarm.short_s, alarm.long_s)}))
FAST = ALARMS[0]


def fires(
    short: Spent, long: Spent, factor: float = FAST.factor, *, min_bad_short: int = FAST.min_bad_short,
    min_bad_long: int = FAST.min_bad_long, min_total: int = FAST.min_total,
) -> bool:  # fmt: skip
    """Whether both windows burn faster than `factor`, on enough calls. No data never fires."""
    if long.total < min_total or long.bad < min_bad_long or short.bad < min_bad_short:
        return False
    return (short.burn or 0.0) > factor and (long.burn or 0.0) > factor


def firing(alarm: Alarm, by_window: Mapping[int, Spent]) -> bool:
    """Whether this alarm goes off, by what was spent in each of its windows."""
    return fires(
        by_window[alarm.short_s], by_window[alarm.long_s], alarm.factor, min_bad_short=alarm.min_bad_short,
        min_bad_long=alarm.min_bad_long, min_total=alarm.min_total,
    )  # fmt: skip


def _text(seconds: int) -> str:
    for unit, size in (("d", DAY), ("h", HOUR)):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds // MINUTE}m"
