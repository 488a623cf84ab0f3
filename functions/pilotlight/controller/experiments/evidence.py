"""Evidence of an experiment in the ledger: sums per arm over units, and percentiles with the data
of their intervals. Read-only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.analytics.feedback import LABEL, column_of
from pilotlight.controller.database import tables
from pilotlight.controller.experiments.design import (
    FEEDBACK,
    QUANTILES,
    RATIOS,
    Design,
    is_feedback,
)
from pilotlight.controller.statistics import estimates
from pilotlight.controller.statistics.estimates import Estimate, Interval, Moments
from pilotlight.spec.observations import GROWTH, latency_quantile_ms

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
"""Number of labels that a report shows, the most frequent first."""
_DOUBLE: sa.Double[float] = sa.Double()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmExposure:
    """Units and calls of an arm. `units_before`: units that met it before any arm was stopped,
    while the shares were as planned."""

    units: int = 0
    units_before: int = 0
    calls: int = 0
    mistagged: int = 0


class ExperimentEvidence:
    """An experiment's numbers in one view of the database. Used for one report, with cached query
    results. Owner: one thread."""

    def __init__(self, sql: sa.Connection, experiment: str, design: Design) -> None:
        self._sql = sql
        self._id = experiment
        self._design = design
        self._feedback_metrics: dict[str, dict[str, Moments]] = {}

    def __repr__(self) -> str:
        return f"<ExperimentEvidence of {self._id}>"

    def met(self) -> dict[str, ArmExposure]:
        """Arm → the units that met it first. Mistagged calls count for every arm."""
        unit, table = self._units(), tables.exposures
        cut = min((stop.at for stop in self._design.stopped.values()), default=None)
        before = (
            sa.func.count()
            if cut is None
            else sa.func.sum(sa.case((unit.c.first_at < cut, 1), else_=0))
        )
        query = sa.select(unit.c.arm, sa.func.count(), before, sa.func.sum(unit.c.calls)).group_by(
            unit.c.arm
        )
        wrong = (
            sa.select(table.c.arm, sa.func.sum(table.c.mistagged))
            .where(table.c.experiment == self._id)
            .group_by(table.c.arm)
        )
        mistagged = {arm: int(count) for arm, count in self._sql.execute(wrong)}
        rows = {arm: (units, early, calls) for arm, units, early, calls in self._sql.execute(query)}
        out = {}
        for arm in {*rows, *mistagged}:
            units, early, calls = rows.get(arm, (0, 0, 0))
            out[arm] = ArmExposure(
                units=int(units),
                units_before=int(early),
                calls=int(calls),
                mistagged=mistagged.get(arm, 0),
            )
        return out

    def crossed(self) -> int:
        """Number of units that met a second arm although the first was not stopped: a broken
        assignment."""
        if not self._has_moved:
            return 0
        one, other = tables.exposures.alias(), tables.exposures.alias()
        same = (one.c.experiment == other.c.experiment) & (one.c.unit == other.c.unit)
        query = sa.select(sa.func.count(sa.distinct(one.c.unit))).select_from(one.join(other, same))
        where = [
            one.c.experiment == self._id,
            _is_before(other, one),
            other.c.arm.not_in(sorted(self._design.stopped)),
        ]
        return int(self._sql.execute(query.where(*where)).scalar_one())

    def feedback_metrics(self) -> list[str]:
        """Metrics with feedback of callers, as `feedback:<metric>`."""
        table = tables.feedback
        query = sa.select(table.c.metric, table.c.label, sa.func.count().label("n")).where(
            table.c.experiment == self._id
        )
        rows = self._sql.execute(
            query.group_by(table.c.metric, table.c.label).order_by(sa.desc("n"), table.c.label)
        ).all()
        labels = [f"{FEEDBACK}{LABEL}={row.label}" for row in rows if row.metric == LABEL][
            :MAX_LABELS
        ]
        return sorted({f"{FEEDBACK}{row.metric}" for row in rows if row.metric != LABEL}) + labels

    def intervals(self, metric: str, *, alpha: float) -> dict[str, Interval]:
        """Arm → value and bounds, without arms that have too little data."""
        if metric in QUANTILES:
            return self._quantiles(metric, alpha=alpha)
        return {
            arm: estimates.interval(found, alpha=alpha)
            for arm, found in self.estimates(metric).items()
        }

    def estimates(self, metric: str) -> dict[str, Estimate]:
        """Arm → value and variance, for metrics that are a ratio of sums."""
        if is_feedback(metric):
            if metric not in self._feedback_metrics:
                self._feedback_metrics[metric] = self._feedback(metric.removeprefix(FEEDBACK))
            rows, scale = self._feedback_metrics[metric], 1.0
        else:
            rows, scale = self._sums[metric], _SUMS[metric][2]
        is_share = metric in RATIOS or metric.startswith(f"{FEEDBACK}{LABEL}=")
        found = {arm: estimates.ratio(moments, is_share=is_share) for arm, moments in rows.items()}
        return {
            arm: Estimate(
                value=one.value * scale, variance=one.variance * scale * scale, calls=one.calls
            )
            for arm, one in found.items()
            if one is not None
        }

    @cached_property
    def _has_moved(self) -> bool:
        """Whether any unit met a second arm: rare, and the queries are much faster if none did."""
        table = tables.exposures
        twice = (
            sa.select(table.c.unit)
            .where(table.c.experiment == self._id)
            .group_by(table.c.unit)
            .having(sa.func.count() > 1)
        )
        return self._sql.execute(twice.limit(1)).first() is not None

    def _units(self) -> sa.FromClause:
        """The experiment's exposures, only the first of each unit."""
        if self._has_moved:
            return _first(self._id)
        return (
            sa.select(tables.exposures).where(tables.exposures.c.experiment == self._id).subquery()
        )

    @cached_property
    def _sums(self) -> dict[str, dict[str, Moments]]:
        """Metric → arm → moments of everything that is summed per unit, in one pass."""
        unit = self._units()
        columns = []
        for over, under, _ in _SUMS.values():
            x = unit.c.tokens_in + unit.c.tokens_out if under == "tokens" else unit.c[under]
            y = sa.case((x > 0, sa.cast(unit.c[over], _DOUBLE)), else_=0.0)
            columns += [
                sa.func.sum(sa.case((x > 0, 1), else_=0)),
                *_products(sa.cast(x, _DOUBLE), y),
            ]
        out: dict[str, dict[str, Moments]] = {metric: {} for metric in _SUMS}
        for arm, *sums in self._sql.execute(sa.select(unit.c.arm, *columns).group_by(unit.c.arm)):
            for place, metric in enumerate(_SUMS):
                out[metric][arm] = _moments(sums[6 * place], sums[6 * place + 1 : 6 * place + 6])
        return out

    def _feedback(self, metric: str) -> dict[str, Moments]:
        unit, table = self._units(), tables.feedback
        name, value = column_of(metric)
        mine = (
            (table.c.experiment == self._id)
            & (table.c.unit == unit.c.unit)
            & (table.c.arm == unit.c.arm)
            & (table.c.metric == name)
        )
        query = sa.select(
            unit.c.arm, sa.func.count().label("x"), sa.func.sum(value).label("y")
        ).join(table, mine)
        units = query.group_by(unit.c.arm, unit.c.unit).subquery()
        sums = _products(sa.cast(units.c.x, _DOUBLE), sa.cast(units.c.y, _DOUBLE))
        rows = self._sql.execute(
            sa.select(units.c.arm, sa.func.count(), *sums).group_by(units.c.arm)
        )
        return {arm: _moments(n, values) for arm, n, *values in rows}

    def _quantiles(self, metric: str, *, alpha: float) -> dict[str, Interval]:
        """Percentiles by Woodruff (1952): bounds of the share of calls below the percentile are
        bounds of the percentile itself."""
        share, out = QUANTILES[metric], {}
        for arm, moments in self._below.get(metric, {}).items():
            below = estimates.ratio(moments, is_share=True)
            if below is None:
                continue
            reach = estimates.radius(below.variance, below.calls, alpha=alpha)
            low, value, high = (
                _milliseconds(self._histograms[arm], at)
                for at in (share - reach, share, share + reach)
            )
            # from the lower end of a bucket to the upper end of a bucket
            out[arm] = Interval(value=value, low=low / GROWTH, high=high)
        return out

    @cached_property
    def _histograms(self) -> dict[str, dict[int, int]]:
        table = tables.exposure_latency
        query = sa.select(table.c.arm, table.c.bucket, sa.func.sum(table.c.calls)).select_from(
            self._warm()
        )
        out: dict[str, dict[int, int]] = {}
        for arm, bucket, calls in self._sql.execute(
            query.where(table.c.experiment == self._id).group_by(table.c.arm, table.c.bucket)
        ):
            out.setdefault(arm, {})[int(bucket)] = int(calls)
        return out

    @cached_property
    def _below(self) -> dict[str, dict[str, Moments]]:
        """Percentile → arm → moments of calls (x), and of those in buckets up to the percentile's
        (y), in one pass."""
        if not self._histograms:
            return {}
        table, columns = tables.exposure_latency, []
        for metric, share in QUANTILES.items():
            ends = [
                (table.c.arm == arm) & (table.c.bucket <= _bucket_at(buckets, share))
                for arm, buckets in self._histograms.items()
            ]
            columns.append(
                sa.func.sum(sa.case((sa.or_(*ends), table.c.calls), else_=0)).label(metric)
            )
        query = sa.select(table.c.arm, sa.func.sum(table.c.calls).label("x"), *columns).select_from(
            self._warm()
        )
        units = (
            query.where(table.c.experiment == self._id)
            .group_by(table.c.arm, table.c.unit)
            .subquery()
        )
        x = sa.cast(units.c.x, _DOUBLE)
        sums = [
            column
            for metric in QUANTILES
            for column in _products(x, sa.cast(units.c[metric], _DOUBLE))
        ]
        out: dict[str, dict[str, Moments]] = {metric: {} for metric in QUANTILES}
        for arm, n, *values in self._sql.execute(
            sa.select(units.c.arm, sa.func.count(), *sums).group_by(units.c.arm)
        ):
            for place, metric in enumerate(QUANTILES):
                out[metric][arm] = _moments(n, values[5 * place : 5 * place + 5])
        return out

    def _warm(self) -> sa.FromClause:
        """The histograms of units, restricted to each unit's first arm."""
        table = tables.exposure_latency
        if not self._has_moved:
            return table
        unit = self._units()
        return table.join(unit, _of_unit(table, unit))


