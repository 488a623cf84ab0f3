"""Parses the Prometheus text format (version 0.0.4), as far as the platform's own metrics use it.
Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

_SAMPLE = re.compile(
    r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\S+)?\Z"
)
_LABEL = re.compile(r'(?P<key>[A-Za-z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSample:
    """One sample: metric name, labels, value."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    value: float


def parse_samples(text: str) -> Iterator[PrometheusSample]:
    """Parse the samples of a page. Comments and malformed lines are skipped."""
    for line in text.splitlines():
        found = None if line.startswith("#") else _SAMPLE.match(line.strip())
        if found is None:
            continue
        labels = {m["key"]: _unescaped(m["value"]) for m in _LABEL.finditer(found["labels"] or "")}
        try:
            yield PrometheusSample(name=found["name"], labels=labels, value=float(found["value"]))
        except ValueError:
            continue


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


def _unescaped(text: str) -> str:
    return text.replace(r"\"", '"').replace(r"\n", "\n").replace(r"\\", "\\")
