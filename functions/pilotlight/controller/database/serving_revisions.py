"""Which revisions serve which functions."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables


def select_serving(*where: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """Select the functions that meet the conditions, with `revision` and `spec` of each revision
    that has traffic: by name, of each function that with the most traffic first."""
    functions, revisions, traffic = tables.functions, tables.revisions, tables.traffic
    same = (revisions.c.function == traffic.c.function) & (revisions.c.name == traffic.c.revision)
    return (
        sa.select(functions, revisions.c.spec, revisions.c.name.label("revision"))
        .join(traffic, traffic.c.function == functions.c.id)
        .join(revisions, same)
        .where(functions.c.removed_at.is_(None), *where)
        .order_by(
            functions.c.app, functions.c.name, traffic.c.weight.desc(), revisions.c.name.desc()
        )
    )
