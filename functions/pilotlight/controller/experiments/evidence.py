"""What the ledger has of an experiment: sums per arm over units, and percentiles with what their intervals need. Reads only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller import tables
from pilotlight.controller.experiments import stats
from pilotlight.controller.experiments.design import FEEDBACK, QUANTILES, RATIOS, Design, is_feedback
from pilotlight.controller.experiments.stats import Estimate, Interval, Moments
from pilotlight.controller.feedback import LABEL, column_of
from pilotlight.observations import GROWTH, quantile

PICOS = 1e12
_SUMS = {
    "error_ratio": ("errors", "calls", 1.0),
    "degraded_ratio": ("degraded", "calls", 1.0),
    "cold_ratio": ("cold", "calls", 1.0),
    "latency_mean": ("warm_ms", "warm", 1.0),
    "exec_mean": ("exec_ms", "calls", 1.0),
    "cost_per_call": ("cost_picos", "calls", 1 / PICOS),
    "cost_per_1k_tokens": ("cost_picos", "tokens", 1000 / PICOS),
}
"""Metric → numerator, denominator, unit of the result."""
MAX_LABELS = 10
"""Labels that a report shows of an experiment, the most frequent first."""
_DOUBLE: sa.Double[float] = sa.Double()


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """Who met an arm. `units_before`: those that met it before any arm was stopped, when its share was still what was planned."""

    units: int = 0
    units_before: int = 0
    calls: int = 0
    mistagged: int = 0


class Evidence:
    """An experiment's numbers in one view of the database. Made for one report; each metric is asked for when it is wanted."""

    def __init__(self, sql: sa.Connection, experiment: str, design: Design) -> None:
        self._sql = sql
        self._id = experiment
        self._design = design

    def __repr__(self) -> str:
        return f"<Evidence of {self._id}>"

    def met(self) -> dict[str, Met]:
        """Arm → who met it first. Mistagged calls count wherever they were."""
        unit, table = _first(self._id), tables.exposures
        cut = min((stop.at for stop in self._design.stopped.values()), default=None)
        before = sa.func.count() if cut is None else sa.func.sum(sa.case((unit.c.first_at < cut, 1), else_=0))
        query = sa.select(unit.c.arm, sa.func.count(), before, sa.func.sum(unit.c.calls)).group_by(unit.c.arm)
        wrong = sa.select(table.c.arm, sa.func.sum(table.c.mistagged)).where(table.c.experiment == self._id).group_by(table.c.arm)
        mistagged = {arm: int(count) for arm, count in self._sql.execute(wrong)}
        rows = {arm: (units, early, calls) for arm, units, early, calls in self._sql.execute(query)}
        out = {}
        for arm in {*rows, *mistagged}:
            units, early, calls = rows.get(arm, (0, 0, 0))
            out[arm] = Met(units=int(units), units_before=int(early), calls=int(calls), mistagged=mistagged.get(arm, 0))
        return out

    def crossed(self) -> int:
        """Units that met a second arm although the first was not stopped: their assignment is broken."""
        one, other = tables.exposures.alias(), tables.exposures.alias()
        same = (one.c.experiment == other.c.experiment) & (one.c.unit == other.c.unit)
        query = sa.select(sa.func.count(sa.distinct(one.c.unit))).select_from(one.join(other, same))
        where = [one.c.experiment == self._id, _is_before(other, one), other.c.arm.not_in(sorted(self._design.stopped))]
        return int(self._sql.execute(query.where(*where)).scalar_one())

    def told(self) -> list[str]:
        """Metrics that callers told of, as `feedback:<metric>`."""
        table = tables.feedback
        query = sa.select(table.c.metric, table.c.label, sa.func.count().label("n")).where(table.c.experiment == self._id)
        rows = self._sql.execute(query.group_by(table.c.metric, table.c.label).order_by(sa.desc("n"), table.c.label)).all()
        labels = [f"{FEEDBACK}{LABEL}={row.label}" for row in rows if row.metric == LABEL][:MAX_LABELS]
        return sorted({f"{FEEDBACK}{row.metric}" for row in rows if row.metric != LABEL}) + labels

    def intervals(self, metric: str, *, alpha: float) -> dict[str, Interval]:
        """Arm → value and bounds; without the arms of which too little is known."""
        if metric in QUANTILES:
            return self._quantiles(QUANTILES[metric], alpha=alpha)
        return {arm: stats.interval(found, alpha=alpha) for arm, found in self.estimates(metric).items()}

    def estimates(self, metric: str) -> dict[str, Estimate]:
        """Arm → value and variance, for what is a ratio of sums."""
        rows, scale = (self._feedback(metric.removeprefix(FEEDBACK)), 1.0) if is_feedback(metric) else self._sums(metric)
        is_share = metric in RATIOS or metric.startswith(f"{FEEDBACK}{LABEL}=")
        found = {arm: stats.ratio(moments, is_share=is_share) for arm, moments in rows.items()}
        return {
            arm: Estimate(value=one.value * scale, variance=one.variance * scale * scale, calls=one.calls)
            for arm, one in found.items()
            if one is not None
        }

    def _sums(self, metric: str) -> tuple[dict[str, Moments], float]:
        over, under, scale = _SUMS[metric]
        unit = _first(self._id)
        x = unit.c.tokens_in + unit.c.tokens_out if under == "tokens" else unit.c[under]
        return self._moments(sa.select(unit.c.arm, x.label("x"), unit.c[over].label("y")).where(x > 0).subquery()), scale

    def _feedback(self, metric: str) -> dict[str, Moments]:
        unit, table = _first(self._id), tables.feedback
        name, value = column_of(metric)
        mine = (table.c.experiment == self._id) & (table.c.unit == unit.c.unit) & (table.c.arm == unit.c.arm) & (table.c.metric == name)
        query = sa.select(unit.c.arm, sa.func.count().label("x"), sa.func.sum(value).label("y")).join(table, mine)
        return self._moments(query.group_by(unit.c.arm, unit.c.unit).subquery())

    def _moments(self, units: sa.Subquery) -> dict[str, Moments]:
        x, y = (sa.cast(units.c[name], _DOUBLE) for name in ("x", "y"))
        sums = (sa.func.sum(product) for product in (x, y, x * x, y * y, x * y))
        rows = self._sql.execute(sa.select(units.c.arm, sa.func.count(), *sums).group_by(units.c.arm))
        return {
            arm: Moments(n=int(n), x=float(x), y=float(y), xx=float(xx), yy=float(yy), xy=float(xy)) for arm, n, x, y, xx, yy, xy in rows
        }

    def _quantiles(self, share: float, *, alpha: float) -> dict[str, Interval]:
        """By Woodruff (1952): bounds of the share of calls below the percentile are bounds of the percentile itself."""
        histograms = self._histograms()
        middles = {arm: _bucket_at(buckets, share) for arm, buckets in histograms.items()}
        out = {}
        for arm, moments in self._below(middles).items():
            below = stats.ratio(moments, is_share=True)
            if below is None:
                continue
            reach = stats.radius(below.variance, below.calls, alpha=alpha)
            bounds = [_milliseconds(histograms[arm], at) for at in (share - reach, share, share + reach)]
            out[arm] = Interval(value=bounds[1], low=bounds[0] / GROWTH, high=bounds[2])  # from a bucket's begin to a bucket's end
        return out

    def _histograms(self) -> dict[str, dict[int, int]]:
        unit, table = _first(self._id), tables.exposure_latency
        query = sa.select(table.c.arm, table.c.bucket, sa.func.sum(table.c.calls)).join(unit, _of_unit(table, unit))
        out: dict[str, dict[int, int]] = {}
        for arm, bucket, calls in self._sql.execute(query.group_by(table.c.arm, table.c.bucket)):
            out.setdefault(arm, {})[int(bucket)] = int(calls)
        return out

    def _below(self, middles: Mapping[str, int]) -> dict[str, Moments]:
        """Calls (x), and those in buckets up to the arm's (y)."""
        if not middles:
            return {}
        unit, table = _first(self._id), tables.exposure_latency
        is_below = sa.or_(*((table.c.arm == arm) & (table.c.bucket <= bucket) for arm, bucket in middles.items()))
        y = sa.func.sum(sa.case((is_below, table.c.calls), else_=0))
        query = sa.select(table.c.arm, sa.func.sum(table.c.calls).label("x"), y.label("y")).join(unit, _of_unit(table, unit))
        return self._moments(query.group_by(table.c.arm, table.c.unit).subquery())


