"""The loop that judges each window of each monitored function once, GRACE_S after its end, and
sets the metrics. All its state is in the tables: a restarted controller judges what is due."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import anyio.to_thread
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.drift import labels, sketch_store
from pilotlight.controller.drift.report import ALARMS, DriftReport, DriftStatus, compare, plain
from pilotlight.controller.drift.targets import MonitoredFunction, find_targets
from pilotlight.controller.server.metrics import DriftSeries, Metrics
from pilotlight.controller.webhooks import deliveries
from pilotlight.errors import PilotlightError
from pilotlight.spec.monitor import MAX_WINDOW_H, Reference
from pilotlight.spec.prediction_log import DAY_S, HOUR_S
from pilotlight.spec.record_json import to_json

log = logging.getLogger(__name__)

EVERY_S: Final = 60.0
GRACE_S: Final = 300.0
"""From a window's end until it is judged: rows arrive about a minute after their calls."""
KEEP_REPORTS_S: Final = 90 * DAY_S
_AT_ONCE: Final = 500
_INCONCLUSIVE: Final = (DriftStatus.NO_DATA, DriftStatus.NO_REFERENCE)


async def run(*, store: Store, clock: Callable[[], float], metrics: Metrics) -> None:
    """Judge until cancelled."""
    while True:
        try:
            await anyio.to_thread.run_sync(partial(judge_all, store, now=clock()))
            metrics.set_drift(await anyio.to_thread.run_sync(partial(series, store, now=clock())))
        except (PilotlightError, SQLAlchemyError) as e:
            # disk full or database unavailable: the next round retries
            log.error("event=drift_failed error=%r", e)
        await asyncio.sleep(EVERY_S)


