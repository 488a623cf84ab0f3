"""What a tenant may use and how it is treated: quotas, and the plans that bundle them. Pure records
with their bounds.

A tenant has one plan, and overrides of single keys of it. Section `plans` of platform.yaml adds
plans and changes those that are here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from pilotlight.spec.identifiers import Isolation, Priority

MAX_RATE = 1_000_000
MAX_COUNT = 1_000_000
MAX_BYTES = 1 << 50


def _bound(key: str, value: float | None, low: float, high: float, *, whole: bool = True) -> None:
    if value is None:
        return
    if whole and isinstance(value, float):
        raise ValueError(
            f"{key} = {value!r}: must be a whole number between {low:g} and {high:g}, or null for "
            f"no bound"
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(
            f"{key} = {value!r}: must be between {low:g} and {high:g}, or null for no bound"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Bounds of a tenant, a key or a function; None = no bound.

    Attributes:
        requests_per_s: calls per second, a token bucket (Turner 1986); `burst` is its depth, None =
        one second's worth, at least 1. concurrent: calls at once, from admission to the last byte.
        queued: calls that may wait for a slot. instances, gpus: running and starting, all functions
        together. Of a key they mean nothing and are refused. body_bytes: of one request.
        tokens_per_min: of language models, in and out; reserved before a call and settled after it.
    """

    requests_per_s: float | None = None
    burst: int | None = None
    concurrent: int | None = None
    queued: int | None = None
    instances: int | None = None
    gpus: int | None = None
    body_bytes: int | None = None
    tokens_per_min: int | None = None

    def __post_init__(self) -> None:
        _bound("requests_per_s", self.requests_per_s, 0.001, MAX_RATE, whole=False)
        _bound("burst", self.burst, 1, MAX_RATE)
        for name in ("concurrent", "queued", "instances", "gpus"):
            _bound(name, getattr(self, name), 0, MAX_COUNT)
        _bound("body_bytes", self.body_bytes, 0, MAX_BYTES)
        _bound("tokens_per_min", self.tokens_per_min, 1, 1_000_000_000)
        if self.burst is not None and self.requests_per_s is None:
            raise ValueError(
                f"burst = {self.burst}: needs requests_per_s, whose bucket it is the depth of"
            )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is bounded."""
        return all(getattr(self, f.name) is None for f in fields(self))

    @property
    def depth(self) -> float:
        """Tokens that the bucket of requests holds; 0 without one."""
        if self.requests_per_s is None:
            return 0.0
        return float(self.burst) if self.burst is not None else max(1.0, self.requests_per_s)


STORAGE_KEYS = (
    "stored_bytes",
    "builds_at_once",
    "pinned_bytes",
    "log_bytes",
    "functions",
    "result_bytes",
)
"""Keys of a plan that bound what a tenant keeps and builds: of a key or a function they mean
nothing and are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Quotas):
    """A bundle of quotas and terms.

    Attributes:
        name: "" until it is known. weight: share of what several tenants want at once; 4 gets four
        times of what 1 gets. priority: the highest that its calls may have; calls that do not say
        have STANDARD, or this where it is lower. isolation: whose machines; RESERVED keeps
        `reserved_memory_bytes` of a node's instance memory free for this tenant. latency_p99_ms,
        availability, utilisation: objectives that its dashboard compares with; None = none. prices:
        version of the price list; None = the platform's own. stored_bytes: of uploaded blobs and
        built images together; a blob that several tenants uploaded counts whole for each.
        builds_at_once: image builds that run at the same time. pinned_bytes: of weights that are
        pinned on a node. log_bytes: of logs on one node; the oldest go first. functions: that are
        deployed, in all environments together; of revisions and entries of histories 100 times as
        many are kept. result_bytes: of kept submitted calls with their results and dead letters, as
        the database has them; the oldest go first.
    """

    name: str = ""
    weight: int = 1
    priority: Priority = Priority.STANDARD
    isolation: Isolation = Isolation.SHARED
    reserved_memory_bytes: int = 0
    latency_p99_ms: float | None = None
    availability: float | None = None
    utilisation: float | None = None
    prices: str | None = None
    stored_bytes: int | None = None
    builds_at_once: int | None = None
    pinned_bytes: int | None = None
    log_bytes: int | None = None
    functions: int | None = None
    result_bytes: int | None = None

    def __post_init__(self) -> None:
        Quotas.__post_init__(self)
        for name in ("stored_bytes", "pinned_bytes", "log_bytes", "result_bytes"):
            _bound(name, getattr(self, name), 0, MAX_BYTES)
        for name in ("builds_at_once", "functions"):
            _bound(name, getattr(self, name), 0, MAX_COUNT)
        _bound("weight", self.weight, 1, 1000)
        _bound("reserved_memory_bytes", self.reserved_memory_bytes, 0, MAX_BYTES)
        _bound("latency_p99_ms", self.latency_p99_ms, 0.001, 86_400_000, whole=False)
        _bound("availability", self.availability, 0, 1, whole=False)
        _bound("utilisation", self.utilisation, 0, 1, whole=False)
        if self.weight is None or self.reserved_memory_bytes is None:
            raise ValueError("weight, reserved_memory_bytes = null: must be a number")
        if self.prices is not None and not isinstance(self.prices, str):
            raise ValueError(
                f"prices = {self.prices!r}: write the version of a price list, or null for the "
                f"platform's own"
            )
        for name, kind in (("priority", Priority), ("isolation", Isolation)):
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError as e:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}: must be one of {', '.join(kind)}"
                ) from e
        if self.reserved_memory_bytes and self.isolation is not Isolation.RESERVED:
            raise ValueError(
                f"reserved_memory_bytes = {self.reserved_memory_bytes}: needs isolation 'reserved'"
            )

    def quotas(self) -> Quotas:
        """The bounds alone."""
        return Quotas(**{f.name: getattr(self, f.name) for f in fields(Quotas)})

    def with_overrides(self, overrides: Mapping[str, Any]) -> Plan:
        """The same plan with single keys changed. Raises ValueError naming key, value and bound."""
        known = {f.name for f in fields(Plan)} - {"name"}
        if unknown := sorted(set(overrides) - known):
            raise ValueError(f"{unknown[0]}: unknown key; known: {', '.join(sorted(known))}")
        return replace(self, **overrides)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            name: str(value) if isinstance(value, Priority | Isolation) else value
            for name, value in asdict(self).items()
        }


