"""Service level indicators for Prometheus: relevant and bad calls by function, and the allowed
share of bad ones.

The rules in deploy/monitoring compute burn rates from them. The controller uses the same
numbers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from activator.metrics.call_counters import FUNCTION, OTHER, LabelLimiter
from activator.routing.call_target import CallTarget
from pilotlight.spec.observations import UNCOUNTED_ARMS, Observation
from pilotlight.spec.policies import DEFAULT_OBJECTIVES
from pilotlight.spec.slis import MEASURED, BudgetSpend, Sli, compute_budget_spend

Key = tuple[tuple[str, ...], Sli]


class Indicators(Collector):
    """Sums since the start. Owner: the event loop; the metrics thread may read them a second
    late."""

    def __init__(self, functions: LabelLimiter) -> None:
        self._functions = functions
        self._sums: dict[Key, BudgetSpend] = {}

    def __repr__(self) -> str:
        return f"<Indicators {len(self._sums)}>"

    def add(self, target: CallTarget, observation: Observation) -> None:
        """Add an observation of a revision. Functions without a series of their own are left
        out."""
        labels = self._functions.of(target.tenant, target.app, target.function)
        if labels[0] == OTHER or observation.arm in UNCOUNTED_ARMS:
            return
        declared = target.spec.objectives
        for sli in Sli if declared is not None else MEASURED:
            one = compute_budget_spend(observation, declared or DEFAULT_OBJECTIVES, sli)
            known = self._sums.get((labels, sli))
            if known is not None:
                self._sums[labels, sli] = BudgetSpend(
                    bad=known.bad + one.bad, total=known.total + one.total, budget=one.budget
                )
            elif one.total:
                self._sums[labels, sli] = one

    def forget(self, labels: tuple[str, ...]) -> None:
        """Drop the series of a function."""
        for sli in Sli:
            self._sums.pop((labels, sli), None)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Current values (Prometheus' own interface)."""
        names = (*FUNCTION, "sli")
        calls = CounterMetricFamily(
            "pilotlight_slo_calls",
            "Calls that count for an indicator of an objective.",
            labels=names,
        )
        bad = CounterMetricFamily(
            "pilotlight_slo_bad_calls", "Of these, the bad ones.", labels=names
        )
        budget = GaugeMetricFamily(
            "pilotlight_slo_budget", "Share of them that may be bad.", labels=names
        )
        for (labels, sli), one in list(self._sums.items()):
            calls.add_metric((*labels, sli.value), one.total)
            bad.add_metric((*labels, sli.value), one.bad)
            budget.add_metric((*labels, sli.value), one.budget)
        yield from (calls, bad, budget)
