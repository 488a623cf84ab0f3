"""What objectives ask for by themselves: alarms every some seconds, hours summed up and old minutes
dropped in between."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import anyio.to_thread
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller import observations, tables
from pilotlight.controller.context import Context
from pilotlight.controller.objectives import alarms, standing
from pilotlight.controller.objectives.burn import FAST, spent
from pilotlight.controller.objectives.standing import Promise
from pilotlight.errors import NotFound, PilotlightError
from pilotlight.policies import DEFAULT_OBJECTIVES

log = logging.getLogger(__name__)

EVERY_S = 15.0
"""A twentieth of the shortest window."""
SEEN_S = 600.0
"""A function that nobody called for so long has no short window that burns: looked at only while an
alarm is open."""
TIDY_S = 60.0
GLANCE_S = 30 * 60
"""The longest short window of a page."""
THOROUGH_S = 300.0
"""Between two looks at all windows of a function that is well: reading three days takes ten times
as long as reading half an hour."""


async def run(context: Context) -> None:
    """Look after objectives, until cancelled."""
    tidied_at = looked_at = float("-inf")
    loop = asyncio.get_running_loop()
    while True:
        try:
            is_thorough = loop.time() - looked_at >= THOROUGH_S
            await anyio.to_thread.run_sync(partial(look, context, is_thorough=is_thorough))
            looked_at = loop.time() if is_thorough else looked_at
            if loop.time() - tidied_at >= TIDY_S:
                await anyio.to_thread.run_sync(tidy, context)
                tidied_at = loop.time()
        except (PilotlightError, SQLAlchemyError) as e:
            # a full disk, a lost database: the next round tries again
            log.error("event=objectives_failed error=%r", e)
        await asyncio.sleep(EVERY_S)


def look(context: Context, *, is_thorough: bool = True) -> int:
    """Judge every function that was called lately, or has an open alarm; returns how many.

    `is_thorough`: by all windows, also those of which nothing was bad lately.
    """
    now = context.clock()
    with context.store.read() as sql:
        alarmed = {alarm.function for alarm in alarms.open_of(sql)}
        names = sorted({*observations.seen(sql, since_s=now - SEEN_S), *alarmed})
    looked_at = 0
    for name in names:
        try:
            if is_thorough or name in alarmed or _may_page(context, name, now=now):
                looked_at += 1
                judge(context, name, now=now)
        except (PilotlightError, ArithmeticError, ValueError) as e:
            # of one function; the others are looked after
            log.error("event=objectives_not_judged function=%s error=%r", name, e)
    return looked_at


def _may_page(context: Context, function_id: str, *, now: float) -> bool:
    """Whether enough was bad in the last half hour that somebody could be paged; one look instead
    of seven."""
    with context.store.read() as sql:
        try:
            made = standing.promise(sql, function_id)
        except NotFound:
            return False
        lately = standing.total(
            observations.window(sql, function_id=function_id, since_s=now - GLANCE_S, until_s=now)
        )
    return any(spent(lately, made.objectives, sli).bad >= FAST.min_bad_short for sli in made.told)


def judge(context: Context, function_id: str, *, now: float) -> list[str]:
    """Judge one function; returns the events that were told."""
    with context.store.read() as sql:
        opened = alarms.open_of(sql, function_id)
        try:
            made = standing.promise(sql, function_id)
        except NotFound:
            gone = _gone(sql, function_id) if opened else None
            windows = {}
        else:
            gone = None
            windows = standing.by_window(sql, function_id, now=now)
    if gone is not None:
        with context.store.write() as write:
            told = alarms.end_all(write, gone)
    elif windows:
        found = alarms.firings(made, windows)
        if not alarms.is_news(opened, found, now=now):
            return []
        with context.store.write() as write:
            told = alarms.settle(write, made, found, alarms.quiet(made, windows))
    else:
        return []
    for event in told:
        log.warning("event=%s function=%s", event, function_id)
    return told


def _gone(sql: sa.Connection, function_id: str) -> Promise | None:
    """A function that takes no traffic any more, as one that promises what all do."""
    c = tables.functions.c
    row = sql.execute(
        sa.select(c.tenant, c.environment, c.app, c.name).where(c.id == function_id)
    ).first()
    if row is None:
        return None
    return Promise(
        function_id=function_id,
        tenant=row.tenant,
        environment=row.environment,
        app=row.app,
        function=row.name,
        revision="",
        objectives=DEFAULT_OBJECTIVES,
        is_declared=False,
    )


def tidy(context: Context) -> None:
    """Sum finished hours up, drop what is old: in small transactions, because usage waits for the
    same lock."""
    while (hour := _due_hour(context)) is not None:
        with context.store.read() as sql:
            names = observations.functions_of(sql, hour)
        for at in range(0, len(names), observations.FUNCTIONS_AT_ONCE):
            with context.store.write() as write:
                observations.sum_up(write, hour, names[at : at + observations.FUNCTIONS_AT_ONCE])
        with context.store.write() as write:
            observations.mark(write, hour)
    gone = 1
    while gone:
        with context.store.write() as write:
            gone = observations.prune(write, days=context.config.settings.observations_days)
            alarms.forget(write)


def _due_hour(context: Context) -> int | None:
    with context.store.read() as sql:
        return observations.due_hour(sql, now=context.clock())