def contrasts(
    evidence: ExperimentEvidence,
    metric: str,
    *,
    first: str,
    arms: Iterable[str],
    factor: float = 1.0,
    alpha: float,
) -> dict[str, Interval]:
    """Arm → its metric minus `factor` times the first arm's, without arms that have too little
    data."""
    if metric in QUANTILES:
        # Each of the two percentiles gets half of the error probability of the difference.
        bounds = evidence.intervals(metric, alpha=alpha / 2)
        base = bounds.get(first)
        return {
            arm: estimates.contrast_of(bounds[arm], base, factor=factor)
            for arm in arms
            if arm in bounds and base is not None
        }
    found = evidence.estimates(metric)
    one = found.get(first)
    return {
        arm: estimates.contrast(found[arm], one, factor=factor, alpha=alpha)
        for arm in arms
        if arm in found and one is not None
    }


def _products(
    x: sa.ColumnElement[float], y: sa.ColumnElement[float]
) -> list[sa.ColumnElement[Any]]:
    return [sa.func.sum(product) for product in (x, y, x * x, y * y, x * y)]


def _moments(n: int, sums: Sequence[Any]) -> Moments:
    x, y, xx, yy, xy = map(float, sums)
    return Moments(n=int(n), x=x, y=y, xx=xx, yy=yy, xy=xy)


