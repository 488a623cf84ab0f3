"""Terms of drift monitoring, which is part of a prediction log: features and prediction that are
compared with a reference, and the label that says how good predictions were."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from pilotlight.errors import InvalidInput
from pilotlight.validation.json_paths import MAX_PATH_CHARS, Segment, parse_path

MAX_FEATURES: Final = 32
MAX_SLICES: Final = 4
MAX_WINDOW_H: Final = 168
MIN_ROWS: Final = 100
"""With fewer rows the p-values' limits do not hold."""
QUALITY_BOUNDS: Final = ("accuracy", "brier", "absolute_error", "squared_error")
PREDICTION: Final = "prediction"
"""Name of the prediction among the features."""


class Reference(enum.StrEnum):
    """What windows are compared with. BASELINE: what `pilotlight drift baseline` stored. PREVIOUS:
    the window before."""

    BASELINE = "baseline"
    PREVIOUS = "previous"


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoredFeature:
    """A value of the arguments.

    Attributes:
        path: to it, such as `$.customer.age`: names and numbers of items only.
        low, high: of numbers, the range that is expected; None = that of the reference.
    """

    path: str
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        check_path("features", self.path)
        if self.low is not None and self.high is not None and self.low > self.high:
            raise InvalidInput(
                f"monitor: {self.path}: range {self.low:g} to {self.high:g} is empty: give the "
                f"lower bound first",
                parameter="monitor",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSpec:
    """Terms of drift monitoring.

    Attributes:
        features: up to 32 values of the arguments.
        prediction: path to the prediction in the result; "" = none is watched.
        label: metric of feedback that says what would have been right; "" = none.
        positive: label whose probability the prediction is; "" = it is a label or a number.
        slices: up to 4 paths in the arguments; quality is measured for each of their values.
        reference: what windows are compared with.
        window_h: hours of a window, each of which is judged once, after its end.
        min_rows: rows that a window needs.
        psi: population stability index from which on a change is drift.
        ks: Kolmogorov-Smirnov distance from which on a change is drift.
        shares: increase of the share of missing values, or of those out of range, that is drift.
        alpha: probability of any false alarm in a window.
        quality: measure → bound: the least accuracy, the greatest error.
    """

    features: tuple[MonitoredFeature, ...] = ()
    prediction: str = ""
    label: str = ""
    positive: str = ""
    slices: tuple[str, ...] = ()
    reference: Reference = Reference.BASELINE
    window_h: int = 24
    min_rows: int = 500
    psi: float = 0.25
    ks: float = 0.1
    shares: float = 0.05
    alpha: float = 0.01
    quality: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.features and not self.prediction:
            raise _invalid("has neither features nor prediction: name what to watch")
        _require_distinct("features", [one.path for one in self.features], MAX_FEATURES)
        _require_distinct("slices", self.slices, MAX_SLICES)
        for path in self.slices:
            check_path("slices", path)
        if self.prediction:
            check_path("prediction", self.prediction)
        if (self.positive or self.slices or self.quality) and not self.label:
            raise _invalid("positive, slices and quality need label: the metric of the feedback")
        if self.label and not self.prediction:
            raise _invalid("label needs prediction: the path to what it is compared with")
        if self.positive and self.label != "label":
            raise _invalid(f"positive needs label='label', not {self.label!r}")
        for name, value, low, high in (
            ("window_h", self.window_h, 1, MAX_WINDOW_H),
            ("min_rows", self.min_rows, MIN_ROWS, 1_000_000),
            ("psi", self.psi, 0.01, 10),
            ("ks", self.ks, 0.01, 1),
            ("shares", self.shares, 0.001, 1),
            ("alpha", self.alpha, 1e-6, 0.2),
        ):
            if not low <= value <= high:
                raise _invalid(f"{name} = {value!r}: must be between {low:g} and {high:g}")
        for name, bound in self.quality.items():
            if name not in QUALITY_BOUNDS or not math.isfinite(bound) or bound < 0:
                raise _invalid(
                    f"quality: {name!r} = {bound!r}: must be one of {', '.join(QUALITY_BOUNDS)} "
                    f"and a number from 0"
                )

    @property
    def paths(self) -> frozenset[str]:
        """Paths in the arguments."""
        return frozenset({*(one.path for one in self.features), *self.slices})


def check_path(key: str, path: str) -> None:
    """Raise InvalidInput for a path that may lead to several values."""
    where = f"monitor: {key}"
    for segment in parse_path(path, where=where, parameter="monitor"):
        if segment.key is None or segment.is_deep:
            raise InvalidInput(
                f"{where}: {path[:MAX_PATH_CHARS]!r} may lead to several values: use .name, "
                f"['name'] and [0] only",
                parameter="monitor",
            )


def value_at(document: Any, path: str) -> Any:
    """Return the value that a checked path leads to; None if there is none."""
    value = document
    for key in _keys(path):
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


@lru_cache(maxsize=1024)
def _keys(path: str) -> tuple[str | int | None, ...]:
    segments: tuple[Segment, ...] = parse_path(path, where="monitor", parameter="monitor")
    return tuple(segment.key for segment in segments)


def _require_distinct(key: str, paths: Sequence[str], most: int) -> None:
    if len(paths) > most or len(set(paths)) < len(paths):
        raise _invalid(f"{key} has {len(paths)} paths: give at most {most}, each once")


def _invalid(text: str) -> InvalidInput:
    return InvalidInput(f"monitor: {text}", parameter="monitor")
