"""Drift for the API and the dashboard: JSON values."""

from __future__ import annotations

import json
from typing import Any, Final

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.drift import labels, loop, sketch_store
from pilotlight.controller.drift.report import plain
from pilotlight.controller.drift.targets import MonitoredFunction, find_targets
from pilotlight.controller.statistics import distributions, estimates
from pilotlight.controller.statistics.quality import Quality, measure
from pilotlight.errors import NotFound
from pilotlight.spec.monitor import PREDICTION
from pilotlight.spec.prediction_log import HOUR_S
from pilotlight.spec.record_json import to_json
from pilotlight.spec.sketches import Sketch

MAX_REPORTS: Final = 50
SHOWN_REVISIONS: Final = 10
"""Revisions that an error names."""


def summary(sql: sa.Connection, target: MonitoredFunction) -> dict[str, Any]:
    """One function with its last judged window."""
    last = loop.latest_report(sql, target.function_id)
    return {
        **_names(target),
        "window_h": target.terms.window_h,
        "last": _stored(last) if last is not None else None,
    }


def detail(
    sql: sa.Connection, target: MonitoredFunction, *, now: float, limit: int
) -> dict[str, Any]:
    """One function: its terms, its reference, the judged windows, and the current one so far."""
    table, references = tables.drift_reports, tables.drift_references
    of_it = table.c.function_id == target.function_id
    query = sa.select(table).where(of_it).order_by(table.c.until.desc()).limit(limit)
    reference = sql.execute(
        sa.select(references).where(references.c.function_id == target.function_id)
    ).first()
    hour = int(now // HOUR_S)
    begin = hour - hour % target.terms.window_h
    current = loop.report_on(sql, target, until_h=begin + target.terms.window_h, now=now)
    same = ("rows", "source", "created_by", "created_at")
    return {
        **_names(target),
        "window_h": target.terms.window_h,
        "terms": to_json(target.terms),
        "baseline": None
        if reference is None
        else {name: getattr(reference, name) for name in same},
        "current": _with_seconds(to_json(current)),
        "windows": [_stored(row) for row in sql.execute(query)],
    }


def require_revision(sql: sa.Connection, target: MonitoredFunction, name: str) -> None:
    """Raise NotFound, with the newest revisions, unless the function has it, or predictions of it
    were counted."""
    stored, counted = tables.revisions, tables.drift_sketches
    of_it = sa.select(stored.c.name).where(stored.c.function == target.function_id)
    if sql.execute(of_it.where(stored.c.name == name)).first() is not None:
        return
    seen = sa.select(counted.c.revision).where(counted.c.function_id == target.function_id)
    if sql.execute(seen.where(counted.c.revision == name).limit(1)).first() is not None:
        return
    newest = sql.scalars(of_it.order_by(stored.c.ordinal.desc()).limit(SHOWN_REVISIONS))
    raise NotFound(
        f"{target.name} has no revision {name!r}: the newest are {', '.join(newest)}",
        hint=f"`pilotlight app show {target.app}` lists them.",
    )


def compare_revisions(
    sql: sa.Connection, target: MonitoredFunction, *, revision: str, against: str, now: float
) -> dict[str, Any]:
    """Compare two revisions, over the last hours that a window has: the predictions, and each
    measure of quality as `revision` minus `against`, with bounds that hold at any time. Raises
    NotFound for a revision that the function does not have."""
    for name in (revision, against):
        require_revision(sql, target, name)
    until_h = int(now // HOUR_S) + 1
    since_h = until_h - target.terms.window_h
    names = (revision, against)
    ours, theirs = (_predictions(sql, target, since_h, until_h, name, now=now) for name in names)
    mine, other = (_quality(sql, target, since_h, until_h, name, now=now) for name in names)
    counts = (ours, theirs)
    radius = sum(
        distributions.ks_radius(one.present, estimates.ALPHA / 2) if one else 1.0 for one in counts
    )
    distance = distributions.ks(ours, theirs) if ours and theirs else None
    differences = {
        name: estimates.contrast(one, other.estimates[name])
        for name, one in mine.estimates.items()
        if name in other.estimates
    }
    found: dict[str, Any] = {
        "revision": revision,
        "against": against,
        "since": since_h * HOUR_S,
        "rows": [one.present if one else 0 for one in counts],
        "prediction_ks": distance,
        "prediction_ks_low": None if distance is None else max(0.0, distance - radius),
        "labels": [mine.n, other.n],
        "quality": {
            name: {"value": one.value, "low": one.low, "high": one.high}
            for name, one in differences.items()
        },
    }
    return dict(plain(found))


def _predictions(
    sql: sa.Connection,
    target: MonitoredFunction,
    since_h: int,
    until_h: int,
    revision: str,
    *,
    now: float,
) -> Sketch | None:
    """The distribution of a revision's predictions in these hours; None = there were none."""
    counts = sketch_store.window(
        sql,
        target.function_id,
        since_h=since_h,
        until_h=until_h,
        now=now,
        revision=revision,
        only=PREDICTION,
    )
    return counts.features.get(PREDICTION)


def _quality(
    sql: sa.Connection,
    target: MonitoredFunction,
    since_h: int,
    until_h: int,
    revision: str,
    *,
    now: float,
) -> Quality:
    """The quality of a revision's predictions with labels in these hours."""
    found = labels.labelled_predictions(
        sql,
        target.function_id,
        target.terms,
        since_s=since_h * HOUR_S,
        until_s=until_h * HOUR_S,
        now=now,
        revision=revision,
    )
    return measure([one.outcome for one in found])


def listing(sql: sa.Connection, *, tenant: str, environment: str) -> list[MonitoredFunction]:
    """Return the monitored functions of an environment."""
    c = tables.functions.c
    return find_targets(sql, c.tenant == tenant, c.environment == environment)


def _names(target: MonitoredFunction) -> dict[str, Any]:
    return {
        "environment": target.environment,
        "app": target.app,
        "function": target.function,
        "revision": target.revision,
    }


def _stored(row: sa.Row[Any]) -> dict[str, Any]:
    return _with_seconds(json.loads(row.report))


def _with_seconds(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report with times in seconds instead of hours."""
    hours = {"since": report.pop("since_h") * HOUR_S, "until": report.pop("until_h") * HOUR_S}
    return {**hours, **plain(report)}
