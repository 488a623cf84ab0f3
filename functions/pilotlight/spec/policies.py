"""What a function promises and asks for beyond its code: retries, schedules, fallbacks, variants,
objectives, and what its model is.

Records of a `FunctionSpec`, so of its revision. Frozen, standard library only; broken bounds raise
InvalidInput naming key, value and bound."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.spec.identifiers import Priority

MAX_SCHEDULES = 16
MAX_FALLBACKS = 8
"""Of fallbacks, and of variants: each rung costs the caller time."""
STAGES = ("route", "admit", "queue", "start", "exec")
"""The stages of a request's life that have budgets of their own; they add up to its latency."""
MIN_STAGE_S = 0.0001
"""The least budget of a stage."""
MIN_LEFT = 0.1
"""The part of `warm_latency_s` that stages without a budget of their own share at least, however
much the others were given."""
_STAGE_SHARES = {"route": 0.05, "admit": 0.05, "queue": 0.2, "exec": 0.7}
"""Of a warm call's time, where nothing else is said: most of it is the function's own."""
_GATE = re.compile(r"\s*(>=|<=|>|<|==)\s*(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how soon a failed call is tried again; never after its first streamed byte, and
    never past its deadline.

    Attributes:
        max_retries: attempts after the first one. initial_delay_s: before the first retry; each
        further delay is `backoff_coefficient` times the one before, at most `max_delay_s`. jitter:
        share of a delay that is drawn at random, 0 to 1 (1 = "full jitter").
    """

    max_retries: int = 3
    initial_delay_s: float = 1.0
    backoff_coefficient: float = 2.0
    max_delay_s: float = 60.0
    jitter: float = 1.0

    def __post_init__(self) -> None:
        require_in_range("max_retries", self.max_retries, 0, 100)
        require_in_range("initial_delay_s", self.initial_delay_s, 0, 3600)
        require_in_range("backoff_coefficient", self.backoff_coefficient, 1, 10)
        require_in_range("max_delay_s", self.max_delay_s, self.initial_delay_s, 86_400)
        require_in_range("jitter", self.jitter, 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPolicy:
    """How single calls of one method are gathered into one, inside an instance.

    Attributes:
        max_batch_size: calls in one batch at most. wait_ms: how long the first of a batch waits for
        others at most. buckets: lengths up to which calls share a batch, rising; the length of a
        call is that of its first argument where that has one.
            () = all lengths together.
        adaptive: wait less than `wait_ms` where the measured cost of a batch, a·n + b, says that
        waiting does not pay. retry_alone: when the body raises for several calls, each is tried
        once more alone, so that only the guilty one fails. False: the
            body must not see a call twice; its error is everybody's.
    """

    max_batch_size: int
    wait_ms: float
    buckets: tuple[int, ...] = ()
    adaptive: bool = True
    retry_alone: bool = True

    def __post_init__(self) -> None:
        require_in_range("max_batch_size", self.max_batch_size, 1, 10_000)
        require_in_range("wait_ms", self.wait_ms, 0, 60_000)
        if (
            len(self.buckets) > 64
            or any(not b > 0 for b in self.buckets)
            or list(self.buckets) != sorted(set(self.buckets))
        ):
            raise InvalidInput(
                f"buckets = {list(self.buckets)!r}: write up to 64 rising lengths, like (64, 256)",
                parameter="buckets",
            )


class MissedRunPolicy(enum.StrEnum):
    """What becomes of a schedule's times that passed while nobody was there: SKIP all, or CATCH_UP
    with one call for all of them."""

    SKIP = "skip"
    CATCH_UP = "catch_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a function calls itself: at the times of a cron expression, or each `period_s` seconds.
    One of the two.

    Attributes:
        cron: five fields, `minute hour day-of-month month day-of-week` (crontab(5)).
        timezone: an IANA name, in which cron's fields are read.
        method: of a class; "" for a function.
        arguments: JSON arguments of each call.
    """

    cron: str = ""
    period_s: float | None = None
    timezone: str = "UTC"
    missed: MissedRunPolicy = MissedRunPolicy.SKIP
    method: str = ""
    arguments: Any = None

    def __post_init__(self) -> None:
        if bool(self.cron) == (self.period_s is not None):
            raise InvalidInput(
                "schedule: give a cron expression or a period, one of them", parameter="schedule"
            )
        if self.period_s is not None:
            require_in_range("period_s", self.period_s, 1, 366 * 86_400)
        elif len(self.cron.split()) != 5:
            text = "write five fields, minute hour day-of-month month day-of-week, as '0 6 * * 1'"
            raise InvalidInput(f"schedule: cron = {self.cron!r}: {text}", parameter="schedule")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """One rung of what answers when a function cannot: another `function`, its last `cached`
    answer, or a `static` one.

    Attributes:
        kind: `function`, `cached` or `static`. function: of kind `function`: its name in the same
        app, or `app/function`; it gets the same arguments. max_age_s: of kind `cached`: the oldest
        answer to the same arguments that will do. status, body: of kind `static`: the answer, as
        JSON.
    """

    kind: str
    function: str = ""
    max_age_s: float = 3600.0
    status: int = 200
    body: Any = None

    def __post_init__(self) -> None:
        if self.kind not in ("function", "cached", "static"):
            raise InvalidInput(
                f"fallback: kind = {self.kind!r}: must be 'function', 'cached' or 'static'",
                parameter="fallback",
            )
        if (self.kind == "function") != bool(self.function):
            raise InvalidInput(
                "fallback: a function is named by kind 'function', and by it only",
                parameter="fallback",
            )
        require_in_range("max_age_s", self.max_age_s, 1, 30 * 86_400)
        require_in_range("status", self.status, 200, 299)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Another function that may answer in place of this one when there is no room for it: smaller,
    quantised, on a CPU.

    Attributes:
        function: its name in the same app; it takes the same arguments.
        priorities: calls of these priorities may be answered by it.
    """

    function: str
    priorities: tuple[Priority, ...] = (Priority.STANDARD, Priority.BATCH)

    def __post_init__(self) -> None:
        if not self.function or not self.priorities:
            raise InvalidInput(
                "variants: name a function, and the priorities it is acceptable for",
                parameter="variants",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Service level objectives of a function over `window_days`. Their indicators do not overlap.

    Attributes:
        availability: share of the calls that are answered, of those that were not refused on
        purpose. warm_latency_s, warm_ratio: this share of the calls that waited for no start is
        answered within so long. first_token_s, first_token_ratio: the same for the first byte of
        streams. cold_latency_s, cold_ratio: the same for calls that waited for a start.
        completion_ratio: share of the streams that end by themselves. degraded_ratio: share of the
        calls that may be answered by a fallback or a variant. stages_s: budgets of single stages
        (`STAGES`), in seconds of a call's latency. freeze: while the error budget of the window is
        spent, nothing is released.
    """

    availability: float = 0.999
    warm_latency_s: float = 0.1
    warm_ratio: float = 0.99
    first_token_s: float = 0.3
    first_token_ratio: float = 0.99
    cold_latency_s: float = 5.0
    cold_ratio: float = 0.95
    completion_ratio: float = 0.99
    degraded_ratio: float = 0.05
    window_days: int = 30
    stages_s: Mapping[str, float] = field(default_factory=dict)
    freeze: bool = False

    def __post_init__(self) -> None:
        for name in (
            "availability",
            "warm_ratio",
            "first_token_ratio",
            "cold_ratio",
            "completion_ratio",
        ):
            require_in_range(name, getattr(self, name), 0.5, 0.99999)
        for name in ("warm_latency_s", "first_token_s", "cold_latency_s"):
            require_in_range(name, getattr(self, name), 0.001, 86_400)
        require_in_range("degraded_ratio", self.degraded_ratio, 0, 1)
        require_in_range("window_days", self.window_days, 1, 90)
        for stage, seconds in self.stages_s.items():
            if stage not in STAGES:
                raise InvalidInput(
                    f"objectives: there is no stage {stage!r}; there are {', '.join(STAGES)}",
                    parameter="objectives",
                )
            require_in_range(f"stages_s.{stage}", seconds, MIN_STAGE_S, 86_400)

    def budgets_s(self) -> dict[str, float]:
        """The budget of each stage in seconds: those given, and of the others a share of what they
        leave.

        Without any given, the four stages of a warm call add up to `warm_latency_s`, and all five
        to `cold_latency_s`."""
        given_s = sum(seconds for stage, seconds in self.stages_s.items() if stage != "start")
        left_s = max(self.warm_latency_s - given_s, self.warm_latency_s * MIN_LEFT)
        shares = {
            stage: share for stage, share in _STAGE_SHARES.items() if stage not in self.stages_s
        }
        own = {
            stage: max(MIN_STAGE_S, left_s * share / sum(shares.values()))
            for stage, share in shares.items()
        }
        start_s = max(MIN_STAGE_S, self.cold_latency_s - self.warm_latency_s)
        return {stage: self.stages_s.get(stage, own.get(stage, start_s)) for stage in STAGES}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What the model behind a function is: told, not interpreted.

    Attributes:
        task: its type, such as `text-embedding` or `tabular-classification`.
        owner: who answers for it.
        tokenizer: by name or digest.
        sampling: defaults of its sampling, such as {"temperature": 0}.
        safety: its safety policy.
    """

    task: str = ""
    owner: str = ""
    tokenizer: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    safety: Mapping[str, Any] = field(default_factory=dict)


class RolloutStrategy(enum.StrEnum):
    """How a new revision comes to its first instance where there is no room for it beside the one
    that serves.

    SURGE: beside it, as soon as there is room; when its startup clock has run out without any, the
    old one makes room. WAIT: beside it, whenever there is room; until then the old one serves.
    SWAP: the old one makes room at once, instance by instance; calls wait in between."""

    SURGE = "surge"
    WAIT = "wait"
    SWAP = "swap"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTerms:
    """How a revision takes over from the one that serves.

    Attributes:
        strategy: what is done where there is no room for both. keep_previous_s: how long the
        revision before keeps an instance for the way back, unless somebody needs its room; it is
        billed like
            any idle one.
    """

    strategy: RolloutStrategy = RolloutStrategy.SURGE
    keep_previous_s: float = 0.0

    def __post_init__(self) -> None:
        require_in_range("keep_previous_s", self.keep_previous_s, 0, 86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A bound on one number of an offline evaluation."""

    metric: str
    operator: str
    bound: float

    def passes(self, value: float) -> bool:
        """Whether the number is good enough; NaN never is."""
        match self.operator:
            case ">=":
                return value >= self.bound
            case ">":
                return value > self.bound
            case "<=":
                return value <= self.bound
            case "<":
                return value < self.bound
        return value == self.bound

    def __str__(self) -> str:
        return f"{self.metric} {self.operator} {self.bound:g}"


def parse_gate(metric: str, text: str) -> Gate:
    """A gate from its text, as `>= 0.91`. Raises InvalidInput."""
    match = _GATE.match(text)
    if not metric or match is None:
        raise InvalidInput(
            f"require[{metric!r}] = {text!r}: write a comparison with a number, as '>= 0.91'",
            parameter="require",
        )
    return Gate(metric=metric, operator=match[1], bound=float(match[2]))


def require_in_range(key: str, value: float, low: float, high: float) -> None:
    """Raise InvalidInput unless `value` is a number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidInput(
            f"{key} = {value!r}: must be between {low:g} and {high:g}", parameter=key
        )


DEFAULT_OBJECTIVES = Objectives()
"""Of functions that declare none: what is shown of them. Nobody is called for a latency that was
never promised."""
