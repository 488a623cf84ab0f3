"""Giving up old revisions of an app that goes on: what they were stays known, their bundles and
weights need not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller import aliases, publishing, registry, tables
from pilotlight.controller.places import Place
from pilotlight.controller.rollouts import ledger
from pilotlight.controller.store import Write
from pilotlight.controller.stored.roots import Named


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """Revisions as (function id, name), and the digests that they name."""

    revisions: tuple[tuple[str, str], ...]
    digests: frozenset[str]


def prune(write: Write, place: Place, *, keep: int, dry_run: bool) -> Pruned:
    """Give up the revisions of the app's functions, but the newest `keep` and those that can be
    called. Raises NotFound."""
    registry.demand_known(write.sql, place, None)
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
        columns = (table.c.name, table.c.spec, table.c.pruned_at)
        newest_first = (
            sa.select(*columns).where(table.c.function == function).order_by(table.c.ordinal.desc())
        )
        for row in write.sql.execute(newest_first.offset(keep)).all():
            if row.name not in called and row.pruned_at is None:
                pruned.append((function, row.name))
                digests |= Named.by(row.spec).digests()
    if pruned and not dry_run:
        for function, name in pruned:
            one = sa.update(table).where(table.c.function == function, table.c.name == name)
            write.sql.execute(one.values(pruned_at=write.now))
        registry.note(write, place, "app.prune", after={"revisions": len(pruned), "keep": keep})
    return Pruned(revisions=tuple(pruned), digests=frozenset(digests))


def blobs_of_functions(sql: sa.Connection, functions: Iterable[str]) -> set[str]:
    """Digests that any revision of these function ids names."""
    table, digests = tables.revisions, set[str]()
    for spec in sql.execute(
        sa.select(table.c.spec).where(table.c.function.in_(list(functions)))
    ).scalars():
        digests |= Named.by(spec).digests()
    return digests


def _called(sql: sa.Connection, function: str) -> set[str]:
    """Revisions with traffic, a tag, a pin, an alias, or a part in a rollout or an experiment."""
    called = {*publishing.document(sql, function).named(), *aliases.of(sql, function).values()}
    if (rollout := ledger.running(sql, function)) is not None:
        called |= {rollout.candidate, rollout.stable}
    return called
