"""The scheduler: creates calls for due schedules while the controller runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.context import Context
from pilotlight.controller.scheduling import schedules
from pilotlight.errors import PilotlightError

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 5.0
"""Interval between checks: the wall clock may be changed meanwhile, and a schedule is caught up
within schedules.GRACE_S only."""


async def run_scheduler(context: Context) -> None:
    """Create calls when schedules are due, until the bell is closed."""
    while not context.bell.closed:
        ring = context.bell.next_change()
        wait_s = LONGEST_WAIT_S
        try:
            wait_s = await anyio.to_thread.run_sync(_round, context)
        except (SQLAlchemyError, PilotlightError) as e:
            # for example a full disk or a lost database: retry in the next round
            log.error("event=schedules_failed error=%r", e)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await ring.wait()


def _round(context: Context) -> float:
    """Run one round; return how long to wait for the next one, in seconds."""
    with context.store.read() as sql:  # reading takes no lock, and usually nothing is due
        at = schedules.next_at(sql)
    if at is not None and at <= context.clock():
        with context.store.write() as write:
            made = schedules.fire_due(write)
        log.info("event=schedules_fired calls=%d", made)
        return 0.0
    return LONGEST_WAIT_S if at is None else min(LONGEST_WAIT_S, at - context.clock())
