"""Service level indicators: which calls count for which objective, and which of them were bad.
Pure, for both planes.

The indicators do not overlap: a failure spends availability alone, a slow success its latency alone
(cold, first token or warm, by what kind of call it was), a stream that broke completion alone, and
a degraded answer its own budget alone. What was refused on purpose, or left by its caller, counts
for none."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from pilotlight.spec.observations import Observation, count_eligible, count_slower_than
from pilotlight.spec.policies import Objectives


class Sli(enum.StrEnum):
    """Indicators; the value stands in addresses, alerts and rules."""

    AVAILABILITY = "availability"
    WARM_LATENCY = "warm_latency"
    FIRST_TOKEN = "first_token"
    COLD_LATENCY = "cold_latency"
    COMPLETION = "completion"
    DEGRADED = "degraded"


MEASURED = frozenset({Sli.AVAILABILITY, Sli.COMPLETION})
"""What every function promises, also one that declares no objectives: of the rest nobody is told
who promised nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpend:
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
        """The share of the budget that is left, of the calls that there were; below 0 when it is
        overspent. None without any call."""
        burn = self.burn
        return None if burn is None else 1 - burn

    def __add__(self, other: BudgetSpend) -> BudgetSpend:
        return BudgetSpend(
            bad=self.bad + other.bad, total=self.total + other.total, budget=self.budget
        )


def compute_budget_spend(
    observation: Observation | None, objectives: Objectives, sli: Sli | str = Sli.AVAILABILITY
) -> BudgetSpend:
    """What these calls spent of one budget; nothing without an observation."""
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


def _slow(buckets: Mapping[int, int], seconds: float, budget: float) -> BudgetSpend:
    return BudgetSpend(
        bad=count_slower_than(buckets, seconds), total=sum(buckets.values()), budget=budget
    )
