"""Collections of an environment, and their values: one row for each.

A dict has one row for each key, at position 0. A queue has rows for each of its partitions (`key`),
ordered by position, and takes the first ones. Values are bytes that nothing here reads. A change is
one transaction: what was acknowledged is stored, and of two takers each gets rows of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.collections import recent_operations
from pilotlight.controller.collections.recent_operations import once
from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity import stored_bytes
from pilotlight.controller.identity.stored_bytes import StorageUsage
from pilotlight.controller.identity.tenants import require_environment
from pilotlight.controller.weights import storage_usage
from pilotlight.errors import Conflict, NotFound, StorageQuotaExceeded
from pilotlight.spec.collection import MAX_REQUEST_VALUES, MAX_VALUE_BYTES, CollectionKind
from pilotlight.spec.identifiers import require_name
from pilotlight.spec.quotas import Plan

MAX_COLLECTIONS = 1000
"""Dicts and queues of a tenant, in all environments."""
MAX_ENTRIES = 100_000
"""Values of one collection."""
MAX_BYTES = 256 * 1024 * 1024
"""Keys and values of one collection: they are rows of the controller's database, which also has the
ledger."""
MAX_TENANT_BYTES = 1024 * 1024 * 1024
"""Keys and values of all collections of a tenant, whatever its plan allows."""
MAX_ANSWER_BYTES = 2 * MAX_VALUE_BYTES
"""Values of one answer, unless the first one alone is larger."""
CLEARED_AT_ONCE = 5000
"""Values that one transaction clears, some tens of milliseconds."""
CLEARED_BYTES = 16 * 1024 * 1024
"""The same of large ones."""
_COLLECTIONS, _VALUES = tables.collections, tables.collection_values


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionScope:
    """What an operation applies to; `actor` and `request` are for the audit log."""

    tenant: str
    environment: str
    kind: CollectionKind
    name: str = ""
    actor: str = ""
    request: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """A dict or queue; `size_bytes` of its keys and values, `position` of a queue's next value."""

    id: str
    tenant: str
    environment: str
    kind: str
    name: str
    entries: int
    size_bytes: int
    position: int
    created_at: float
    updated_at: float


def listing(sql: sa.Connection, scope: CollectionScope) -> list[Collection]:
    """The environment's collections of a kind, by name."""
    query = sa.select(_COLLECTIONS).where(*_of_kind(scope)).order_by(_COLLECTIONS.c.name)
    return [Collection(**row) for row in sql.execute(query).mappings()]


def find(sql: sa.Connection, scope: CollectionScope) -> Collection:
    """Return a collection. Raises NotFound."""
    found = find_or_none(sql, scope)
    if found is None:
        raise NotFound(
            f"there is no {scope.kind} {scope.name[:80]!r} in environment {scope.environment!r}",
            name=scope.name[:80],
            hint=f"{scope.kind.title()}.from_name(…, create_if_missing=True) creates it; "
            f"`pilotlight {scope.kind} list` lists them",
        )
    return found


def find_or_none(sql: sa.Connection, scope: CollectionScope) -> Collection | None:
    """Return a collection, None where there is none of that name."""
    query = sa.select(_COLLECTIONS).where(*_of_kind(scope), _COLLECTIONS.c.name == scope.name)
    row = sql.execute(query).mappings().first()
    return None if row is None else Collection(**row)


def create(write: Write, scope: CollectionScope) -> Collection:
    """Create an empty collection unless there is one of that name. Raises InvalidInput, NotFound,
    Conflict."""
    if (found := find_or_none(write.sql, scope)) is not None:
        return found
    require_name(scope.kind, scope.name, parameter="name")
    require_environment(write.sql, tenant=scope.tenant, name=scope.environment)
    count = sa.select(sa.func.count()).where(_COLLECTIONS.c.tenant == scope.tenant)
    if write.sql.execute(count).scalar_one() >= MAX_COLLECTIONS:
        raise Conflict(
            f"this tenant has {MAX_COLLECTIONS} dicts and queues, which is the maximum: delete "
            f"some, or use keys or partitions of one",
            hint="pilotlight dict delete NAME",
        )
    made = Collection(
        id=f"{scope.kind}-{secrets.token_hex(8)}",
        tenant=scope.tenant,
        environment=scope.environment,
        kind=scope.kind.value,
        name=scope.name,
        entries=0,
        size_bytes=0,
        position=1,
        created_at=write.now,
        updated_at=write.now,
    )
    values = {field.name: getattr(made, field.name) for field in fields(Collection)}
    write.sql.execute(sa.insert(_COLLECTIONS).values(**values))
    _audit(write, scope, "create")
    return made


