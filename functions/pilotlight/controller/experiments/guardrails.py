"""Background loop over experiments: stop arms that breach a guardrail, and join waiting feedback to
its calls."""

from __future__ import annotations

import asyncio
import logging
import time

import anyio.to_thread
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.analytics import feedback
from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.experiments import lifecycle, report
from pilotlight.controller.experiments.evidence import ExperimentEvidence
from pilotlight.controller.experiments.lifecycle import Experiment
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.errors import PilotlightError

log = logging.getLogger(__name__)

ROUND_S = 2.0
"""Records arrive about a second after their calls, so a bad arm is stopped some seconds after the
breach."""
PAUSE = 9.0
"""Rounds take at most a tenth of the time: a round over a hundred thousand units takes one second,
and then runs every ten."""


async def run(store: Store) -> None:
    """Check until cancelled."""
    while True:
        began = time.monotonic()
        try:
            await anyio.to_thread.run_sync(check_all, store)
        except (PilotlightError, SQLAlchemyError) as e:
            # a full disk, a lost database: the next round retries
            log.error("event=experiments_not_watched error=%r", e)
        await asyncio.sleep(max(ROUND_S, PAUSE * (time.monotonic() - began)))


def check_all(store: Store) -> list[str]:
    """Run one round; returns the arms that were stopped, as `<experiment>/<arm>`."""
    if _is_feedback_unjoined(store):
        with store.write() as write:
            feedback.join_to_calls(write)
    stopped: list[str] = []
    with store.read() as sql:
        running = lifecycle.running(sql)
    for found in running:
        try:
            with store.read() as sql:
                breach = _breach(sql, found)
            if breach is not None:
                with store.write() as write:
                    stopped += _stop(write, found, breach)
        except (PilotlightError, SQLAlchemyError, ArithmeticError, ValueError) as e:
            # of one experiment; the others are checked nevertheless
            log.error("event=experiment_not_watched experiment=%s error=%r", found.id, e)
    return stopped


def _breach(sql: sa.Connection, found: Experiment) -> report.GuardrailCheck | None:
    """The first breached guardrail. Also checked in an experiment whose report is invalid, to
    protect callers."""
    if not found.design.guardrails:
        return None
    evidence = ExperimentEvidence(sql, found.id, found.design)
    return next(
        (
            one
            for one in report.check_guardrails(evidence, found.design)
            if one.state == report.BREACHED
        ),
        None,
    )


def _stop(write: Write, seen: Experiment, breach: report.GuardrailCheck) -> list[str]:
    found = lifecycle.get(write.sql, tenant=seen.tenant, experiment=seen.id)
    # changed meanwhile
    if found.state != lifecycle.RUNNING or breach.arm in found.design.stopped:
        return []
    place = AppRef(
        tenant=found.tenant,
        uid=_uid(write.sql, found.tenant),
        environment=found.environment,
        app=found.app,
        actor=audit_trail.PLATFORM,
    )
    lifecycle.stop_arm(write, place, found, arm=breach.arm, reason=str(breach))
    log.warning("event=arm_stopped experiment=%s arm=%s why=%r", found.id, breach.arm, str(breach))
    return [f"{found.id}/{breach.arm}"]


def _uid(sql: sa.Connection, tenant: str) -> int | None:
    uid: int | None = sql.execute(
        sa.select(tables.tenants.c.uid).where(tables.tenants.c.id == tenant)
    ).scalar_one()
    return uid


def _is_feedback_unjoined(store: Store) -> bool:
    with store.read() as sql:
        return feedback.is_anything_waiting(sql)