def judge_all(store: Store, *, now: float) -> int:
    """Judge the windows that ended, and delete what expired. Returns how many were judged."""
    first_h = int(now // HOUR_S) - 2 * MAX_WINDOW_H
    with store.read() as sql:
        ids = sketch_store.functions_since(sql, first_h)
    judged = 0
    for begin in range(0, len(ids), _AT_ONCE):
        with store.read() as sql:
            of_these = tables.functions.c.id.in_(ids[begin : begin + _AT_ONCE])
            due = [one for one in find_targets(sql, of_these) if _is_due(sql, one, now=now)]
        for target in due:
            try:
                judge(store, target, now=now)
                judged += 1
            except (PilotlightError, ArithmeticError, ValueError) as e:
                # affects one function only; the others are judged
                log.error("event=drift_not_judged function=%s error=%r", target.function_id, e)
    deleted = _AT_ONCE
    while deleted >= _AT_ONCE:
        with store.write() as write:
            deleted = sketch_store.delete_expired(write, limit=_AT_ONCE)
            old = tables.drift_reports.c.created_at < now - KEEP_REPORTS_S
            write.sql.execute(sa.delete(tables.drift_reports).where(old))
    return judged


def judge(store: Store, target: MonitoredFunction, *, now: float) -> DriftReport:
    """Judge the last window that ended, and store the report."""
    until_h = ended_window(target, now=now)
    with store.read() as sql:
        report = report_on(sql, target, until_h=until_h, now=now)
    with store.write() as write:
        before = latest_report(write.sql, target.function_id, is_conclusive=True)
        row = {
            "function_id": target.function_id,
            "until": until_h,
            "tenant": target.tenant,
            "status": report.status.value,
            "report": json.dumps(plain(to_json(report))),
            "created_at": write.now,
        }
        insert = write.insert(tables.drift_reports).values(**row).on_conflict_do_nothing()
        if write.sql.execute(insert).rowcount:
            _notify(write, target, report, was_alarmed=before is not None and _is_alarm(before))
    return report


def report_on(
    sql: sa.Connection, target: MonitoredFunction, *, until_h: int, now: float
) -> DriftReport:
    """Compare the window that ends before hour `until_h` with the function's reference."""
    terms = target.terms
    since_h = until_h - terms.window_h
    current = sketch_store.window(
        sql, target.function_id, since_h=since_h, until_h=until_h, now=now
    )
    if terms.reference is Reference.PREVIOUS:
        reference: sketch_store.FeatureCounts | None = sketch_store.window(
            sql, target.function_id, since_h=since_h - terms.window_h, until_h=since_h, now=now
        )
    else:
        reference = sketch_store.reference_of(sql, target.function_id)
    found = labels.labelled_predictions(
        sql,
        target.function_id,
        terms,
        since_s=since_h * HOUR_S,
        until_s=until_h * HOUR_S,
        now=now,
        by_arrival=True,
    )
    quality = labels.quality_of(target, found)
    return compare(terms, reference, current, since_h=since_h, until_h=until_h, quality=quality)


def ended_window(target: MonitoredFunction, *, now: float) -> int:
    """Return the hour (since the epoch) at which the last window ended that is judged by now."""
    hours = int((now - GRACE_S) // HOUR_S)
    return hours - hours % target.terms.window_h


def latest_report(
    sql: sa.Connection, function_id: str, *, is_conclusive: bool = False
) -> sa.Row[Any] | None:
    """Return the row of the last judged window; None = there is none. `is_conclusive`: of the last
    one that had enough rows and a reference."""
    table = tables.drift_reports
    query = sa.select(table).where(table.c.function_id == function_id)
    if is_conclusive:
        query = query.where(table.c.status.not_in(_INCONCLUSIVE))
    return sql.execute(query.order_by(table.c.until.desc()).limit(1)).first()


def series(store: Store, *, now: float) -> list[DriftSeries]:
    """Return the metrics of the functions whose last window is not long over."""
    table = tables.drift_reports
    newest = (
        sa.select(table.c.function_id, sa.func.max(table.c.until).label("until"))
        .where(table.c.until >= now / HOUR_S - 2 * MAX_WINDOW_H)
        .group_by(table.c.function_id)
        .subquery()
    )
    functions = tables.functions
    query = (
        sa.select(table, functions.c.environment, functions.c.app, functions.c.name)
        .join(
            newest,
            (newest.c.function_id == table.c.function_id) & (newest.c.until == table.c.until),
        )
        .join(functions, functions.c.id == table.c.function_id)
        .where(functions.c.removed_at.is_(None))
        .order_by(table.c.function_id)
    )
    with store.read() as sql:
        rows = sql.execute(query).all()
    return [found for row in rows if (found := _series(row, now)) is not None]


def _series(row: sa.Row[Any], now: float) -> DriftSeries | None:
    report = json.loads(row.report)
    if now / HOUR_S > row.until + 2 * (row.until - report["since_h"]) + 1:
        return None
    return DriftSeries(
        labels=(row.tenant, row.environment, row.app, row.name),
        drifted=sum(one["status"] == DriftStatus.DRIFT for one in report["features"]),
        max_psi=max((one["psi"] or 0.0 for one in report["features"]), default=0.0),
        broken=sum(len(one["broken"]) for one in report["quality"]),
    )


def _is_due(sql: sa.Connection, target: MonitoredFunction, *, now: float) -> bool:
    """Whether a window ended that was not judged, and has rows."""
    until_h = ended_window(target, now=now)
    last = latest_report(sql, target.function_id)
    if last is not None and last.until >= until_h:
        return False
    table = tables.drift_sketches
    rows = sa.select(table.c.hour).where(
        table.c.function_id == target.function_id,
        table.c.hour >= until_h - target.terms.window_h,
        table.c.hour < until_h,
        table.c.expires_at > now,
    )
    return sql.execute(rows.limit(1)).first() is not None


def _is_alarm(row: sa.Row[Any]) -> bool:
    return row.status in ALARMS


def _notify(
    write: Write, target: MonitoredFunction, report: DriftReport, *, was_alarmed: bool
) -> None:
    """Enqueue an event when drift or bad quality begins or ends. A window without enough rows
    says neither."""
    is_alarmed = report.status in ALARMS
    if is_alarmed == was_alarmed or report.status in _INCONCLUSIVE:
        return
    event = "drift.detected" if is_alarmed else "drift.resolved"
    deliveries.enqueue(
        write,
        tenant=target.tenant,
        environment=target.environment,
        event=event,
        body={
            "environment": target.environment,
            "app": target.app,
            "function": target.function,
            "revision": target.revision,
            "status": report.status.value,
            "until": report.until_h * HOUR_S,
            "rows": report.rows,
            "features": report.drifted,
            "quality": report.broken,
        },
        once=f"{target.function_id}/{report.until_h}/{event}",
    )
    log.warning("event=%s function=%s", event, target.function_id)