def delete(write: Write, scope: CollectionScope) -> None:
    """Delete a collection and its values. Raises NotFound."""
    found = find(write.sql, scope)
    write.sql.execute(sa.delete(_VALUES).where(_VALUES.c.collection == found.id))
    recent_operations.delete_all(write, found.id)
    _count_bytes(write, found, -found.size_bytes)
    write.sql.execute(sa.delete(_COLLECTIONS).where(_COLLECTIONS.c.id == found.id))
    _audit(write, scope, "delete", before={"size_bytes": found.size_bytes})


def clear(write: Write, found: Collection, key: str | None = None) -> int:
    """Remove values of one key or partition, None: of all, as many as one transaction may, so that
    other tenants' need not wait long; returns their number, 0: none was left."""
    where = [] if key is None else [_VALUES.c.key == key]
    place = sa.tuple_(_VALUES.c.key, _VALUES.c.position)
    query = sa.select(_VALUES.c.key, _VALUES.c.position, _VALUES.c.size_bytes)
    query = query.where(_VALUES.c.collection == found.id, *where).order_by(
        _VALUES.c.key, _VALUES.c.position
    )
    sized = write.sql.execute(query.limit(CLEARED_AT_ONCE)).all()
    if not sized:
        return 0
    last = _fitting(sized, CLEARED_BYTES)[-1]
    return _removed(write, found, [*where, place <= (last.key, last.position)])


def is_empty(sql: sa.Connection, found: Collection, key: str) -> bool:
    """Whether a key or partition has no value."""
    query = sa.select(_VALUES.c.position).where(*_at(found, [key])).limit(1)
    return sql.execute(query).first() is None


def count(sql: sa.Connection, found: Collection, key: str | None) -> int:
    """Number of values of one partition; None: of the whole collection."""
    if key is None:
        return found.entries
    query = sa.select(sa.func.count()).where(*_at(found, [key]))
    return int(sql.execute(query).scalar_one())


def entries(
    sql: sa.Connection, found: Collection, *, keys: Sequence[str] | None = None, after: str = ""
) -> tuple[list[tuple[str, bytes]], bool]:
    """Keys and values of a dict, of these keys or of all, by key from `after` on, at most
    MAX_REQUEST_VALUES and MAX_ANSWER_BYTES; and whether there may be more."""
    where = _at(found, keys) if keys is not None else [_VALUES.c.collection == found.id]
    query = sa.select(_VALUES.c.key, _VALUES.c.size_bytes).where(*where, _VALUES.c.key > after)
    sized = sql.execute(query.order_by(_VALUES.c.key).limit(MAX_REQUEST_VALUES)).all()
    chosen = [row.key for row in _fitting(sized)]
    rows = sql.execute(sa.select(_VALUES.c.key, _VALUES.c.value).where(*_at(found, chosen)))
    values = {row.key: bytes(row.value) for row in rows}
    is_more = len(chosen) < len(sized) or len(sized) == MAX_REQUEST_VALUES
    return [(key, values[key]) for key in chosen], is_more


def keys(sql: sa.Connection, found: Collection, *, after: str) -> list[str]:
    """Keys of a dict from `after` on, at most MAX_REQUEST_VALUES."""
    query = sa.select(_VALUES.c.key).where(_VALUES.c.collection == found.id, _VALUES.c.key > after)
    return list(sql.execute(query.order_by(_VALUES.c.key).limit(MAX_REQUEST_VALUES)).scalars())


def put(
    write: Write,
    found: Collection,
    plan: Plan,
    given: Mapping[str, bytes],
    *,
    skip_if_exists: bool = False,
    operation_id: str = "",
) -> int:
    """Store values of a dict by key, at most MAX_REQUEST_VALUES; returns how many were stored.
    Raises StorageQuotaExceeded; then none was. `operation_id`: as for `recent_operations.once`."""

    def store() -> list[bytes]:
        return [b"%d" % _store(write, found, plan, given, skip_if_exists=skip_if_exists)]

    (count,) = once(write, found.id, operation_id, store)
    return int(count)


