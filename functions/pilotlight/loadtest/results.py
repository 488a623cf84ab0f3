"""Result of one request, and the statistics of all results. Pure."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any

QUANTILES = (0.5, 0.9, 0.99)
_ROWS_PER_DECADE = 20


@dataclass(slots=True, kw_only=True)
class Result:
    """Result of one request. Times count from when it was due, so that a slow generator does not
    make the server look faster.

    Attributes:
        due_s: when it was due, in seconds from the start of the test.
        late_ms: how long after it was due it was sent: the generator's own delay.
        status: HTTP status; 0 without a response.
        error: the kind of failure in one word; "" without a failure.
        latency_ms: time to the last byte.
        first_ms: time to the first chunk of a stream; None without one.
        gaps_ms: times between chunks of a stream.
        tokens_in, tokens_out: as reported by the model server; None if not reported.
        start: start kind, as reported by the response.
        cost: as reported by the response, a decimal as text.
        id: of the call in logs and bills; "" without a response.
    """

    due_s: float
    late_ms: float = 0.0
    status: int = 0
    error: str = ""
    latency_ms: float = 0.0
    first_ms: float | None = None
    gaps_ms: MutableSequence[float] = field(default_factory=lambda: array("d"))
    tokens_in: int | None = None
    tokens_out: int | None = None
    start: str = ""
    cost: str = ""
    id: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the request succeeded."""
        return not self.error and 200 <= self.status < 300


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """The quantile of sorted values, by the nearest rank."""
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def summary(values: Sequence[float]) -> dict[str, float | int] | None:
    """n, mean, quantiles and maximum of values in ms; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    found = {f"p{share * 100:g}": nearest_rank(ordered, share) for share in QUANTILES}
    return {"n": len(ordered), "mean": sum(ordered) / len(ordered), **found, "max": ordered[-1]}


def histogram(values: Iterable[float]) -> list[tuple[float, int]]:
    """Non-empty buckets as (upper bound in ms, count); bounds grow by a constant factor, a
    twentieth of a decade."""
    counts = Counter(
        math.ceil(math.log10(max(value, 1e-3)) * _ROWS_PER_DECADE - 1e-9) for value in values
    )
    return [(10 ** (bucket / _ROWS_PER_DECADE), counts[bucket]) for bucket in sorted(counts)]


def measures(results: Sequence[Result]) -> dict[str, list[float]]:
    """Values by metric: `latency`, `ttft` and `itl` of the good results, `late` of all. Metrics
    without values are omitted."""
    good = [result for result in results if result.is_good]
    found = {
        "latency": [result.latency_ms for result in good],
        "ttft": [result.first_ms for result in good if result.first_ms is not None],
        "itl": [gap for result in good for gap in result.gaps_ms],
        "late": [result.late_ms for result in results],
    }
    return {name: values for name, values in found.items() if values}


def report(results: Sequence[Result], *, elapsed_s: float, plan: dict[str, Any]) -> dict[str, Any]:
    """Build the report as JSON values: plan, counts, rates, quantiles and histograms."""
    good = [result for result in results if result.is_good]
    found = measures(results)
    tokens_in, tokens_out = (
        sum(getattr(r, name) or 0 for r in results) for name in ("tokens_in", "tokens_out")
    )
    return {
        "plan": plan,
        "requests": len(results),
        "good": len(good),
        "errors": dict(
            Counter(result.error or str(result.status) for result in results if not result.is_good)
        ),
        "starts": dict(Counter(result.start for result in good if result.start)),
        "elapsed_s": elapsed_s,
        "offered_per_s": plan.get("rate_per_s"),
        "good_per_s": len(good) / elapsed_s if elapsed_s else 0.0,
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "tokens_out_per_s": tokens_out / elapsed_s if elapsed_s else 0.0,
        "cost": str(sum_of_costs(results)),
        "ms": {name: summary(values) for name, values in found.items()},
        "histograms_ms": {name: histogram(values) for name, values in found.items()},
    }


def sum_of_costs(results: Iterable[Result]) -> Any:
    """The exact sum of the costs in the responses."""
    from decimal import Decimal, InvalidOperation

    total = Decimal(0)
    for result in results:
        try:
            total += Decimal(result.cost or "0")
        except InvalidOperation:
            continue
    return total
