"""Policies of a function: retries, batching, schedules, fallbacks, variants, objectives, model
card, rollout and response cache.

The records are part of a `FunctionSpec`, and so of its revision. Frozen, standard library only;
values out of range raise InvalidInput naming key, value and bound."""

from __future__ import annotations

import enum
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.record_json import to_json

MAX_SCHEDULES = 16
MAX_FALLBACKS = 8
"""Maximum fallbacks, and variants, of a function: each one costs the caller time."""
STAGES = ("route", "admit", "queue", "start", "exec")
"""The stages of a request, which have separate latency budgets and add up to its latency."""
MIN_STAGE_S = 0.0001
"""The smallest budget of a stage."""
MIN_LEFT = 0.1
"""The minimum share of `warm_latency_s` for stages without an explicit budget, regardless of the
explicit ones."""
_STAGE_SHARES = {"route": 0.05, "admit": 0.05, "queue": 0.2, "exec": 0.7}
"""Default shares of the time of a warm call: most of it belongs to the function."""
_GATE = re.compile(r"\s*(>=|<=|>|<|==)\s*(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


MAX_EXCEPTIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Retries of a failed call, with exponential backoff. A call is never retried after its first
    streamed byte, nor beyond its deadline.

    Attributes:
        max_retries: maximum attempts after the first one.
        initial_delay_s: delay before the first retry.
        backoff_coefficient: factor by which each delay exceeds the previous one.
        max_delay_s: longest delay.
        jitter: share of a delay that is random, 0 to 1 (1 = "full jitter").
        exceptions: names of exceptions of the function after which a call is retried, as
            "ConnectionError" or "package.module.Error", with their subclasses; () = all. Failures
            that are not the function's, such as a crash, are retried in any case."""

    max_retries: int = 3
    initial_delay_s: float = 1.0
    backoff_coefficient: float = 2.0
    max_delay_s: float = 60.0
    jitter: float = 1.0
    exceptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.exceptions) > MAX_EXCEPTIONS or any(len(e) > 200 for e in self.exceptions):
            raise InvalidInput(
                f"retries.exceptions: at most {MAX_EXCEPTIONS} names of 200 characters",
                parameter="retries",
            )
        require_in_range("max_retries", self.max_retries, 0, 100)
        require_in_range("initial_delay_s", self.initial_delay_s, 0, 3600)
        require_in_range("backoff_coefficient", self.backoff_coefficient, 1, 10)
        require_in_range("max_delay_s", self.max_delay_s, self.initial_delay_s, 86_400)
        require_in_range("jitter", self.jitter, 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPolicy:
    """Dynamic batching: how single calls of one method are combined to batches in an instance.

    Attributes:
        max_batch_size: maximum calls in one batch.
        wait_ms: how long the first call of a batch waits for others at most.
        buckets: ascending length limits; only calls of the same bucket share a batch. The length of
            a call is that of its first argument, if it has one. () = no buckets.
        adaptive: wait less than `wait_ms` if, by the measured cost of a batch, a·n + b, waiting
            does not pay off.
        retry_alone: when the body raises for several calls, retry each of them once, alone, so that
            only the faulty one fails. False: for bodies that must not see a call twice; all calls
            of the batch fail."""

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
                f"buckets = {list(self.buckets)!r}: must be up to 64 ascending lengths, such as "
                f"(64, 256)",
                parameter="buckets",
            )