def _store(
    write: Write,
    found: Collection,
    plan: Plan,
    given: Mapping[str, bytes],
    *,
    skip_if_exists: bool,
) -> int:
    query = sa.select(_VALUES.c.key, _VALUES.c.size_bytes).where(*_at(found, list(given)))
    there = {row.key: int(row.size_bytes) for row in write.sql.execute(query)}
    fresh = {key: v for key, v in given.items() if not (skip_if_exists and key in there)}
    rows = [_row(found, key, 0, value) for key, value in fresh.items()]
    replaced = sum(there.get(key, 0) for key in fresh)
    _grow(
        write,
        found,
        plan,
        more=len(fresh.keys() - there.keys()),
        more_bytes=sum(row["size_bytes"] for row in rows) - replaced,
    )
    if rows:
        insert = write.insert(_VALUES)
        changed = {name: insert.excluded[name] for name in ("size_bytes", "value")}
        index = ["collection", "key", "position"]
        insert = insert.on_conflict_do_update(index_elements=index, set_=changed)
        write.sql.execute(insert, rows)
    return len(rows)


def pop(write: Write, found: Collection, key: str, *, operation_id: str = "") -> bytes | None:
    """Remove a key of a dict and return its value; None: it is not there. `operation_id`: as for
    `recent_operations.once`."""

    def remove() -> list[bytes]:
        query = sa.select(_VALUES.c.value).where(*_at(found, [key]))
        value = write.sql.execute(query).scalar()
        if value is None:
            return []
        clear(write, found, key)
        return [bytes(value)]

    answer = once(write, found.id, operation_id, remove)
    return answer[0] if answer else None


def push(
    write: Write,
    found: Collection,
    plan: Plan,
    partition: str,
    values: Sequence[bytes],
    *,
    operation_id: str = "",
) -> None:
    """Append values to a partition of a queue. Raises StorageQuotaExceeded; then none was.
    `operation_id`: as for `recent_operations.once`."""

    def append() -> list[bytes]:
        _append(write, found, plan, partition, values)
        return []

    once(write, found.id, operation_id if values else "", append)


def _append(
    write: Write, found: Collection, plan: Plan, partition: str, values: Sequence[bytes]
) -> None:
    rows = [
        _row(found, partition, found.position + number, value)
        for number, value in enumerate(values)
    ]
    total = sum(row["size_bytes"] for row in rows)
    _grow(write, found, plan, more=len(rows), more_bytes=total, positions=len(rows))
    if rows:
        write.sql.execute(sa.insert(_VALUES), rows)


def take(
    write: Write, found: Collection, partition: str, number: int, *, operation_id: str = ""
) -> list[bytes]:
    """Remove and return the first values of a partition, at most `number` and MAX_ANSWER_BYTES.
    `operation_id`: as for `recent_operations.once`; one that took nothing is not known."""

    def remove() -> list[bytes]:
        return _pop(write, found, partition, number)

    return once(write, found.id, operation_id, remove, is_kept=bool)


def _pop(write: Write, found: Collection, partition: str, number: int) -> list[bytes]:
    query = sa.select(_VALUES.c.position, _VALUES.c.size_bytes).where(*_at(found, [partition]))
    sized = write.sql.execute(query.order_by(_VALUES.c.position).limit(number)).all()
    if not sized:
        return []
    last = _fitting(sized)[-1].position
    first = [*_at(found, [partition]), _VALUES.c.position <= last]
    query = sa.select(_VALUES.c.value).where(*first).order_by(_VALUES.c.position)
    values = [bytes(value) for value in write.sql.execute(query).scalars()]
    _removed(write, found, first[1:])
    return values


