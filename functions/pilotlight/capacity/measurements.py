"""What the platform measured of a function: its calls, starts, resources and prices, parsed from
`GET /v1/apps/{app}/functions/{function}/service-times`."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, NamedTuple, Self

_HALF_MS = 0.5
"""The ledger keeps execution times in whole milliseconds, rounded down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCall:
    """A call that an instance answered without a start.

    Attributes:
        at: when it arrived, seconds since the epoch.
        exec_ms: from dispatch to the last byte.
        first_ms: the part of it to the first token of a stream; None without one.
        calls_at_once: calls of its instance while it ran (harmonic mean over time), itself
            included.
        found: calls that ran on its instance when it began.
        tokens_in: tokens of its prompt that were not cached.
        tokens_out: tokens of its answer.
    """

    at: float
    exec_ms: float
    first_ms: float | None
    calls_at_once: float
    found: int = 0
    tokens_in: int = 0
    tokens_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of the tenant's list, for one instance of the function, in `currency`.

    Attributes:
        instance_s: of a second of an instance.
        reserved_factor: share of it while `min_instances` keeps an instance idle.
        request, token_in, token_out: of a call, and of a token.
        rounds: whether calls are charged for a minimum or rounded duration.
    """

    currency: str
    version: str
    instance_s: Decimal
    reserved_factor: Decimal = Decimal(1)
    request: Decimal = Decimal(0)
    token_in: Decimal = Decimal(0)
    token_out: Decimal = Decimal(0)
    rounds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measured times of a function's revision with the most traffic.

    Attributes:
        since, until: the window, seconds since the epoch.
        is_cut: older calls of the window were not read.
        calls: those that an instance answered without a start, oldest first.
        failed, cold, cached: further calls of the window: that failed, that waited for a start, and
            that the response cache answered.
        starts_ms: start kind → durations of instances' starts.
        slots: calls that an instance runs at once.
        min_instances, max_instances, cpu, memory_bytes, gpu, gpu_count: as deployed; `gpu` are the
            acceptable kinds.
    """

    revision: str
    since: float
    until: float
    is_cut: bool
    calls: Sequence[MeasuredCall]
    failed: int = 0
    cold: int = 0
    cached: int = 0
    starts_ms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    is_language_model: bool = False
    slots: int = 1
    min_instances: int = 0
    max_instances: int = 1
    cpu: float = 1.0
    memory_bytes: int = 0
    gpu: Sequence[str] = ()
    gpu_count: int = 0
    prices: Prices | None = None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse an answer of the platform."""
        columns = body["calls"]
        rows = zip(*(columns[name] for name in _Row._fields), strict=True)
        calls = _with_found(sorted(_Row(*row) for row in rows))
        return cls(
            calls=calls,
            prices=None if body["prices"] is None else _prices(body["prices"]),
            **{name: body[name] for name in _SAME},
        )


_SAME = (
    "revision",
    "since",
    "until",
    "is_cut",
    "failed",
    "cold",
    "cached",
    "starts_ms",
    "is_language_model",
    "slots",
    "min_instances",
    "max_instances",
    "cpu",
    "memory_bytes",
    "gpu",
    "gpu_count",
)


class _Row(NamedTuple):
    """A call, by the columns of the answer."""

    started_at: float
    instance: int
    waited_ms: int
    exec_ms: int
    billed_ns: int
    first_token_ms: int
    tokens_in: int
    tokens_cached: int
    tokens_out: int


def _with_found(rows: Sequence[_Row]) -> list[MeasuredCall]:
    """The calls, in order of time, with what ran on their instance when each began."""
    running: dict[int, list[float]] = {}
    found = []
    for row in rows:
        call = _call(row)
        ends = running.setdefault(row.instance, [])
        while ends and ends[0] <= call.at:
            heapq.heappop(ends)
        found.append(replace(call, found=len(ends)))
        heapq.heappush(ends, call.at + call.exec_ms / 1000)
    return found


def _call(row: _Row) -> MeasuredCall:
    # An instance's time is divided among its calls to the nanosecond, so a call that was alone has
    # a share of its whole time, and is known more exactly by it.
    share_ms = row.billed_ns / 1e6
    is_alone = row.exec_ms <= share_ms <= row.exec_ms + 2
    whole_ms = share_ms if is_alone else row.exec_ms + _HALF_MS
    first_ms = min(max(float(row.first_token_ms - row.waited_ms), _HALF_MS), whole_ms)
    return MeasuredCall(
        at=row.started_at,
        exec_ms=whole_ms,
        first_ms=first_ms if row.first_token_ms else None,
        calls_at_once=max(1.0, whole_ms / share_ms) if share_ms else 1.0,
        tokens_in=max(0, row.tokens_in - row.tokens_cached),
        tokens_out=row.tokens_out,
    )


def _prices(body: Mapping[str, Any]) -> Prices:
    amounts = ("instance_s", "reserved_factor", "request", "token_in", "token_out")
    return Prices(
        currency=body["currency"],
        version=body["version"],
        rounds=body["rounds"],
        **{name: Decimal(body[name]) for name in amounts},
    )
