"""What a batch costs: seconds = a·n + b, fitted to what batches of n took.

Weighted least squares in which each batch counts `DECAY` of the next one, so that the fit follows a
machine that changes. Where all batches had (nearly) the same size the slope cannot be told from the
rest: then the last slope that was known stays, and as long as there never was one, all of the cost
is taken for fixed."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.95
"""The last twenty batches make two thirds of the fit."""
MIN_SPREAD = 0.05
"""Variance of sizes (in items squared) below which they tell nothing of the slope."""
MAX_SURPRISE = 4.0
"""A batch counts as at most so many times what was expected of it: one that was held up by
something else must not look like the rule."""

MIN_WEIGHT = 5.0
"""Batches before which nothing is a surprise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyFit:
    """The fitted cost: `per_item_s` · n + `fixed_s`, neither below 0."""

    per_item_s: float
    fixed_s: float

    def seconds(self, size: int) -> float:
        """What a batch of `size` takes."""
        return self.per_item_s * size + self.fixed_s


class LatencyModel:
    """The measured cost of one kind of batch. Pure but for its own memory; owned by the event
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
        """A batch of `size` took `seconds`."""
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