def _grow(
    write: Write,
    found: Collection,
    plan: Plan,
    *,
    more: int,
    more_bytes: int,
    positions: int = 0,
) -> None:
    """Count what is added. Raises StorageQuotaExceeded."""
    usage = _count(write, found, more, more_bytes, positions)
    if more <= 0 and more_bytes <= 0:
        return
    of_tenant = usage.collection_bytes - more_bytes
    bounds = (
        (f"{found.kind}_entries", "values", found.entries, more, MAX_ENTRIES),
        (f"{found.kind}_bytes", "bytes", found.size_bytes, more_bytes, MAX_BYTES),
        ("collection_bytes", "bytes", of_tenant, more_bytes, MAX_TENANT_BYTES),
    )
    for quota, what, used, added, limit in bounds:
        if used + added > limit:
            whose = "all dicts and queues of this tenant have"
            if quota != "collection_bytes":
                whose = f"{found.kind} {found.name!r} has"
            raise StorageQuotaExceeded(
                f"{added} more {what} do not fit: {whose} {used} {what}, and at most {limit} "
                f"are allowed ({quota}); nothing was stored",
                quota=quota,
                limit=limit,
                used=used,
                hint="Remove values, or keep large ones in a volume.",
            )
    before = StorageUsage(total_bytes=usage.total_bytes - more_bytes, collection_bytes=of_tenant)
    storage_usage.require_fitting(plan, before, more_bytes=more_bytes)


def _removed(write: Write, found: Collection, where: Iterable[sa.ColumnElement[bool]]) -> int:
    """Delete values, and count that; returns their number."""
    gone = (_VALUES.c.collection == found.id, *where)
    query = sa.select(sa.func.count(), sa.func.sum(_VALUES.c.size_bytes)).where(*gone)
    number, size_bytes = write.sql.execute(query).one()
    write.sql.execute(sa.delete(_VALUES).where(*gone))
    _count(write, found, -number, -int(size_bytes or 0))
    return int(number)


def _count(
    write: Write, found: Collection, more: int, more_bytes: int, positions: int = 0
) -> StorageUsage:
    values = {"more": more, "more_bytes": more_bytes, "positions": positions, "now": write.now}
    write.sql.execute(_COUNT, {"of": found.id, **values})
    return _count_bytes(write, found, more_bytes)


_COUNT = (
    sa.update(_COLLECTIONS)
    .where(_COLLECTIONS.c.id == sa.bindparam("of"))
    .values(
        entries=_COLLECTIONS.c.entries + sa.bindparam("more"),
        size_bytes=_COLLECTIONS.c.size_bytes + sa.bindparam("more_bytes"),
        position=_COLLECTIONS.c.position + sa.bindparam("positions"),
        updated_at=sa.bindparam("now"),
    )
)


def _count_bytes(write: Write, found: Collection, more_bytes: int) -> StorageUsage:
    return stored_bytes.count(
        write, tenant=found.tenant, more_bytes=more_bytes, in_collections=True
    )


def _fitting(sized: Sequence[Any], max_bytes: int | None = None) -> Sequence[Any]:
    """The first rows, as many as an answer has room for by their `size_bytes`: at least one."""
    total, limit = 0, MAX_ANSWER_BYTES if max_bytes is None else max_bytes
    for number, row in enumerate(sized):
        total += row.size_bytes
        if number and total > limit:
            return sized[:number]
    return sized


def _row(found: Collection, key: str, position: int, value: bytes) -> dict[str, Any]:
    size_bytes = len(key.encode()) + len(value)
    return {
        "collection": found.id,
        "key": key,
        "position": position,
        "size_bytes": size_bytes,
        "value": value,
    }


def _at(found: Collection, keys: Sequence[str]) -> list[sa.ColumnElement[bool]]:
    return [_VALUES.c.collection == found.id, _VALUES.c.key.in_(keys)]


def _of_kind(scope: CollectionScope) -> tuple[sa.ColumnElement[bool], ...]:
    c = _COLLECTIONS.c
    return (
        c.tenant == scope.tenant,
        c.environment == scope.environment,
        c.kind == scope.kind.value,
    )


def _audit(write: Write, scope: CollectionScope, verb: str, *, before: Any = None) -> None:
    audit_trail.record(
        write,
        tenant=scope.tenant,
        actor=scope.actor,
        action=f"{scope.kind}.{verb}",
        subject=f"{scope.environment}/{scope.name}",
        before=before,
        request=scope.request,
    )
