"""The requested plan of a rollout: its steps, their duration, and the gates between them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.controller.statistics.quality import SHARES
from pilotlight.errors import InvalidInput
from pilotlight.spec.monitor import QUALITY_BOUNDS
from pilotlight.spec.policies import require_in_range
from pilotlight.spec.record_json import from_json
from pilotlight.spec.traffic import WHOLE

MAX_STEPS = 20
MAX_GATES = 16
FEEDBACK = "feedback:"
"""`feedback:<metric>`: the mean of the values that `POST /v1/feedback` gave the calls; higher is
better."""
QUALITY = "quality:"
"""`quality:accuracy`, `quality:brier`, …: predictions against feedback (`pilotlight.Monitor`)."""
PREDICTION_KS = "prediction_ks"
"""Kolmogorov-Smirnov distance between the candidate's predictions and stable's."""


class GateKind(enum.StrEnum):
    """VETO: a failure ends the rollout, whatever else improved. TRADE: a stated gain in another
    metric may pay for a worsening."""

    VETO = "veto"
    TRADE = "trade"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric that compares candidate and stable.

    Attributes:
        max_increase, slack: defaults of a gate: the tolerated worsening, relative and in the
            metric's unit.
        unit: `share`, `ms`, `money` or "".
    """

    max_increase: float
    slack: float
    unit: str
    is_higher_better: bool = False


_LATENCY = Metric(max_increase=0.2, slack=5.0, unit="ms")
METRICS: Mapping[str, Metric] = {
    "error_ratio": Metric(max_increase=0.5, slack=0.002, unit="share"),
    "degraded_ratio": Metric(max_increase=0.5, slack=0.01, unit="share"),
    "incomplete_ratio": Metric(max_increase=0.5, slack=0.005, unit="share"),
    **{f"latency_p{share}": _LATENCY for share in (50, 90, 95, 99)},
    **{f"first_byte_p{share}": _LATENCY for share in (50, 90, 95, 99)},
    **{f"cold_p{share}": Metric(max_increase=0.3, slack=50.0, unit="ms") for share in (50, 90, 95)},
    "cost_per_call": Metric(max_increase=0.2, slack=0.0, unit="money"),
    "cost_per_1k_tokens": Metric(max_increase=0.2, slack=0.0, unit="money"),
    PREDICTION_KS: Metric(max_increase=0.0, slack=0.1, unit=""),
    **{
        f"{QUALITY}{name}": Metric(
            max_increase=0.02 if name in SHARES else 0.05,
            slack=0.0,
            unit="share" if name in SHARES else "",
            is_higher_better=name in SHARES,
        )
        for name in QUALITY_BOUNDS
    },
}
"""`latency_*` covers warm calls, `cold_*` calls that waited for a start; the two are never mixed.
Latency is accurate to a tenth (buckets)."""
_FEEDBACK = Metric(max_increase=0.02, slack=0.0, unit="", is_higher_better=True)


def metric_of(name: str) -> Metric:
    """The definition of a metric. Raises InvalidInput for an unknown name."""
    if name.startswith(FEEDBACK) and name != FEEDBACK:
        return _FEEDBACK
    if name not in METRICS:
        there = f"use one of {', '.join(METRICS)} or {FEEDBACK}<metric>"
        raise InvalidInput(f"rollout: gates: unknown metric {name!r}; {there}", parameter="rollout")
    return METRICS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The limit of one metric of the candidate.

    Attributes:
        max_increase: how much worse than stable it may be, as a share of stable's number (0.1 = a
            tenth); where higher is better, how much lower. None: the metric's default, unless `max`
            or `min` is given.
        slack: tolerated difference in the metric's unit (shares, milliseconds, money); None: the
            metric's default.
        max, min: bounds on the candidate's own number, independent of stable.
        paid_by: of a TRADE: the metric whose proven gain pays for more than `max_increase`.
        exchange: of a TRADE: relative worsening that one unit of relative gain pays for (2.0: one
            percent of gain pays for two of worsening).
        at_most: of a TRADE: greatest relative worsening, however great the gain.
    """

    metric: str
    kind: GateKind = GateKind.VETO
    max_increase: float | None = None
    slack: float | None = None
    max: float | None = None
    min: float | None = None
    paid_by: str = ""
    exchange: float = 0.0
    at_most: float = 1.0

    def __post_init__(self) -> None:
        known = metric_of(self.metric)
        for key in ("max_increase", "slack", "max", "min"):
            if (value := getattr(self, key)) is not None:
                require_in_range(
                    f"rollout: {self.metric}: {key}",
                    value,
                    -1e12 if key in ("max", "min") else 0,
                    1e12,
                )
        if self.min is not None and not known.is_higher_better:
            raise InvalidInput(
                f"rollout: {self.metric}: lower is better: set `max`, not `min`",
                parameter="rollout",
            )
        if self.max is not None and known.is_higher_better:
            raise InvalidInput(
                f"rollout: {self.metric}: higher is better: set `min`, not `max`",
                parameter="rollout",
            )
        self._check_trade()

    def _check_trade(self) -> None:
        if self.kind is GateKind.VETO:
            if self.paid_by or self.exchange:
                text = "`paid_by` and `exchange` require kind 'trade', not 'veto'"
                raise InvalidInput(f"rollout: {self.metric}: {text}", parameter="rollout")
            return
        metric_of(self.paid_by)
        if PREDICTION_KS in (self.metric, self.paid_by):
            text = "has no gain: use kind 'veto'"
            raise InvalidInput(f"rollout: {PREDICTION_KS} {text}", parameter="rollout")
        if self.paid_by == self.metric:
            raise InvalidInput(
                f"rollout: {self.metric} cannot pay for itself: set another metric in `paid_by`",
                parameter="rollout",
            )
        require_in_range(f"rollout: {self.metric}: exchange", self.exchange, 0.001, 1000)
        require_in_range(f"rollout: {self.metric}: at_most", self.at_most, 0.001, 100)

    @property
    def allowed_increase(self) -> float | None:
        """Allowed relative worsening against stable; None: the gate bounds only the candidate's own
        number."""
        if self.max_increase is None and (self.max is not None or self.min is not None):
            return None
        return (
            metric_of(self.metric).max_increase if self.max_increase is None else self.max_increase
        )

    @property
    def allowed_slack(self) -> float:
        """Tolerated difference, in the metric's unit."""
        return metric_of(self.metric).slack if self.slack is None else self.slack


