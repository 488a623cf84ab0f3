"""The scheduler: creates calls for due schedules while the controller runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.database.store import Store
from pilotlight.controller.scheduling import schedules
from pilotlight.errors import PilotlightError

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 5.0
"""Interval between checks: the wall clock may be changed meanwhile, and a schedule is caught up
within schedules.GRACE_S only."""


async def run_scheduler(
    *, store: Store, notifier: ChangeNotifier, clock: Callable[[], float]
) -> None:
    """Create calls when schedules are due, until `notifier` is closed. `clock`: wall time in
    seconds since the epoch."""
    while not notifier.closed:
        ring = notifier.next_change()
        wait_s = LONGEST_WAIT_S
        try:
            wait_s = await anyio.to_thread.run_sync(_round, store, clock)
        except (SQLAlchemyError, PilotlightError) as e:
            # for example a full disk or a lost database: retry in the next round
            log.error("event=schedules_failed error=%r", e)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await ring.wait()


def _round(store: Store, clock: Callable[[], float]) -> float:
    """Run one round; return how long to wait for the next one, in seconds."""
    with store.read() as sql:  # reading takes no lock, and usually nothing is due
        at = schedules.next_at(sql)
    if at is not None and at <= clock():
        with store.write() as write:
            made = schedules.fire_due(write)
        log.info("event=schedules_fired calls=%d", made)
        return 0.0
    return LONGEST_WAIT_S if at is None else min(LONGEST_WAIT_S, at - clock())
