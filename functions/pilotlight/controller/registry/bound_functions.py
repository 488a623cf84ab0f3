"""Which functions of an app are bound ones, and their end: with the revision that they were made
of."""

from __future__ import annotations

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.registry import feed_publisher
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.spec.bound import bound_prefix, is_bound_of


def names_of(sql: sa.Connection, place: AppRef, function: str) -> list[str]:
    """Return the names of the bound functions of `function`, sorted."""
    table, prefix = tables.functions, bound_prefix(function)
    query = (
        sa.select(table.c.name)
        .where(
            *place.in_app(),
            table.c.removed_at.is_(None),
            table.c.name.startswith(prefix, autoescape=True),
        )
        .order_by(table.c.name)
    )
    return [name for name in sql.execute(query).scalars() if is_bound_of(name, function)]


def end(write: Write, place: AppRef, function: str) -> None:
    """Remove the bound functions of `function`. They have no rollouts, experiments or schedules;
    their snapshots are kept for a binding to the same revision."""
    table = tables.functions
    for name in names_of(write.sql, place, function):
        found = place.function_id(name)
        write.sql.execute(sa.delete(tables.traffic).where(tables.traffic.c.function == found))
        write.sql.execute(sa.update(table).where(table.c.id == found).values(removed_at=write.now))
        feed_publisher.withdraw(write, found)
