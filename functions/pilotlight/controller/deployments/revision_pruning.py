"""Prune old revisions of a deployed app: their rows stay, their bundles and weights may be
deleted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.deployments import app_registry
from pilotlight.controller.registry import feed_publisher
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.release import aliases
from pilotlight.controller.rollouts import repository
from pilotlight.controller.weights.gc_roots import RevisionReferences


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneResult:
    """Pruned revisions as (function id, name), and the digests that they refer to."""

    revisions: tuple[tuple[str, str], ...]
    digests: frozenset[str]


def prune(
    write: Write, place: AppRef, *, keep: int, dry_run: bool, before: float = math.inf
) -> PruneResult:
    """Prune the revisions of the app's functions that were made before `before`, except the newest
    `keep` and those that can be called. Raises NotFound."""
    app_registry.require_known(write.sql, place, None)
    functions, table = tables.functions, tables.revisions
    pruned: list[tuple[str, str]] = []
    digests: set[str] = set()
    ids = (
        sa.select(functions.c.id)
        .where(*place.in_app(), functions.c.removed_at.is_(None))
        .order_by(functions.c.id)
    )
    for function in write.sql.execute(ids).scalars().all():
        called = _called(write.sql, function)
        columns = (table.c.name, table.c.spec, table.c.pruned_at, table.c.created_at)
        newest_first = (
            sa.select(*columns).where(table.c.function == function).order_by(table.c.ordinal.desc())
        )
        for row in write.sql.execute(newest_first.offset(keep)).all():
            if row.name not in called and row.pruned_at is None and row.created_at < before:
                pruned.append((function, row.name))
                digests |= RevisionReferences.by(row.spec).digests()
    if pruned and not dry_run:
        for function, name in pruned:
            one = sa.update(table).where(table.c.function == function, table.c.name == name)
            write.sql.execute(one.values(pruned_at=write.now))
        app_registry.record_app_change(
            write, place, "app.prune", after={"revisions": len(pruned), "keep": keep}
        )
    return PruneResult(revisions=tuple(pruned), digests=frozenset(digests))


def blobs_of_functions(sql: sa.Connection, functions: Iterable[str]) -> set[str]:
    """Digests that any revision of these function ids refers to."""
    table, digests = tables.revisions, set[str]()
    for spec in sql.execute(
        sa.select(table.c.spec).where(table.c.function.in_(list(functions)))
    ).scalars():
        digests |= RevisionReferences.by(spec).digests()
    return digests


def _called(sql: sa.Connection, function: str) -> set[str]:
    """Revisions with traffic, a tag, a pin, an alias, or a part in a cutover, a rollout or an
    experiment."""
    called = {
        *feed_publisher.traffic_document(sql, function).kept(),
        *aliases.aliases_for(sql, function).values(),
    }
    if (rollout := repository.running(sql, function)) is not None:
        called |= {rollout.candidate, rollout.stable}
    return called
