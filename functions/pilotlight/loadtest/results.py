"""What came back of one request, and of all of them together. Pure."""

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
    """One request. Milliseconds count from the moment it was due, so that a late sender does not
    flatter the server.

    Attributes:
        due_s: seconds from the begin of the test.
        late_ms: how much later than due it was really sent: the generator's own delay.
        status: HTTP status; 0 when no answer came.
        error: what went wrong, one word; "" when nothing did.
        latency_ms: to the last byte.
        first_ms: to the first piece of a stream; None without one.
        gaps_ms: between pieces of a stream.
        tokens_in, tokens_out: as the model's server counted them; None where nothing was said.
        start: how the instance came up, as the answer says.
        cost: as the answer says, a decimal as text.
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

    @property
    def is_good(self) -> bool:
        """Whether it was answered as it should be."""
        return not self.error and 200 <= self.status < 300


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` of them are, by nearest rank; None of nothing."""
    if not values:
        return None
    return _nearest(sorted(values), share)


def _nearest(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def summary(values: Sequence[float]) -> dict[str, float | int] | None:
    """n, mean, quantiles and the greatest of milliseconds; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    found = {f"p{share * 100:g}": _nearest(ordered, share) for share in QUANTILES}
    return {"n": len(ordered), "mean": sum(ordered) / len(ordered), **found, "max": ordered[-1]}


def histogram(values: Iterable[float]) -> list[tuple[float, int]]:
    """(upper end in ms, count), in buckets that grow by a constant factor, a twentieth of a decade;
    without empty ones."""
    counts = Counter(
        math.ceil(math.log10(max(value, 1e-3)) * _ROWS_PER_DECADE - 1e-9) for value in values
    )
    return [(10 ** (bucket / _ROWS_PER_DECADE), counts[bucket]) for bucket in sorted(counts)]


def measures(results: Sequence[Result]) -> dict[str, list[float]]:
    """What is looked at, by name: `latency`, `ttft` and `itl`, of the good ones; `late` of all.
    Without those that nobody has."""
    good = [result for result in results if result.is_good]
    found = {
        "latency": [result.latency_ms for result in good],
        "ttft": [result.first_ms for result in good if result.first_ms is not None],
        "itl": [gap for result in good for gap in result.gaps_ms],
        "late": [result.late_ms for result in results],
    }
    return {name: values for name, values in found.items() if values}


def report(results: Sequence[Result], *, elapsed_s: float, plan: dict[str, Any]) -> dict[str, Any]:
    """Everything as JSON values: the plan, counts, rates, quantiles and histograms."""
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
    """What the answers said that they cost, exactly."""
    from decimal import Decimal, InvalidOperation

    total = Decimal(0)
    for result in results:
        try:
            total += Decimal(result.cost or "0")
        except InvalidOperation:
            continue
    return total
