"""Burn rates of error budgets, and the alarm thresholds. Pure.

A *burn rate* of 1 spends exactly the budget of the window (for example 30 days) in the window; 14.4
spends 2 % of it in an hour. An alarm fires when a long window (it is significant) and a short one
(it is ongoing) both burn faster than its factor, with enough bad calls in both: one failure in
three calls is a ratio of 33 % but not significant. Multi-window, multi-burn-rate alerts: Google's
"Site Reliability Workbook", chapter 5."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from pilotlight.spec.observations import Observation
from pilotlight.spec.policies import Objectives
from pilotlight.spec.slis import (
    MEASURED,
    BudgetSpend,
    Sli,
    compute_budget_spend,
    error_budget_ratio,
)

__all__ = [
    "BURN_RATE_ALERTS",
    "FAST",
    "MEASURED",
    "WINDOWS_S",
    "BudgetSpend",
    "BurnRateAlert",
    "Severity",
    "Sli",
    "burn",
    "compute_budget_spend",
    "error_budget_ratio",
    "exceeds_burn_rate",
    "is_firing",
]


def burn(
    observation: Observation | None, objectives: Objectives, sli: Sli | str = Sli.AVAILABILITY
) -> float | None:
    """Return the burn rate of these calls; None if none of them counts for the indicator."""
    return compute_budget_spend(observation, objectives, sli).burn


class Severity(enum.StrEnum):
    """`page`: wake the person on call. `ticket`: handle on the next working day."""

    PAGE = "page"
    TICKET = "ticket"


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnRateAlert:
    """A pair of windows, in seconds, and the burn rate that both must exceed.

    Attributes:
        min_bad_long, min_bad_short: bad calls in each window below which nothing is concluded.
        min_total: the same for all calls in the long window.
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
        """Such as `1h/5m`."""
        return f"{_text(self.long_s)}/{_text(self.short_s)}"


MINUTE, HOUR, DAY = 60, 3600, 86_400
BURN_RATE_ALERTS = (
    BurnRateAlert(severity=Severity.PAGE, factor=14.4, long_s=HOUR, short_s=5 * MINUTE),
    BurnRateAlert(severity=Severity.PAGE, factor=6.0, long_s=6 * HOUR, short_s=30 * MINUTE),
    BurnRateAlert(severity=Severity.TICKET, factor=3.0, long_s=DAY, short_s=2 * HOUR),
    BurnRateAlert(severity=Severity.TICKET, factor=1.0, long_s=3 * DAY, short_s=6 * HOUR),
)
"""Of a budget of 30 days, these spend 2 % in an hour, 5 % in six hours, and 10 % in a day and in
three days. The same numbers are in deploy/monitoring/rules.yml."""
WINDOWS_S = tuple(
    sorted({seconds for alarm in BURN_RATE_ALERTS for seconds in (alarm.short_s, alarm.long_s)})
)
FAST = BURN_RATE_ALERTS[0]


def exceeds_burn_rate(
    short: BudgetSpend,
    long: BudgetSpend,
    factor: float = FAST.factor,
    *,
    min_bad_short: int = FAST.min_bad_short,
    min_bad_long: int = FAST.min_bad_long,
    min_total: int = FAST.min_total,
) -> bool:
    """Whether both windows burn faster than `factor`, on enough calls. No data never fires."""
    if long.total < min_total or long.bad < min_bad_long or short.bad < min_bad_short:
        return False
    return (short.burn or 0.0) > factor and (long.burn or 0.0) > factor


def is_firing(alarm: BurnRateAlert, by_window: Mapping[int, BudgetSpend]) -> bool:
    """Whether this alarm fires, by what was spent in each of its windows."""
    return exceeds_burn_rate(
        by_window[alarm.short_s],
        by_window[alarm.long_s],
        alarm.factor,
        min_bad_short=alarm.min_bad_short,
        min_bad_long=alarm.min_bad_long,
        min_total=alarm.min_total,
    )


def _text(seconds: int) -> str:
    for unit, size in (("d", DAY), ("h", HOUR)):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds // MINUTE}m"
