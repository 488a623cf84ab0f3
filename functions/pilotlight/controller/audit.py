"""The audit log: who changed what, from what, to what. Append-only: the database itself refuses to change or drop a row."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

from pilotlight.controller import tables
from pilotlight.controller.store import Write
from pilotlight.spec import canonical_json


def record(
    write: Write, *, tenant: str, actor: str, action: str, subject: str, before: Any = None, after: Any = None, request: str = ""
) -> None:
    """Note a change in the transaction that makes it. `actor` is a key's id, or `platform` for the platform itself."""
    row = {"tenant": tenant, "actor": actor, "action": action, "subject": subject, "request": request, "at": write.now}
    texts = {name: None if value is None else canonical_json(value).decode() for name, value in (("before", before), ("after", after))}
    write.sql.execute(sa.insert(tables.audit).values(**row, **texts))


def entries(sql: sa.Connection, *, tenant: str, before_id: int | None, limit: int) -> list[dict[str, Any]]:
    """A tenant's newest entries first, older than `before_id` when paging."""
    audit = tables.audit
    query = sa.select(audit).where(audit.c.tenant == tenant).order_by(audit.c.id.desc()).limit(limit)
    if before_id is not None:
        query = query.where(audit.c.id < before_id)
    return [_entry(row) for row in sql.execute(query).mappings()]


def _entry(row: sa.RowMapping) -> dict[str, Any]:
    out = dict(row)
    for name in ("before", "after"):
        out[name] = None if out[name] is None else json.loads(out[name])
    return out