UNLIMITED = Plan(name="unlimited", priority=Priority.REALTIME)
"""What applies where nothing else is said: no bound of its own."""
_MIB, _GIB = 1 << 20, 1 << 30
BUILT_IN_PLANS: Mapping[str, Plan] = {
    "free": Plan(
        name="free",
        requests_per_s=5,
        burst=20,
        concurrent=8,
        queued=50,
        instances=2,
        gpus=0,
        body_bytes=_MIB,
        tokens_per_min=20_000,
        stored_bytes=2 * _GIB,
        builds_at_once=1,
        pinned_bytes=0,
        log_bytes=64 * _MIB,
        functions=50,
        result_bytes=256 * _MIB,
    ),
    "standard": Plan(
        name="standard",
        requests_per_s=100,
        burst=400,
        concurrent=200,
        queued=2000,
        instances=20,
        gpus=4,
        tokens_per_min=1_000_000,
        weight=4,
        priority=Priority.REALTIME,
        stored_bytes=200 * _GIB,
        builds_at_once=2,
        pinned_bytes=50 * _GIB,
        log_bytes=_GIB,
        functions=1000,
        result_bytes=4 * _GIB,
    ),
    "enterprise": Plan(name="enterprise", weight=16, priority=Priority.REALTIME, builds_at_once=8),
}


def parse_quotas(body: Mapping[str, Any]) -> Quotas:
    """Quotas from JSON values. Raises ValueError naming key, value and bound."""
    known = {f.name for f in fields(Quotas)}
    if unknown := sorted(set(body) - known):
        raise ValueError(f"{unknown[0]}: unknown quota; known: {', '.join(sorted(known))}")
    return Quotas(**body)