def contrasts(
    evidence: Evidence, metric: str, *, first: str, arms: Iterable[str], factor: float = 1.0, alpha: float
) -> dict[str, Interval]:
    """Arm → its metric minus `factor` times the first arm's; without those of which too little is known."""
    if metric in QUANTILES:
        # Each of the two percentiles gets half of the error that the difference may have.
        bounds = evidence.intervals(metric, alpha=alpha / 2)
        base = bounds.get(first)
        return {arm: stats.contrast_of(bounds[arm], base, factor=factor) for arm in arms if arm in bounds and base is not None}
    found = evidence.estimates(metric)
    one = found.get(first)
    return {arm: stats.contrast(found[arm], one, factor=factor, alpha=alpha) for arm in arms if arm in found and one is not None}


def _first(experiment: str) -> sa.Subquery:
    """The exposures of an experiment, of each unit the first."""
    one, other = tables.exposures.alias(), tables.exposures.alias()
    same = (one.c.experiment == other.c.experiment) & (one.c.unit == other.c.unit)
    return sa.select(one).where(one.c.experiment == experiment, ~sa.exists().where(same, _is_before(other, one))).subquery()


def _is_before(one: sa.FromClause, other: sa.FromClause) -> sa.ColumnElement[bool]:
    return (one.c.first_at < other.c.first_at) | ((one.c.first_at == other.c.first_at) & (one.c.arm < other.c.arm))


def _of_unit(table: sa.FromClause, unit: sa.FromClause) -> sa.ColumnElement[bool]:
    return (table.c.experiment == unit.c.experiment) & (table.c.arm == unit.c.arm) & (table.c.unit == unit.c.unit)


def _bucket_at(buckets: Mapping[int, int], share: float) -> int:
    left = share * sum(buckets.values())
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 1e-9:
            return bucket
    return max(buckets)


def _milliseconds(buckets: Mapping[int, int], share: float) -> float:
    """Bounds beyond 0 or 1 are unknown: the lowest is 0, the highest has none."""
    if share <= 0:
        return 0.0
    found = quantile(buckets, share) if share < 1 else None
    return float("inf") if found is None else found
