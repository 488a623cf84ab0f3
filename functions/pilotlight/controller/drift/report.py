"""The report on one window: each feature against its reference, and quality against its bounds.
Pure.

A change is drift if it is large and proven: an effect from its bound on (PSI, KS, a share), and a
p-value that, corrected for all tests of the window (Holm), is below `alpha`. So a stationary stream
raises a false alarm in at most that share of the windows, however many features there are."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pilotlight.controller.drift.sketch_store import FeatureCounts
from pilotlight.controller.statistics import distributions
from pilotlight.controller.statistics.distributions import PSI_MODERATE
from pilotlight.controller.statistics.estimates import interval
from pilotlight.controller.statistics.quality import SHARES, Quality
from pilotlight.spec.monitor import PREDICTION, MonitorSpec
from pilotlight.spec.sketches import Sketch


class DriftStatus(enum.StrEnum):
    """Of a window or a feature. NO_DATA: too few rows; NO_REFERENCE: nothing to compare with.
    MODERATE: a proven PSI between 0.1 and its bound. QUALITY: proven worse than its bound."""

    OK = "ok"
    MODERATE = "moderate"
    DRIFT = "drift"
    QUALITY = "quality"
    NO_DATA = "no_data"
    NO_REFERENCE = "no_reference"


ALARMS = frozenset({DriftStatus.DRIFT, DriftStatus.QUALITY})


class _Test(NamedTuple):
    """A change of one feature: how large, from when on it is drift, and the p-value."""

    what: str
    effect: float
    bound: float
    p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureDrift:
    """One feature's change. Shares are of all rows.

    Attributes:
        psi, ks: against the reference; None without values on either side, `ks` for categories too.
        p: the smallest p-value of its changes, corrected.
        outside: share of values out of the range, declared or of the reference.
        reasons: changes that are drift, as text.
    """

    feature: str
    status: DriftStatus
    rows: int
    psi: float | None = None
    ks: float | None = None
    p: float | None = None
    missing: float = 0.0
    missing_reference: float = 0.0
    outside: float = 0.0
    outside_reference: float = 0.0
    reasons: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceQuality:
    """Quality of the predictions in one slice; "" = of all.

    Attributes:
        measures: name → value, low, high.
        broken: measures that are proven worse than their bounds.
    """

    slice: str
    labels: int
    measures: Mapping[str, Mapping[str, float]]
    calibration_error: float | None = None
    calibration: Sequence[Mapping[str, float]] = ()
    broken: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """One window. `since_h`, `until_h`: hours since the epoch."""

    status: DriftStatus
    since_h: int
    until_h: int
    rows: int
    reference_rows: int
    features: Sequence[FeatureDrift]
    quality: Sequence[SliceQuality] = ()

    @property
    def drifted(self) -> list[str]:
        """Names of features in drift."""
        return [one.feature for one in self.features if one.status is DriftStatus.DRIFT]

    @property
    def broken(self) -> list[str]:
        """Broken bounds of quality, with their slices."""
        return [f"{name} {one.slice}".strip() for one in self.quality for name in one.broken]

    @property
    def max_psi(self) -> float:
        """The greatest stability index."""
        return max((one.psi for one in self.features if one.psi is not None), default=0.0)


def compare(
    terms: MonitorSpec,
    reference: FeatureCounts | None,
    current: FeatureCounts,
    *,
    since_h: int,
    until_h: int,
    quality: Sequence[SliceQuality] = (),
) -> DriftReport:
    """Compare a window with the reference."""
    names = [one.path for one in terms.features] + ([PREDICTION] if terms.prediction else [])
    features: list[FeatureDrift] = []
    is_broken = any(one.broken for one in quality)
    if current.rows < terms.min_rows:
        status = DriftStatus.NO_DATA
    elif reference is None or reference.rows < terms.min_rows:
        status = DriftStatus.NO_REFERENCE
    else:
        features = _features(terms, names, reference, current)
        found = {one.status for one in features}
        status = next(
            (one for one in (DriftStatus.DRIFT, DriftStatus.MODERATE) if one in found),
            DriftStatus.OK,
        )
    if is_broken and status is not DriftStatus.DRIFT:
        status = DriftStatus.QUALITY
    return DriftReport(
        status=status,
        since_h=since_h,
        until_h=until_h,
        rows=current.rows,
        reference_rows=reference.rows if reference is not None else 0,
        features=features,
        quality=quality,
    )


def slice_quality(
    terms: MonitorSpec, name: str, found: Quality, *, comparisons: int
) -> SliceQuality:
    """Format the quality of a slice, and test its bounds. `comparisons`: slices times bounds, for
    the false alarm rate of all."""
    alpha = terms.alpha / max(1, comparisons)
    broken = []
    for measure, bound in terms.quality.items():
        if (estimate := found.estimates.get(measure)) is not None:
            sure = interval(estimate, alpha=alpha)
            if sure.high < bound if measure in SHARES else sure.low > bound:
                broken.append(measure)
    return SliceQuality(
        slice=name,
        labels=found.n,
        measures={
            measure: {"value": one.value, "low": one.low, "high": one.high}
            for measure, one in found.intervals().items()
        },
        calibration_error=found.calibration_error,
        calibration=[one._asdict() for one in found.bins],
        broken=broken,
    )


def _features(
    terms: MonitorSpec, names: Sequence[str], reference: FeatureCounts, current: FeatureCounts
) -> list[FeatureDrift]:
    declared = {one.path for one in terms.features if not one.low is one.high is None}
    empty = Sketch()
    pairs = {
        name: (reference.features.get(name, empty), current.features.get(name, empty))
        for name in names
    }
    tests = {
        name: _tests(terms, *pair, is_declared=name in declared)
        for name, pair in pairs.items()
        if pair[0].rows
    }
    adjusted = iter(distributions.holm([one.p for each in tests.values() for one in each]))
    by_name = {
        name: [one._replace(p=next(adjusted)) for one in each] for name, each in tests.items()
    }
    return [
        _drift(terms, name, pairs[name], by_name.get(name), is_declared=name in declared)
        for name in names
    ]


def _tests(
    terms: MonitorSpec, reference: Sketch, current: Sketch, *, is_declared: bool
) -> list[_Test]:
    counts = distributions.psi_bins(reference, current)
    tests = [_Test("psi", distributions.psi(counts), terms.psi, distributions.psi_p(counts))]
    if reference.is_numeric and current.is_numeric:
        distance = distributions.ks(reference, current)
        p = distributions.ks_p(distance, reference.present, current.present)
        tests.append(_Test("ks", distance, terms.ks, p))
    for what, hits, of in (
        ("missing", (current.missing, reference.missing), (current.rows, reference.rows)),
        (
            "outside",
            _outside(reference, current, is_declared=is_declared),
            (current.present, reference.present),
        ),
    ):
        more = hits[0] / max(1, of[0]) - hits[1] / max(1, of[1])
        tests.append(_Test(what, more, terms.shares, distributions.share_p(hits, of)))
    return tests


def _outside(reference: Sketch, current: Sketch, *, is_declared: bool) -> tuple[int, int]:
    """Values out of the declared range, or of that of the reference: now, and in the reference."""
    if is_declared:
        return current.outside, reference.outside
    return distributions.outside(reference, current), 0


def _drift(
    terms: MonitorSpec,
    name: str,
    pair: tuple[Sketch, Sketch],
    tests: Sequence[_Test] | None,
    *,
    is_declared: bool,
) -> FeatureDrift:
    reference, current = pair
    if tests is None:
        return FeatureDrift(feature=name, status=DriftStatus.NO_REFERENCE, rows=current.rows)
    found = {one.what: one for one in tests}
    beyond, expected = _outside(reference, current, is_declared=is_declared)
    is_compared = bool(reference.present and current.present)
    proven = [one for one in tests if one.p < terms.alpha]
    drifted = [one for one in proven if one.effect >= one.bound]
    is_moderate = any(one.what == "psi" and one.effect >= PSI_MODERATE for one in proven)
    status = (
        DriftStatus.DRIFT if drifted else DriftStatus.MODERATE if is_moderate else DriftStatus.OK
    )
    return FeatureDrift(
        feature=name,
        status=status,
        rows=current.rows,
        psi=found["psi"].effect if is_compared else None,
        ks=found["ks"].effect if "ks" in found else None,
        p=min(one.p for one in tests),
        missing=current.missing / max(1, current.rows),
        missing_reference=reference.missing / reference.rows,
        outside=beyond / max(1, current.present),
        outside_reference=expected / max(1, reference.present),
        reasons=[f"{one.what} {one.effect:.3g}, from {one.bound:g} on" for one in drifted],
    )


def plain(value: Any) -> Any:
    """Round numbers of a report for people and databases: six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value
