"""Quantiles of Prometheus histograms. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def histogram_quantile(buckets: Iterable[tuple[float, float]], share: float) -> float | None:
    """The value below which `share` of the observations lie, from cumulative (upper bound, count)
    pairs; None without observations.

    Interpolates linearly within a bucket, as Prometheus's histogram_quantile does. Returns the last
    finite bound if the quantile lies in the +Inf bucket."""
    ordered = sorted(buckets)
    total = ordered[-1][1] if ordered else 0.0
    if total <= 0:
        return None
    wanted, low, below = share * total, 0.0, 0.0
    for bound, count in ordered:
        if count >= wanted:
            if bound == float("inf"):
                return low
            inside = count - below
            return bound if inside <= 0 else low + (bound - low) * (wanted - below) / inside
        low, below = bound, count
    return low
