"""Latency model of a batch: seconds = a·n + b, fitted to measured batches of size n.

Weighted least squares in which each batch has `DECAY` times the weight of the next one, so that the
fit adapts to changes of the machine. If all batches had (nearly) the same size, the slope cannot be
determined: then the last known slope is kept, and if there is none, the whole cost counts as
fixed."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.95
"""The last twenty batches have two thirds of the weight."""
MIN_SPREAD = 0.05
"""Variance of sizes (in items squared) below which they do not determine the slope."""
MAX_SURPRISE = 4.0
"""A batch's duration is capped at this multiple of its expected duration, to limit the effect of
outliers."""

MIN_WEIGHT = 5.0
"""Number of batches before durations are capped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyFit:
    """The fitted cost: `per_item_s` · n + `fixed_s`, neither below 0."""

    per_item_s: float
    fixed_s: float

    def seconds(self, size: int) -> float:
        """Expected duration of a batch of `size`."""
        return self.per_item_s * size + self.fixed_s


class LatencyModel:
    """The measured cost of one kind of batch. Pure except for its state; owned by the event
    loop."""

    def __init__(self) -> None:
        self._weight = self._n = self._nn = self._c = self._nc = 0.0
        self._slope_s: float | None = None
        self.line: LatencyFit | None = None

    def __repr__(self) -> str:
        if (line := self.line) is None:
            return "<LatencyModel unknown>"
        slope_ms, fixed_ms = line.per_item_s * 1000, line.fixed_s * 1000
        return f"<LatencyModel {slope_ms:.3g} ms · n + {fixed_ms:.3g} ms>"

    def note(self, size: int, seconds: float) -> None:
        """Record that a batch of `size` took `seconds`."""
        if self.line is not None and self._slope_s is not None and self._weight > MIN_WEIGHT:
            seconds = min(seconds, MAX_SURPRISE * max(self.line.seconds(size), 1e-6))
        self._weight = self._weight * DECAY + 1
        self._n = self._n * DECAY + size
        self._nn = self._nn * DECAY + size * size
        self._c = self._c * DECAY + seconds
        self._nc = self._nc * DECAY + size * seconds
        self.line = self._fitted()

    def _fitted(self) -> LatencyFit:
        mean_n, mean_c = self._n / self._weight, self._c / self._weight
        spread = self._nn / self._weight - mean_n * mean_n
        if spread >= MIN_SPREAD:
            self._slope_s = max(0.0, (self._nc / self._weight - mean_n * mean_c) / spread)
        slope_s = min(self._slope_s or 0.0, mean_c / mean_n)
        return LatencyFit(per_item_s=slope_s, fixed_s=max(0.0, mean_c - slope_s * mean_n))