def _first(experiment: str) -> sa.Subquery:
    """The experiment's exposures, only the first of each unit."""
    one, other = tables.exposures.alias(), tables.exposures.alias()
    same = (one.c.experiment == other.c.experiment) & (one.c.unit == other.c.unit)
    return (
        sa.select(one)
        .where(one.c.experiment == experiment, ~sa.exists().where(same, _is_before(other, one)))
        .subquery()
    )


def _is_before(one: sa.FromClause, other: sa.FromClause) -> sa.ColumnElement[bool]:
    return (one.c.first_at < other.c.first_at) | (
        (one.c.first_at == other.c.first_at) & (one.c.arm < other.c.arm)
    )


def _of_unit(table: sa.FromClause, unit: sa.FromClause) -> sa.ColumnElement[bool]:
    return (
        (table.c.experiment == unit.c.experiment)
        & (table.c.arm == unit.c.arm)
        & (table.c.unit == unit.c.unit)
    )


def _bucket_at(buckets: Mapping[int, int], share: float) -> int:
    left = share * sum(buckets.values())
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 1e-9:
            return bucket
    return max(buckets)


def _milliseconds(buckets: Mapping[int, int], share: float) -> float:
    """The percentile in milliseconds; 0 for shares up to 0, infinite for 1 and above."""
    if share <= 0:
        return 0.0
    found = latency_quantile_ms(buckets, share) if share < 1 else None
    return float("inf") if found is None else found
