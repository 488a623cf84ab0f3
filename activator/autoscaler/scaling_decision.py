"""What the decider reads and returns: a revision's settings, its state and the decision."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from activator.autoscaler import kpa
from activator.autoscaler.idle_histogram import KeepAlivePolicy
from activator.autoscaler.llm_signals import FirstTokenState, FirstTokenTerms
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.instances.scaling import Scaling

MAX_STABLE_WINDOW_S = 60.0
MIN_STABLE_WINDOW_S = 1.0
"""The stable window is scaledown_window within these limits: averages over more than a minute react
too late, and a bucket is one second."""
AUTO_STABLE_WINDOW_S = 6.0
"""Knative's shortest window: where the idle histogram decides what is kept, the averages need not
keep anything as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeciderSpec:
    """Settings of one revision.

    Attributes:
        kpa: the core's settings.
        max_inputs: concurrent calls per instance.
        min_instances, max_instances: floor and ceiling.
        buffer_instances: spare instances while active: a number, or a share of the busy ones as
            "15%".
        scaledown_window_s: idle time before an instance is stopped.
        zero_delay_s: idle time before the last one is stopped.
        latency_objective_s: a call that waits longer is a signal; None = off.
        first_token: the first-token objective of a language model; None = none declared.
        max_batch_size: the largest batch of a function's methods; 0 = it gathers no batches.
        keep: decides how long instances stay idle instead of `scaledown_window_s`; None = the
            window decides."""

    kpa: kpa.KpaSpec
    max_inputs: int = 1
    min_instances: int = 0
    max_instances: int = 8
    buffer_instances: int | str = 0
    scaledown_window_s: float = 60.0
    zero_delay_s: float = 60.0
    latency_objective_s: float | None = None
    first_token: FirstTokenTerms | None = None
    max_batch_size: int = 0
    keep: KeepAlivePolicy | None = None

    @classmethod
    def of(cls, spec: FunctionSpec, *, slots: int) -> DeciderSpec:
        """Settings of a function whose instances run `slots` calls at once."""
        own = cls.from_scaling(
            replace(
                spec.scaling,
                max_inputs=slots,
                target_inputs=_at_most(spec.scaling.target_inputs, slots),
            )
        )
        own = replace(
            own,
            max_batch_size=max(
                (m.batch.max_batch_size for m in spec.methods if m.batch is not None), default=0
            ),
        )
        if spec.engine is None or spec.objectives is None:
            return own
        wait_s = (
            own.latency_objective_s
            if own.latency_objective_s is not None
            else spec.objectives.first_token_s
        )
        terms = FirstTokenTerms(
            objective_s=spec.objectives.first_token_s,
            late=round(1 - spec.objectives.first_token_ratio, 9),
        )
        return replace(own, first_token=terms, latency_objective_s=wait_s)

    @classmethod
    def from_scaling(
        cls, scaling: Scaling, *, zero_delay_s: float | None = None, reachable: bool = True
    ) -> DeciderSpec:
        """Settings from what the user declared. `zero_delay_s` None means the same as the window of
        the other instances."""
        stable_s = min(MAX_STABLE_WINDOW_S, max(MIN_STABLE_WINDOW_S, scaling.window_s))
        keep = None
        if scaling.waiting_cost is not None:
            stable_s = min(stable_s, AUTO_STABLE_WINDOW_S)
            keep = KeepAlivePolicy(waiting_cost=scaling.waiting_cost, longest_s=scaling.window_s)
        core = kpa.KpaSpec(
            target=float(scaling.target_inputs or scaling.max_inputs),
            total=float(scaling.max_inputs),
            stable_window_s=stable_s,
            target_burst_capacity=kpa.UNLIMITED_BURST,
            reachable=reachable,
        )
        return cls(
            kpa=core,
            max_inputs=scaling.max_inputs,
            min_instances=scaling.min_instances,
            max_instances=scaling.max_instances,
            buffer_instances=scaling.buffer_instances,
            scaledown_window_s=scaling.window_s,
            zero_delay_s=scaling.window_s if zero_delay_s is None else zero_delay_s,
            latency_objective_s=scaling.latency_objective_s,
            keep=keep,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeciderState:
    """State that is kept between decisions."""

    kpa: kpa.KpaState = field(default_factory=kpa.KpaState)
    first_token: FirstTokenState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDecision:
    """How many instances there should be, and why.

    Attributes:
        desired: number of instances, including starting ones.
        valid: False when there was no data and nothing should change.
        signal: what determined it: `stable`, `panic`, `activation`, `delay`, `drains`, `backlog`,
            `backlog_age`, `buffer`, `min`, `kv_memory`, `queued_tokens`, `first_token`,
            `occupancy`, `max`, `scaledown_window`, `pauses`, `zero_delay` or `no_data`.
        capacity: number of ready and starting instances at the decision.
        excess_burst_capacity, in_panic: of the core; -1 where the activator never leaves the path.
        want: number of instances that each signal requests.
        look_again_s: when time alone changes the answer; None = only a new measurement does."""

    desired: int
    valid: bool
    signal: str
    capacity: int
    excess_burst_capacity: int = 0
    in_panic: bool = False
    want: tuple[tuple[str, int], ...] = ()
    look_again_s: float | None = None

    @property
    def wanted(self) -> int:
        """The number that the load needs, without instances that are kept only because they were
        not idle long enough."""
        return max((count for _, count in self.want), default=self.desired)

    @property
    def starts(self) -> int:
        """Number of instances to start."""
        return max(0, self.desired - self.capacity)

    @property
    def stops(self) -> int:
        """Number of instances to drain; `choose_victims` selects them."""
        return max(0, self.capacity - self.desired)

    def __str__(self) -> str:
        wants = " ".join(f"{name}={count}" for name, count in self.want)
        return f"{self.capacity}->{self.desired} by {self.signal} ({wants})"


def _at_most(target: int | None, slots: int) -> int | None:
    return None if target is None else min(target, slots)
