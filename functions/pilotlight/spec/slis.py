"""Service level indicators: which calls count for which objective, and which of them are bad. Pure,
for both planes.

The indicators do not overlap. A failure spends only the budget of availability, a slow success only
that of its latency (cold, first token or warm, by kind of call), a broken stream only that of
completion, and a degraded answer only its own. Calls that were intentionally rejected, or abandoned
by their caller, count for none."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from pilotlight.spec.observations import Observation, count_eligible, count_slower_than
from pilotlight.spec.policies import Objectives


class Sli(enum.StrEnum):
    """Indicators. The values appear in URLs, alerts and rules."""

    AVAILABILITY = "availability"
    WARM_LATENCY = "warm_latency"
    FIRST_TOKEN = "first_token"
    COLD_LATENCY = "cold_latency"
    COMPLETION = "completion"
    DEGRADED = "degraded"


MEASURED = frozenset({Sli.AVAILABILITY, Sli.COMPLETION})
"""Indicators that raise alerts even for functions without declared objectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpend:
    """Calls that count for an indicator, how many of them were bad, and the share that may be.

    Attributes:
        budget: 1 - target; 0: none may be bad."""

    bad: int
    total: int
    budget: float

    @property
    def ratio(self) -> float | None:
        """The share of bad calls; None without calls."""
        return self.bad / self.total if self.total else None

    @property
    def burn(self) -> float | None:
        """The burn rate; None without calls, since no data is neither good nor bad."""
        if not self.total:
            return None
        if not self.budget:
            return float("inf") if self.bad else 0.0
        return self.bad / self.total / self.budget

    @property
    def left(self) -> float | None:
        """The remaining share of the budget, given the calls so far; negative if overspent. None
        without calls."""
        burn = self.burn
        return None if burn is None else 1 - burn

    def __add__(self, other: BudgetSpend) -> BudgetSpend:
        return BudgetSpend(
            bad=self.bad + other.bad, total=self.total + other.total, budget=self.budget
        )


def compute_budget_spend(
    observation: Observation | None, objectives: Objectives, sli: Sli | str = Sli.AVAILABILITY
) -> BudgetSpend:
    """Return what these calls spent of one budget; nothing without an observation."""
    budget = error_budget_ratio(objectives, sli)
    if observation is None:
        return BudgetSpend(bad=0, total=0, budget=budget)
    latency = observation.latency
    match Sli(sli):
        case Sli.AVAILABILITY:
            return BudgetSpend(
                bad=observation.failed, total=count_eligible(observation), budget=budget
            )
        case Sli.WARM_LATENCY:
            return _slow(latency.get("warm", {}), objectives.warm_latency_s, budget)
        case Sli.FIRST_TOKEN:
            return _slow(latency.get("first_byte", {}), objectives.first_token_s, budget)
        case Sli.COLD_LATENCY:
            return _slow(latency.get("cold", {}), objectives.cold_latency_s, budget)
        case Sli.COMPLETION:
            return BudgetSpend(
                bad=observation.streams - observation.streams_completed,
                total=observation.streams,
                budget=budget,
            )
        case Sli.DEGRADED:
            return BudgetSpend(bad=observation.degraded, total=observation.answered, budget=budget)


def error_budget_ratio(objectives: Objectives, sli: Sli | str) -> float:
    """Return the share of calls that may be bad."""
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


def _slow(buckets: Mapping[int, int], seconds: float, budget: float) -> BudgetSpend:
    return BudgetSpend(
        bad=count_slower_than(buckets, seconds), total=sum(buckets.values()), budget=budget
    )