DEFAULT_GATES = (
    Gate(metric="error_ratio"),
    Gate(metric="latency_p99"),
    Gate(metric="cost_per_call"),
)
"""Vetoes on SLO and cost: a better KPI cannot pay for them unless a gate allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """The requested plan of a rollout.

    Attributes:
        steps: percents of the traffic, rising, the last one 100.
        every_s: shortest duration of a step.
        min_samples: calls of the candidate, and feedback values on it, that a step needs before it
            can pass; from 100 on a p99 is meaningful.
        false_rollback_rate: upper bound on the probability that the comparisons of a whole rollout
            roll back a candidate that is within its gates; divided evenly among gates and steps. A
            smaller value detects a bad candidate later.
        progress_deadline_s: a step that has lasted this long without a decision is notified once.
        availability: objective of the burn-rate alarm; set from the function's own when the rollout
            begins.
    """

    steps: tuple[int, ...] = (5, 25, 50, 100)
    every_s: float = 300.0
    min_samples: int = 200
    gates: tuple[Gate, ...] = DEFAULT_GATES
    false_rollback_rate: float = 0.01
    progress_deadline_s: float = 3600.0
    availability: float = 0.999

    def __post_init__(self) -> None:
        _check_steps(self.steps)
        require_in_range("rollout: every_s", self.every_s, 1, 30 * 86_400)
        require_in_range("rollout: min_samples", self.min_samples, 1, 10_000_000)
        require_in_range("rollout: false_rollback_rate", self.false_rollback_rate, 1e-6, 0.2)
        require_in_range("rollout: progress_deadline_s", self.progress_deadline_s, 1, 90 * 86_400)
        require_in_range("rollout: availability", self.availability, 0.5, 0.99999)
        if not 1 <= len(self.gates) <= MAX_GATES:
            raise InvalidInput(
                f"rollout: {len(self.gates)} gates: give 1 to {MAX_GATES}",
                parameter="rollout",
            )

    @property
    def alpha(self) -> float:
        """False alarm rate of one gate in one step, over all looks (union bound over gates and
        steps)."""
        return self.false_rollback_rate / (len(self.gates) * len(self.steps))


def _check_steps(steps: tuple[int, ...]) -> None:
    if not 1 <= len(steps) <= MAX_STEPS:
        raise InvalidInput(
            f"rollout: {len(steps)} steps: give 1 to {MAX_STEPS}", parameter="rollout"
        )
    for step in steps:
        require_in_range("rollout: steps", step, 1, WHOLE)
    if list(steps) != sorted(set(steps)) or steps[-1] != WHOLE:
        raise InvalidInput(
            f"rollout: steps = {list(steps)}: must rise and end with {WHOLE}, such as 5, 25, 50, "
            "100",
            parameter="rollout",
        )


def parse(body: Mapping[str, Any]) -> RolloutPlan:
    """Parse a plan from JSON; missing keys have their defaults. Raises InvalidInput naming key,
    value and bound."""
    if not isinstance(body, Mapping):
        raise InvalidInput(
            f"rollout: must be an object with `steps`, not {body!r}", parameter="rollout"
        )
    return from_json(RolloutPlan, dict(body), "rollout")
