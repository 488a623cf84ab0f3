"""Deletes the history of calls and releases when it is older than `controller.history_days`:
latencies by hour, feedback, alerts, rollouts that have ended, and what experiments that have ended
know of single units. Experiments themselves stay, and what is billed does."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from pilotlight.controller.billing.usage_aggregation import DAY_S, HOUR_S
from pilotlight.controller.database import tables
from pilotlight.controller.database.pieces import Pieces
from pilotlight.controller.database.store import Store


async def delete_history(store: Store, *, now: float, days: int | None) -> None:
    """Delete what is older than `days`; None = nothing."""
    if days is None:
        return
    pieces = Pieces(store)
    for table, where in _older_than(now - days * DAY_S):
        await pieces.apply(table, where)


def _older_than(before: float) -> Iterator[tuple[sa.Table, sa.ColumnElement[bool]]]:
    """Tables and conditions, rows before the rows that they refer to."""
    latencies, feedback = tables.latency_hours, tables.feedback
    yield latencies, latencies.c.hour < int(before // HOUR_S)
    yield feedback, sa.and_(feedback.c.at < before, feedback.c.function_id != "")
    for alerts, ended_at in (
        (tables.slo_alerts, tables.slo_alerts.c.ended_at),
        (tables.budget_alerts, tables.budget_alerts.c.at),
    ):
        yield alerts, ended_at < before
    rollouts, decisions = tables.rollouts, tables.rollout_decisions
    is_over = rollouts.c.finished_at < before
    yield decisions, decisions.c.rollout.in_(sa.select(rollouts.c.id).where(is_over))
    yield rollouts, is_over
    experiments = tables.experiments
    ended = sa.select(experiments.c.id).where(experiments.c.ended_at < before)
    for units in (tables.exposures, tables.exposure_latency):
        yield units, units.c.experiment.in_(ended)
