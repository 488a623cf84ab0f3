"""The audit log: who changed what, from which address, with the value before and after.
Append-only: the database rejects changes and deletions of rows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.spec.record_json import canonical_json

PLATFORM = "platform"
"""The actor of changes that the platform makes by itself."""
MAX_ADDRESS = 64
"""Characters of an address; an IPv6 address with its zone is shorter."""
_address: ContextVar[str] = ContextVar("address of the caller", default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditQuery:
    """A filter for entries; None matches any value.

    Attributes:
        tenant: id; None = of all tenants.
        actor: id of a key, or `platform`.
        action: `key.create`, or `key.*` for all with that prefix.
        subject: the exact name.
        since, until: seconds since the epoch, since <= at < until.
        address: the client's address.
        before_id: only entries older than this one, for the next page.
    """

    tenant: str | None
    actor: str | None = None
    action: str | None = None
    subject: str | None = None
    since: float | None = None
    until: float | None = None
    address: str | None = None
    before_id: int | None = None


@contextlib.contextmanager
def with_client_address(address: str) -> Iterator[None]:
    """Record `address` as the client address of all changes made inside this context, including in
    threads and tasks started there."""
    token = _address.set(address[:MAX_ADDRESS])
    try:
        yield
    finally:
        _address.reset(token)


def client_address() -> str:
    """Return the address of the caller of this request; "" outside one."""
    return _address.get()


def record(
    write: Write,
    *,
    tenant: str,
    actor: str,
    action: str,
    subject: str,
    before: Any = None,
    after: Any = None,
    request: str = "",
) -> None:
    """Record a change, in the transaction that makes it. `actor` is a key's id, or `platform` for
    the platform itself."""
    row = {
        "tenant": tenant,
        "actor": actor,
        "action": action,
        "subject": subject,
        "request": request,
        "at": write.now,
    }
    texts = {
        name: None if value is None else canonical_json(value).decode()
        for name, value in (("before", before), ("after", after))
    }
    write.sql.execute(sa.insert(tables.audit).values(**row, **texts, address=_address.get()))


def entries(sql: sa.Connection, wanted: AuditQuery, *, limit: int) -> list[dict[str, Any]]:
    """Return matching entries with the name of their tenant, newest first."""
    audit, tenants = tables.audit, tables.tenants
    query = sa.select(audit, tenants.c.name.label("tenant_name")).outerjoin(
        tenants, tenants.c.id == audit.c.tenant
    )
    query = query.where(*_conditions(wanted)).order_by(audit.c.id.desc()).limit(limit)
    return [_entry(row) for row in sql.execute(query).mappings()]


def _conditions(wanted: AuditQuery) -> Iterator[sa.ColumnElement[bool]]:
    audit = tables.audit
    for name in ("tenant", "actor", "subject", "address"):
        if (value := getattr(wanted, name)) is not None:
            yield audit.c[name] == value
    if wanted.action is not None:
        is_prefix = wanted.action.endswith("*")
        yield (
            audit.c.action.startswith(wanted.action[:-1], autoescape=True)
            if is_prefix
            else audit.c.action == wanted.action
        )
    if wanted.since is not None:
        yield audit.c.at >= wanted.since
    if wanted.until is not None:
        yield audit.c.at < wanted.until
    if wanted.before_id is not None:
        yield audit.c.id < wanted.before_id


def _entry(row: sa.RowMapping) -> dict[str, Any]:
    out = dict(row)
    for name in ("before", "after"):
        out[name] = None if out[name] is None else json.loads(out[name])
    return {**out, "tenant_name": out["tenant_name"] or ""}
