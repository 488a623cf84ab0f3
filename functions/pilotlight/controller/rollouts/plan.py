"""What a rollout was asked to do: its steps, how long each lasts, and the gates that let it go
on."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.spec.function import from_json
from pilotlight.spec.policies import require_in_range
from pilotlight.spec.traffic import WHOLE

MAX_STEPS = 20
MAX_GATES = 16
FEEDBACK = "feedback:"
"""`feedback:<metric>`: the mean of what `POST /v1/feedback` said of the calls; more is better."""


class GateKind(enum.StrEnum):
    """VETO: what it finds too bad ends the rollout, whatever else got better. TRADE: a stated gain
    in another metric may pay for it."""

    VETO = "veto"
    TRADE = "trade"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number that a candidate is compared by.

    Attributes:
        max_increase, slack: of a gate that does not say: the worsening that does not matter,
        relative and in the metric's unit. unit: `share`, `ms`, `money` or "".
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
}
"""`latency_*` are of warm calls, `cold_*` of those that waited for a start: never one mixture.
Latency is known to a tenth (buckets)."""
_FEEDBACK = Metric(max_increase=0.02, slack=0.0, unit="", is_higher_better=True)


def metric_of(name: str) -> Metric:
    """What is known of a metric. Raises InvalidInput for one that there is not."""
    if name.startswith(FEEDBACK) and name != FEEDBACK:
        return _FEEDBACK
    if name not in METRICS:
        there = f"there are {', '.join(METRICS)} and {FEEDBACK}<metric>"
        raise InvalidInput(
            f"rollout: gates: there is no metric {name!r}; {there}", parameter="rollout"
        )
    return METRICS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """How bad a metric of the candidate may be.

    Attributes:
        max_increase: how much worse than stable it may be, as a share of stable's (0.1 = a tenth);
        of a metric where more is better, how
            much less. None: the metric's own, unless `max` or `min` is given.
        slack: and what does not matter, in the metric's unit (shares, milliseconds, money); None:
        the metric's own. max, min: bounds on the candidate's own number, whatever stable does.
        paid_by: of a TRADE: the metric whose proven gain buys more than `max_increase`. exchange:
        of a TRADE: relative worsening that one unit of relative gain buys (2.0: one percent of gain
        buys two of worsening). at_most: of a TRADE: relative worsening that can be bought, however
        great the gain.
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
                f"rollout: {self.metric}: less is better: give `max`", parameter="rollout"
            )
        if self.max is not None and known.is_higher_better:
            raise InvalidInput(
                f"rollout: {self.metric}: more is better: give `min`", parameter="rollout"
            )
        self._check_trade()

    def _check_trade(self) -> None:
        if self.kind is GateKind.VETO:
            if self.paid_by or self.exchange:
                text = "a veto cannot be bought: `paid_by` and `exchange` are of kind 'trade'"
                raise InvalidInput(f"rollout: {self.metric}: {text}", parameter="rollout")
            return
        metric_of(self.paid_by)
        if self.paid_by == self.metric:
            raise InvalidInput(f"rollout: {self.metric} cannot pay for itself", parameter="rollout")
        require_in_range(f"rollout: {self.metric}: exchange", self.exchange, 0.001, 1000)
        require_in_range(f"rollout: {self.metric}: at_most", self.at_most, 0.001, 100)

    @property
    def allowed_increase(self) -> float | None:
        """Relative worsening against stable that is let pass; None: the gate bounds the candidate's
        own number only."""
        if self.max_increase is None and (self.max is not None or self.min is not None):
            return None
        return (
            metric_of(self.metric).max_increase if self.max_increase is None else self.max_increase
        )

    @property
    def allowed_slack(self) -> float:
        """What does not matter, in the metric's unit."""
        return metric_of(self.metric).slack if self.slack is None else self.slack


DEFAULT_GATES = (
    Gate(metric="error_ratio"),
    Gate(metric="latency_p99"),
    Gate(metric="cost_per_call"),
)
"""SLO and cost veto: a better KPI cannot buy them unless a gate says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """A rollout as it was asked for.

    Attributes:
        steps: percents of the traffic, rising, the last one 100. every_s: shortest time that a step
        lasts. min_samples: calls of the candidate, and feedback on it, that a step must have seen
        before it can be passed; 100 and more make
            a p99 mean something.
        false_rollback_rate: the greatest probability that the comparisons of a whole rollout take a
        candidate back that is no worse than
            its gates allow; shared evenly by gates and steps. Smaller is slower to catch.
        progress_deadline_s: a step that has lasted this long without a decision is told, once.
        availability: objective that the burn-rate alarm counts against; set from the function's own
        when the rollout begins.
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
                f"rollout: {len(self.gates)} gates: there must be 1 to {MAX_GATES}",
                parameter="rollout",
            )

    @property
    def alpha(self) -> float:
        """The false alarms that one gate may make in one step, over all looks at it (union bound
        over gates and steps)."""
        return self.false_rollback_rate / (len(self.gates) * len(self.steps))


def _check_steps(steps: tuple[int, ...]) -> None:
    if not 1 <= len(steps) <= MAX_STEPS:
        raise InvalidInput(
            f"rollout: {len(steps)} steps: there must be 1 to {MAX_STEPS}", parameter="rollout"
        )
    for step in steps:
        require_in_range("rollout: steps", step, 1, WHOLE)
    if list(steps) != sorted(set(steps)) or steps[-1] != WHOLE:
        raise InvalidInput(
            f"rollout: steps = {list(steps)}: must rise and end with {WHOLE}, as 5, 25, 50, 100",
            parameter="rollout",
        )


def parse(body: Mapping[str, Any]) -> RolloutPlan:
    """A plan from JSON; what is not said is as by default. Raises InvalidInput naming key, value
    and bound."""
    if not isinstance(body, Mapping):
        raise InvalidInput(
            f"rollout: write an object with `steps`, not {body!r}", parameter="rollout"
        )
    return from_json(RolloutPlan, dict(body), "rollout")
