"""Quotas, and plans that bundle quotas and terms of service. Pure records with their bounds.

A tenant has one plan, and overrides of single keys. Section `plans` of platform.yaml adds plans and
changes the built-in ones."""

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
            f"{key} = {value!r}: must be an integer between {low:g} and {high:g}, or null for no "
            f"limit"
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(
            f"{key} = {value!r}: must be between {low:g} and {high:g}, or null for no limit"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Limits of a tenant, a key or a function; None = no limit.

    Attributes:
        requests_per_s: calls per second, enforced by a token bucket (Turner 1986).
        burst: depth of the bucket; None = the calls of one second, at least 1.
        concurrent: concurrent calls, from admission to the last byte.
        queued: calls that may wait for a slot.
        instances, gpus: running and starting ones, of all functions together. Not valid for a key.
        body_bytes: size of a request body.
        tokens_per_min: input and output tokens of language models; reserved before a call and
            settled after it."""

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
                f"burst = {self.burst}: requires requests_per_s, the rate of the token bucket"
            )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is limited."""
        return all(getattr(self, f.name) is None for f in fields(self))

    @property
    def depth(self) -> float:
        """The depth of the token bucket for requests; 0 without one."""
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
    "volume_files",
)
"""Keys of a plan that limit what a tenant stores and builds. Not valid for a key or function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Quotas):
    """A bundle of quotas and terms of service.

    Attributes:
        name: "" until known.
        weight: weight in fair sharing between tenants; 4 gets four times the share of 1.
        priority: highest priority of calls. The default of calls is STANDARD, or this if lower.
        isolation: machines to run on; RESERVED keeps `reserved_memory_bytes` of the instance memory
            of a node free for this tenant.
        latency_p99_ms, availability, utilisation: objectives shown on the dashboard; None = none.
        prices: version of the price list; None = the default one.
        stored_bytes: total size of uploaded blobs and built images; a blob uploaded by several
            tenants counts fully for each.
        builds_at_once: concurrent image builds.
        pinned_bytes: size of weights pinned on a node.
        log_bytes: size of logs on one node; the oldest are deleted.
        functions: deployed functions in all environments together. Up to 100 times as many
            revisions and history entries are kept.
        result_bytes: size of stored background calls with their results and dead letters, as in the
            database; the oldest are deleted.
        volume_files: files, directories and links of one volume."""

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
    volume_files: int | None = None

    def __post_init__(self) -> None:
        Quotas.__post_init__(self)
        for name in ("stored_bytes", "pinned_bytes", "log_bytes", "result_bytes"):
            _bound(name, getattr(self, name), 0, MAX_BYTES)
        for name in ("builds_at_once", "functions", "volume_files"):
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
                f"prices = {self.prices!r}: must be the version of a price list, or null for the "
                f"default one"
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
                f"reserved_memory_bytes = {self.reserved_memory_bytes}: requires isolation "
                f"'reserved'"
            )

    def quotas(self) -> Quotas:
        """Return only the quotas."""
        return Quotas(**{f.name: getattr(self, f.name) for f in fields(Quotas)})

    def with_overrides(self, overrides: Mapping[str, Any]) -> Plan:
        """Return the plan with single keys changed. Raises ValueError naming key, value and
        bound."""
        known = {f.name for f in fields(Plan)} - {"name"}
        if unknown := sorted(set(overrides) - known):
            raise ValueError(f"{unknown[0]}: unknown key; known: {', '.join(sorted(known))}")
        return replace(self, **overrides)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {
            name: str(value) if isinstance(value, Priority | Isolation) else value
            for name, value in asdict(self).items()
        }


UNLIMITED = Plan(name="unlimited", priority=Priority.REALTIME)
"""The default plan, without limits."""
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
        volume_files=10_000,
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
        volume_files=100_000,
    ),
    "enterprise": Plan(name="enterprise", weight=16, priority=Priority.REALTIME, builds_at_once=8),
}


def parse_quotas(body: Mapping[str, Any]) -> Quotas:
    """Parse quotas from JSON values. Raises ValueError naming key, value and bound."""
    known = {f.name for f in fields(Quotas)}
    if unknown := sorted(set(body) - known):
        raise ValueError(f"{unknown[0]}: unknown quota; known: {', '.join(sorted(known))}")
    return Quotas(**body)