class MissedRunPolicy(enum.StrEnum):
    """Treatment of scheduled runs missed while the platform was down: SKIP all, or CATCH_UP with
    one call for all of them."""

    SKIP = "skip"
    CATCH_UP = "catch_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Schedule of a function: either a cron expression or an interval of `period_s` seconds.

    Attributes:
        cron: five fields, `minute hour day-of-month month day-of-week` (crontab(5)).
        timezone: IANA name of the time zone of the cron expression.
        method: method to call; "" for a function.
        arguments: JSON arguments of each call."""

    cron: str = ""
    period_s: float | None = None
    timezone: str = "UTC"
    missed: MissedRunPolicy = MissedRunPolicy.SKIP
    method: str = ""
    arguments: Any = None

    def __post_init__(self) -> None:
        if bool(self.cron) == (self.period_s is not None):
            raise InvalidInput(
                "schedule: pass either a cron expression or a period", parameter="schedule"
            )
        if self.period_s is not None:
            require_in_range("period_s", self.period_s, 1, 366 * 86_400)
        elif len(self.cron.split()) != 5:
            text = (
                "must have five fields, minute hour day-of-month month day-of-week, such as "
                "'0 6 * * 1'"
            )
            raise InvalidInput(f"schedule: cron = {self.cron!r}: {text}", parameter="schedule")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSchedule:
    """A window of time, again and again, in which a function has at least `min_instances`:
    `scaling_schedule=pilotlight.ScalingSchedule(cron="0 8 * * mon-fri", duration_s=10 * 3600,
    min_instances=2, timezone="Europe/Vienna")`.

    Attributes:
        cron: when it begins: five fields, `minute hour day-of-month month day-of-week`
            (crontab(5)).
        timezone: IANA name of the time zone of the cron expression.
        duration_s: how long it lasts, in seconds that pass.
        min_instances: instances that are kept meanwhile, without calls too. Of windows that overlap
            the largest number counts."""

    cron: str
    timezone: str = "UTC"
    duration_s: float
    min_instances: int

    def __post_init__(self) -> None:
        if not self.cron:
            raise InvalidInput("scaling_schedule: cron is missing", parameter="scaling_schedule")
        require_in_range("duration_s", self.duration_s, 60, 7 * 86_400)
        require_in_range("min_instances", self.min_instances, 1, 1000)
        _ = self.begins

    @property
    def begins(self) -> Schedule:
        """When its windows begin."""
        return Schedule(cron=self.cron, timezone=self.timezone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A fallback for when a function cannot answer: another `function`, its last `cached` answer,
    or a `static` one.

    Attributes:
        kind: `function`, `cached` or `static`.
        function: for kind `function`: its name in the same app, or `app/function`. It gets the same
            arguments.
        max_age_s: for kind `cached`: maximum age of the answer to the same arguments.
        status, body: for kind `static`: the answer, as JSON."""

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
                "fallback: function must be set for kind 'function', and only for it",
                parameter="fallback",
            )
        require_in_range("max_age_s", self.max_age_s, 1, 30 * 86_400)
        require_in_range("status", self.status, 200, 299)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Another function that may answer when this one has no capacity, for example a smaller or
    quantised model, or one on a CPU.

    Attributes:
        function: its name in the same app; it takes the same arguments.
        priorities: priorities of calls that it may answer."""

    function: str
    priorities: tuple[Priority, ...] = (Priority.STANDARD, Priority.BATCH)

    def __post_init__(self) -> None:
        if not self.function or not self.priorities:
            raise InvalidInput(
                "variants: set a function, and the priorities for which it is acceptable",
                parameter="variants",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Service level objectives of a function over `window_days`. Their indicators do not overlap.

    Attributes:
        availability: share of calls that succeed, without those intentionally rejected.
        warm_latency_s, warm_ratio: latency of calls that wait for no start, and the share of calls
            within it.
        first_token_s, first_token_ratio: the same for the first byte of streams.
        cold_latency_s, cold_ratio: the same for calls that wait for a start.
        completion_ratio: share of streams that end normally.
        degraded_ratio: share of calls that may be answered by a fallback or a variant, or from
            defaults of online features.
        stages_s: latency budgets of single stages (`STAGES`), in seconds.
        freeze: block releases while the error budget of the window is exhausted."""

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
                    f"objectives: unknown stage {stage!r}: must be one of {', '.join(STAGES)}",
                    parameter="objectives",
                )
            require_in_range(f"stages_s.{stage}", seconds, MIN_STAGE_S, 86_400)

    def budgets_s(self) -> dict[str, float]:
        """Return the budget of each stage in seconds: explicit ones, and for the others a share of
        the rest.

        Without explicit ones, the four stages of a warm call add up to `warm_latency_s`, and all
        five to `cold_latency_s`."""
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
    """Description of the model behind a function. Only `features` has an effect: a function whose
    features have another hash is refused.

    Attributes:
        task: type of model, such as `text-embedding` or `tabular-classification`.
        owner: person or team responsible for it.
        tokenizer: its name or digest.
        sampling: default sampling parameters, such as {"temperature": 0}.
        safety: its safety policy.
        features: `FeatureSchema.hash` of the features that it was trained with; "" = not known."""

    task: str = ""
    owner: str = ""
    tokenizer: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    safety: Mapping[str, Any] = field(default_factory=dict)
    features: str = ""

    def __post_init__(self) -> None:
        if self.features and not _SHA256.match(self.features):
            raise InvalidInput(
                f"card: features = {self.features[:80]!r}: must be the hash of a FeatureSchema, 64 "
                f"hexadecimal digits",
                parameter="card",
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, in training: as `model_card.json` beside the weights it is read by a
        deploy with `features=`."""
        text = json.dumps(to_json(self), indent=2)
        Path(path).write_text(f"{text}\n", encoding="utf-8")


class RolloutStrategy(enum.StrEnum):
    """How a new revision gets its first instance if there is no capacity next to the serving one.

    SURGE: start it as soon as there is capacity; if there is none until the startup timeout, stop
    an instance of the old revision. WAIT: start it whenever there is capacity; until then the old
    revision serves. SWAP: replace the old revision immediately, instance by instance; calls wait in
    between."""

    SURGE = "surge"
    WAIT = "wait"
    SWAP = "swap"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTerms:
    """How a revision replaces the serving one.

    Attributes:
        strategy: what to do if there is no capacity for both.
        keep_previous_s: how long the previous revision keeps an instance for a rollback, unless its
            capacity is needed. It is billed like any idle instance."""

    strategy: RolloutStrategy = RolloutStrategy.SURGE
    keep_previous_s: float = 0.0

    def __post_init__(self) -> None:
        require_in_range("keep_previous_s", self.keep_previous_s, 0, 86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A bound on one metric of an offline evaluation."""

    metric: str
    operator: str
    bound: float

    def passes(self, value: float) -> bool:
        """Whether a value satisfies the bound; NaN never does."""
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
    """Parse a gate such as `>= 0.91`. Raises InvalidInput."""
    match = _GATE.match(text)
    if not metric or match is None:
        raise InvalidInput(
            f"require[{metric!r}] = {text!r}: must be a comparison with a number, such as "
            f"'>= 0.91'",
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
"""Objectives of functions that declare none. They are displayed, but latencies that were not
promised raise no alerts."""


MIN_TTL_S = 1
MAX_TTL_S = 30 * 86_400
MIN_CACHE_BYTES = 2**20
MAX_CACHE_BYTES = 2**30
DEFAULT_CACHE_BYTES = 16 * 2**20
_TTL_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_TTL = re.compile(r"([1-9][0-9]{0,7})([smhd])")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCacheSpec:
    """Terms of a response cache.

    Attributes:
        ttl_s: how long an answer is served, in seconds.
        max_bytes: memory that the answers of the function may take in one activator.
        shared: activators that share a Redis also share answers in it."""

    ttl_s: int
    max_bytes: int = DEFAULT_CACHE_BYTES
    shared: bool = False

    def __post_init__(self) -> None:
        if not MIN_TTL_S <= self.ttl_s <= MAX_TTL_S:
            raise InvalidInput(
                f"cache: ttl = {self.ttl_s} s: must be {MIN_TTL_S} s to {MAX_TTL_S // 86_400} days",
                parameter="cache",
            )
        if not MIN_CACHE_BYTES <= self.max_bytes <= MAX_CACHE_BYTES:
            raise InvalidInput(
                f"cache: max_bytes = {self.max_bytes}: must be {MIN_CACHE_BYTES} to "
                f"{MAX_CACHE_BYTES} bytes",
                parameter="cache",
            )


def parse_ttl(ttl: str | float) -> int:
    """Parse "30s", "5m", "1h" or "7d", or a whole number of seconds. Raises InvalidInput."""
    if isinstance(ttl, str) and (found := _TTL.fullmatch(ttl)):
        return int(found[1]) * _TTL_UNITS[found[2]]
    is_whole = isinstance(ttl, int) or (isinstance(ttl, float) and ttl.is_integer())
    if is_whole and not isinstance(ttl, bool):
        return int(ttl)
    raise InvalidInput(
        f'cache: ttl = {ttl!r}: must be such as "30s", "5m", "1h" or "7d", or whole seconds',
        parameter="cache",
    )
