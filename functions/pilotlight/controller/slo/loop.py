"""The background loop of objectives: evaluates alarms every few seconds, sums up finished hours and
deletes old minutes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import anyio.to_thread
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.slo import error_budget, observations, slo_alerts
from pilotlight.controller.slo.burn_rate import FAST, compute_budget_spend
from pilotlight.controller.slo.error_budget import SloTarget
from pilotlight.errors import NotFound, PilotlightError
from pilotlight.spec.policies import DEFAULT_OBJECTIVES

log = logging.getLogger(__name__)

EVERY_S = 15.0
"""Interval of the loop, in seconds: a twentieth of the shortest window."""
SEEN_S = 600.0
"""A function without calls for this long, in seconds, has no short window that burns: it is
evaluated only while an alarm is open."""
TIDY_S = 60.0
GLANCE_S = 30 * 60
"""The longest short window of a page, in seconds."""
THOROUGH_S = 300.0
"""Interval, in seconds, at which healthy functions are evaluated by all windows: reading three days
takes ten times as long as reading half an hour."""


async def run(*, store: Store, clock: Callable[[], float], keep_days: int) -> None:
    """Run the loop until cancelled. `clock`: wall time in seconds since the epoch. `keep_days`: how
    long observations are kept."""
    tidied_at = last_thorough = float("-inf")
    loop = asyncio.get_running_loop()
    while True:
        try:
            is_thorough = loop.time() - last_thorough >= THOROUGH_S
            await anyio.to_thread.run_sync(
                partial(evaluate_all, store, now=clock(), is_thorough=is_thorough)
            )
            last_thorough = loop.time() if is_thorough else last_thorough
            if loop.time() - tidied_at >= TIDY_S:
                await anyio.to_thread.run_sync(
                    partial(roll_up, store, now=clock(), keep_days=keep_days)
                )
                tidied_at = loop.time()
        except (PilotlightError, SQLAlchemyError) as e:
            # disk full or database unavailable: the next round retries
            log.error("event=objectives_failed error=%r", e)
        await asyncio.sleep(EVERY_S)


def evaluate_all(store: Store, *, now: float, is_thorough: bool = True) -> int:
    """Evaluate every function that was called recently or has an open alarm. Returns how many.

    `is_thorough`: evaluate all windows even if there were no bad calls recently."""
    with store.read() as sql:
        alarmed = {alarm.function for alarm in slo_alerts.open_alerts(sql)}
        names = sorted({*observations.seen(sql, since_s=now - SEEN_S), *alarmed})
    evaluated = 0
    for name in names:
        try:
            if is_thorough or name in alarmed or _may_page(store, name, now=now):
                evaluated += 1
                evaluate_function(store, name, now=now)
        except (PilotlightError, ArithmeticError, ValueError) as e:
            # affects one function only; the others are evaluated
            log.error("event=objectives_not_judged function=%s error=%r", name, e)
    return evaluated


def _may_page(store: Store, function_id: str, *, now: float) -> bool:
    """Whether there were enough bad calls in the last half hour for a page: one query instead of
    seven."""
    with store.read() as sql:
        try:
            promise = error_budget.slo_target(sql, function_id)
        except NotFound:
            return False
        recent = error_budget.total_observation(
            observations.window(sql, function_id=function_id, since_s=now - GLANCE_S, until_s=now)
        )
    return any(
        compute_budget_spend(recent, promise.objectives, sli).bad >= FAST.min_bad_short
        for sli in promise.alerting_slis
    )


def evaluate_function(store: Store, function_id: str, *, now: float) -> list[str]:
    """Evaluate one function. Returns the webhook events that were enqueued."""
    with store.read() as sql:
        opened = slo_alerts.open_alerts(sql, function_id)
        try:
            promise = error_budget.slo_target(sql, function_id)
        except NotFound:
            removed = _removed(sql, function_id) if opened else None
            windows = {}
        else:
            removed = None
            windows = error_budget.observations_by_window(sql, function_id, now=now)
    if removed is not None:
        with store.write() as write:
            events = slo_alerts.end_alerts(write, removed)
    elif windows:
        found = slo_alerts.firing_alerts(promise, windows)
        if not slo_alerts.has_changes(opened, found, now=now):
            return []
        with store.write() as write:
            events = slo_alerts.reconcile_alerts(
                write, promise, found, slo_alerts.quiet_alerts(promise, windows)
            )
    else:
        return []
    for event in events:
        log.warning("event=%s function=%s", event, function_id)
    return events


def _removed(sql: sa.Connection, function_id: str) -> SloTarget | None:
    """Return a function without traffic as a target with the default objectives."""
    c = tables.functions.c
    row = sql.execute(
        sa.select(c.tenant, c.environment, c.app, c.name).where(c.id == function_id)
    ).first()
    if row is None:
        return None
    return SloTarget(
        function_id=function_id,
        tenant=row.tenant,
        environment=row.environment,
        app=row.app,
        function=row.name,
        revision="",
        objectives=DEFAULT_OBJECTIVES,
        is_declared=False,
    )


def roll_up(store: Store, *, now: float, keep_days: int) -> None:
    """Sum up finished hours and delete old data, in small transactions, because usage ingestion
    needs the same lock."""
    while (hour := _due_hour(store, now)) is not None:
        with store.read() as sql:
            names = observations.functions_of(sql, hour)
        for at in range(0, len(names), observations.FUNCTIONS_AT_ONCE):
            with store.write() as write:
                observations.sum_up(write, hour, names[at : at + observations.FUNCTIONS_AT_ONCE])
        with store.write() as write:
            observations.mark(write, hour)
    deleted = 1
    while deleted:
        with store.write() as write:
            deleted = observations.prune(write, days=keep_days)
            slo_alerts.delete_old_alerts(write)


def _due_hour(store: Store, now: float) -> int | None:
    with store.read() as sql:
        return observations.due_hour(sql, now=now)
