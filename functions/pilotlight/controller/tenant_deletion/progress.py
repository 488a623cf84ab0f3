"""How far deletions of tenants are: their rows in `tenant_deletions`.

A deletion begins with one transaction: from then on the tenant's keys and calls are refused, and
it cannot be taken back. Its steps (`Step`) follow, each safe to repeat: rows are deleted and
counted in one transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, pieces, tables
from pilotlight.controller.database.pieces import Keys
from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.identity import access_control, tenants
from pilotlight.controller.tenant_deletion.tenant_tables import Step, TenantRows
from pilotlight.errors import Conflict
from pilotlight.spec.quotas import Plan
from pilotlight.spec.record_json import canonical_json

DONE: Final = "deleted"
"""The state after the last step."""
NEXT: Final[Mapping[str, str]] = {
    **dict(zip(map(str, Step), [*map(str, Step)][1:], strict=False)),
    Step.REST.value: DONE,
}
"""The state that follows each step."""
MAX_REASON: Final = 500
"""Characters of `Deletion.waiting_for`."""
_TABLE = tables.tenant_deletions


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """A deletion.

    Attributes:
        tenant, name, uid: of the tenant.
        state: its next `Step`, or DONE.
        counts: deleted rows by table.
        waiting_for: why its step is repeated; "" = it is not.
    """

    tenant: str
    name: str
    uid: int | None
    state: str
    requested_by: str
    began_at: float
    updated_at: float
    finished_at: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    waiting_for: str = ""


def begin(
    store: Store, *, name: str, plans: Mapping[str, Plan], actor: str, request: str = ""
) -> None:
    """Begin to delete a tenant; nothing if that has begun before. Raises NotFound, Conflict.

    It is suspended first, in a transaction of its own, for activators before version 0029, which
    know no deleted tenants."""
    with store.write() as write:
        row = tenants.find(write.sql, name=name)
        if name == access_control.PLATFORM_TENANT:
            raise Conflict(
                f"tenant {name!r} operates the platform and cannot be deleted", tenant=name
            )
        if row.deleted_at is not None:
            return
        _change(write, row.id, suspended_at=row.suspended_at or write.now)
        tenants.publish(write, row.id, plans=plans)
    with store.write() as write:
        row = tenants.find(write.sql, name=name)
        if row.deleted_at is not None:
            return
        _change(write, row.id, deleted_at=write.now)
        write.sql.execute(
            sa.insert(_TABLE).values(
                tenant=row.id,
                state=Step.ACCESS.value,
                requested_by=actor,
                counts="{}",
                waiting_for="",
                began_at=write.now,
                updated_at=write.now,
            )
        )
        tenants.publish(write, row.id, plans=plans)
        _audit(write, row.id, name, "tenant.delete", actor=actor, request=request)


def find(sql: sa.Connection, *, tenant: str) -> Deletion | None:
    """The deletion of a tenant (id); None = it is not deleted."""
    return next(iter(_read(sql, _TABLE.c.tenant == tenant)), None)


def by_tenant(sql: sa.Connection) -> dict[str, Deletion]:
    """All deletions by the tenant's id."""
    return {one.tenant: one for one in _read(sql, sa.true())}


def running(sql: sa.Connection) -> list[Deletion]:
    """The deletions that are not done, oldest first."""
    return _read(sql, _TABLE.c.state != DONE)


def done_since(sql: sa.Connection, at: float) -> list[Deletion]:
    """The deletions that ended at `at` or later."""
    return _read(sql, sa.and_(_TABLE.c.state == DONE, _TABLE.c.finished_at >= at))


def count(write: Write, tenant: str, table: str, more: int) -> None:
    """Count deleted rows, in the transaction that deletes them."""
    text = write.sql.execute(sa.select(_TABLE.c.counts).where(_TABLE.c.tenant == tenant)).scalar()
    counts = json.loads(text or "{}")
    counts[table] = counts.get(table, 0) + more
    _update(write, tenant, counts=canonical_json(counts).decode(), waiting_for="")


def delete_rows(rows: TenantRows, tenant: str, write: Write, keys: Keys) -> None:
    """Delete rows of the tenant with these keys, and count them."""
    count(write, tenant, rows.name, pieces.delete(write, rows.table, keys))


def complete(write: Write, found: Deletion) -> str:
    """Record that a step is complete; returns the state that follows."""
    state = NEXT[found.state]
    values = {"finished_at": write.now} if state == DONE else {}
    _update(write, found.tenant, state=state, waiting_for="", **values)
    if state == DONE:
        _change(write, found.tenant, stored_bytes=0, collection_bytes=0)
        now = find(write.sql, tenant=found.tenant)
        counts = dict(now.counts) if now is not None else {}
        _audit(
            write,
            found.tenant,
            found.name,
            "tenant.deleted",
            actor=audit_trail.PLATFORM,
            after=counts,
        )
    return state


def restart(write: Write, found: Deletion) -> None:
    """Begin with the first step again, because rows came afterwards."""
    _update(write, found.tenant, state=Step.ACCESS.value, waiting_for="", finished_at=None)


def wait(write: Write, found: Deletion, reason: str) -> None:
    """Record why a step is repeated."""
    _update(write, found.tenant, waiting_for=reason)


def _read(sql: sa.Connection, where: sa.ColumnElement[bool]) -> list[Deletion]:
    owners = tables.tenants
    query = (
        sa.select(_TABLE, owners.c.name, owners.c.uid)
        .join(owners, owners.c.id == _TABLE.c.tenant)
        .where(where)
        .order_by(_TABLE.c.began_at, _TABLE.c.tenant)
    )
    return [
        Deletion(**{**row, "counts": json.loads(row["counts"])})
        for row in sql.execute(query).mappings()
    ]


def _update(write: Write, tenant: str, **values: Any) -> None:
    write.sql.execute(
        sa.update(_TABLE).where(_TABLE.c.tenant == tenant).values(updated_at=write.now, **values)
    )


def _change(write: Write, tenant: str, **values: Any) -> None:
    table = tables.tenants
    write.sql.execute(sa.update(table).where(table.c.id == tenant).values(**values))


def _audit(
    write: Write,
    tenant: str,
    name: str,
    action: str,
    *,
    actor: str,
    request: str = "",
    after: Any = None,
) -> None:
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action=action,
        subject=name,
        after=after,
        request=request,
    )
