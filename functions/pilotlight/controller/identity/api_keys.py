"""API keys: 256 random bits, stored as a hash, shown once, revoked immediately (through the
feed)."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, feed, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity import access_control, quotas
from pilotlight.controller.identity.tenants import require_environment
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.protocol import KeyRecord
from pilotlight.spec.identifiers import Scope, require_customer, require_name
from pilotlight.spec.record_json import canonical_json, to_json

MAX_LABEL = 200
MAX_LIFE_S = 100 * 365 * 86_400.0
"""The longest lifetime; create a key without an expiry instead of a longer one."""
MAX_KEYS = 20_000
"""Active keys per tenant: all of them are in the feed."""
MAX_ENDED = 1000
"""Ended keys per tenant that are still listed; older ones are only in the audit log."""
_ENDED_AT_ONCE = 100
_TABLE = tables.api_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRestrictions:
    """The restrictions of a key; None = unrestricted.

    Attributes:
        function: requires `app`.
        quotas: quotas of this key only (`pilotlight.spec.quotas.Quotas` as JSON).
        customer: the customer for which all of its calls are made, of a key of scope `invoke`;
            None = its holder may name any.
    """

    environment: str | None = None
    app: str | None = None
    function: str | None = None
    quotas: Mapping[str, Any] = field(default_factory=dict)
    customer: str | None = None


UNRESTRICTED = KeyRestrictions()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A new key. `secret` is its text, which cannot be shown again; `replaces` is the key that was
    rotated into it."""

    record: KeyRecord
    secret: str
    name: str
    created_at: float
    replaces: str | None = None


def create(
    write: Write,
    *,
    tenant: str,
    scope: Scope,
    actor: str,
    environment: str | None = None,
    reach: KeyRestrictions = UNRESTRICTED,
    name: str = "",
    expires_in_s: float | None = None,
    request: str = "",
) -> NewKey:
    """Create a key. Raises InvalidInput, NotFound for an environment that does not exist, Conflict
    when there are too many keys.

    `environment` is shorthand for `KeyRestrictions(environment=…)`.
    """
    _check(name, reach, expires_in_s)
    _check_customer(reach.customer, scope)
    environment = environment or reach.environment
    if environment is not None:
        require_environment(write.sql, tenant=tenant, name=environment)
    text = "pl_" + secrets.token_urlsafe(32)
    record = KeyRecord(
        id=f"k-{secrets.token_hex(6)}",
        hash=access_control.hash_key(text),
        tenant=tenant,
        scope=scope.value,
        environment=environment,
        expires_at=None if expires_in_s is None else write.now + expires_in_s,
        app=reach.app,
        function=reach.function,
        quotas=quotas.parse(reach.quotas, of_key=True),
        customer=reach.customer,
    )
    new_key = NewKey(record=record, secret=text, name=name, created_at=write.now)
    _insert(write, new_key, actor=actor)
    _require_room(write, tenant=tenant)
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="key.create",
        subject=record.id,
        after=_audit_entry(new_key),
        request=request,
    )
    return new_key


def change(
    write: Write,
    *,
    tenant: str,
    key_id: str,
    actor: str,
    bounds: Mapping[str, Any] | None = None,
    expiry: tuple[float | None] | None = None,
    force: bool = False,
    request: str = "",
) -> dict[str, Any]:
    """Change a key's quotas (`bounds`; None: unchanged) or its expiry: `expiry` holds seconds from
    now, or None for no expiry.

    Returns its listing entry. Raises NotFound, InvalidInput, or Conflict: for a revoked key, or,
    without `force`, for an earlier expiry of a tenant's last admin key (if all expire: of the one
    that expires last)."""
    row = find(write.sql, tenant=tenant, key_id=key_id)
    _require_unrevoked(row)
    values: dict[str, Any] = {}
    if bounds is not None:
        values["quotas"] = canonical_json(quotas.parse(bounds, of_key=True)).decode()
    if expiry is not None:
        _check("", UNRESTRICTED, expiry[0])
        _require_lasting(row)
        values["expires_at"] = ends_at = None if expiry[0] is None else write.now + expiry[0]
        earlier = ends_at is not None and ends_at < (row.expires_at or float("inf"))
        if (
            earlier
            and not force
            and _is_last_admin(write, row, until=row.expires_at or float("inf"))
        ):
            raise _last_admin(key_id)
    if values:
        write.sql.execute(sa.update(_TABLE).where(_TABLE.c.id == key_id).values(**values))
    changed = find(write.sql, tenant=tenant, key_id=key_id)
    _publish(write, changed)
    before, after = (
        {name: _entry(one._mapping)[name] for name in ("quotas", "expires_at")}
        for one in (row, changed)
    )
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="key.change",
        subject=key_id,
        before=before,
        after=after,
        request=request,
    )
    return _entry(changed._mapping)


def rotate(
    write: Write, *, tenant: str, key_id: str, grace_s: float, actor: str, request: str = ""
) -> NewKey:
    """Create a key with the same restrictions; the old one ends after `grace_s` seconds, 0 = now. A
    key with an expiry gets the same lifetime again.

    Of two concurrent rotations, one fails. Raises NotFound, InvalidInput, or Conflict: the key was
    revoked, expired or rotated before, or there are too many keys."""
    if not 0 <= grace_s <= MAX_LIFE_S:
        raise InvalidInput(
            f"grace_s = {grace_s:g}: must be between 0 and {MAX_LIFE_S:g}", parameter="grace_s"
        )
    row = find(write.sql, tenant=tenant, key_id=key_id)
    _require_unrevoked(row)
    _require_lasting(row)
    if row.expires_at is not None and row.expires_at <= write.now:
        raise Conflict(f"API key {key_id} has expired: create a new one", key=key_id)
    successor = write.sql.execute(
        sa.select(_TABLE.c.id).where(_TABLE.c.tenant == tenant, _TABLE.c.replaces == key_id)
    ).scalar()
    if successor is not None:
        raise Conflict(
            f"API key {key_id} was already rotated into {successor}: rotate that one, or create a "
            f"new one",
            key=successor,
        )
    text = "pl_" + secrets.token_urlsafe(32)
    ends_at = None if row.expires_at is None else write.now + (row.expires_at - row.created_at)
    values = {
        **_record(row),
        "id": f"k-{secrets.token_hex(6)}",
        "hash": access_control.hash_key(text),
        "expires_at": ends_at,
    }
    new_key = NewKey(
        record=KeyRecord(**values),
        secret=text,
        name=row.name,
        created_at=write.now,
        replaces=key_id,
    )
    _insert(write, new_key, actor=actor)
    _end(write, row, grace_s=grace_s)
    _require_room(write, tenant=tenant)
    after = {**_audit_entry(new_key), "grace_s": grace_s}
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="key.rotate",
        subject=key_id,
        after=after,
        request=request,
    )
    return new_key


def revoke(
    write: Write, *, tenant: str, key_id: str, actor: str, force: bool = False, request: str = ""
) -> None:
    """Revoke a key; idempotent. Raises NotFound, or Conflict for a tenant's last admin key without
    `force`."""
    row = find(write.sql, tenant=tenant, key_id=key_id)
    if row.revoked_at is None:
        if not force and _is_last_admin(write, row):
            raise _last_admin(key_id)
        _end(write, row, grace_s=0)
        audit_trail.record(
            write, tenant=tenant, actor=actor, action="key.revoke", subject=key_id, request=request
        )


def find(sql: sa.Connection, *, tenant: str, key_id: str) -> sa.Row[Any]:
    """Return a key's row. Raises NotFound, also for another tenant's key."""
    row = sql.execute(
        sa.select(_TABLE).where(_TABLE.c.id == key_id, _TABLE.c.tenant == tenant)
    ).first()
    if row is None:
        raise NotFound(f"there is no API key {key_id}", key=key_id)
    return row


def listing(
    sql: sa.Connection, *, tenant: str, only: str | None = None, bounded: bool = False
) -> list[dict[str, Any]]:
    """Return a tenant's keys, newest first, without their hashes: all, or `only` that one, or those
    with quotas that are not revoked (`bounded`)."""
    query = (
        sa.select(_TABLE)
        .where(_TABLE.c.tenant == tenant)
        .order_by(_TABLE.c.created_at.desc(), _TABLE.c.id)
    )
    if only is not None:
        query = query.where(_TABLE.c.id == only)
    if bounded:
        query = query.where(_TABLE.c.quotas != "{}", _TABLE.c.revoked_at.is_(None))
    return [_entry(row) for row in sql.execute(query).mappings()]


def any_exists(sql: sa.Connection) -> bool:
    """Whether any key exists. Without one the platform has no user yet."""
    return sql.execute(sa.select(_TABLE.c.id).limit(1)).first() is not None


def _insert(write: Write, new_key: NewKey, *, actor: str) -> None:
    row = {
        **to_json(new_key.record),
        "quotas": canonical_json(new_key.record.quotas).decode(),
        "name": new_key.name,
        "created_by": actor,
    }
    write.sql.execute(
        sa.insert(_TABLE).values(**row, created_at=write.now, replaces=new_key.replaces)
    )
    feed.append(write, feed.KEY, new_key.record.id, _fed(new_key.record))


def _require_room(write: Write, *, tenant: str) -> None:
    """Raise Conflict when the tenant has more than MAX_KEYS active keys; delete its oldest ended
    keys beyond MAX_ENDED."""
    of_tenant = _TABLE.c.tenant == tenant
    has_ended = _TABLE.c.revoked_at.is_not(None) | sa.func.coalesce(
        _TABLE.c.expires_at <= write.now, sa.false()
    )
    count = sa.select(sa.func.count()).where(of_tenant)
    ended = int(write.sql.execute(count.where(has_ended)).scalar_one())
    if int(write.sql.execute(count).scalar_one()) - ended > MAX_KEYS:
        raise Conflict(
            f"this tenant has {MAX_KEYS} active API keys, which is the maximum",
            hint="Revoke some: `pilotlight token revoke ID`.",
        )
    if (excess := ended - MAX_ENDED) > 0:
        end = sa.func.coalesce(_TABLE.c.revoked_at, _TABLE.c.expires_at)
        oldest = (
            sa.select(_TABLE.c.id)
            .where(of_tenant, has_ended)
            .order_by(end, _TABLE.c.id)
            .limit(excess + _ENDED_AT_ONCE)
        )
        write.sql.execute(sa.delete(_TABLE).where(_TABLE.c.id.in_(oldest)))


def _end(write: Write, row: sa.Row[Any], *, grace_s: float) -> None:
    if grace_s == 0:
        write.sql.execute(
            sa.update(_TABLE).where(_TABLE.c.id == row.id).values(revoked_at=write.now)
        )
        feed.append(write, feed.KEY, row.id, None)
        return
    ends_at = min(write.now + grace_s, row.expires_at or float("inf"))
    write.sql.execute(sa.update(_TABLE).where(_TABLE.c.id == row.id).values(expires_at=ends_at))
    _publish(write, find(write.sql, tenant=row.tenant, key_id=row.id))


def _publish(write: Write, row: sa.Row[Any]) -> None:
    feed.append(write, feed.KEY, row.id, _fed(KeyRecord(**_record(row))))


def _fed(record: KeyRecord) -> dict[str, Any]:
    value: dict[str, Any] = to_json(record)
    if record.customer is None:
        del value["customer"]  # activators before version 0028 do not know it
    return value


def _record(row: sa.Row[Any]) -> dict[str, Any]:
    names = ("id", "hash", "tenant", "scope", "environment", "expires_at", "app", "function")
    values = {name: getattr(row, name) for name in (*names, "customer")}
    return {**values, "quotas": json.loads(row.quotas)}


def _entry(row: sa.RowMapping) -> dict[str, Any]:
    public = {name: value for name, value in row.items() if name not in ("hash", "tenant")}
    return {**public, "quotas": json.loads(row["quotas"])}


def _audit_entry(new_key: NewKey) -> dict[str, Any]:
    record = {
        name: value
        for name, value in to_json(new_key.record).items()
        if name not in ("hash", "tenant")
    }
    return {**record, "name": new_key.name}


def _last_admin(key_id: str) -> Conflict:
    return Conflict(
        f"API key {key_id} is the last admin key of its tenant: without it the tenant cannot "
        f"create keys or environments",
        key=key_id,
        hint="Create another one first (`pilotlight token create --scope admin`), or repeat with "
        "--force (API: ?force=true).",
    )


def _is_last_admin(write: Write, row: sa.Row[Any], *, until: float | None = None) -> bool:
    """Whether the tenant would have no administrator without this key. Bound keys count only if no
    other admin key is active.

    `until`: count other keys that are active at least until then; None: those that are active now.
    """
    bounds = (_TABLE.c.environment, _TABLE.c.app, _TABLE.c.function)
    is_in_force = _TABLE.c.revoked_at.is_(None) & (
        _TABLE.c.expires_at.is_(None) | (_TABLE.c.expires_at > write.now)
    )
    which = (_TABLE.c.tenant == row.tenant) & (_TABLE.c.scope == Scope.ADMIN.value) & is_in_force
    which &= ~_TABLE.c.created_by.startswith(access_control.SIGN_IN_ACTOR)
    if until is not None:
        which &= (
            (_TABLE.c.id == row.id)
            | _TABLE.c.expires_at.is_(None)
            | (_TABLE.c.expires_at >= min(until, sys.float_info.max))
        )
    found = {
        one.id: all(getattr(one, column.name) is None for column in bounds)
        for one in write.sql.execute(sa.select(_TABLE).where(which))
    }
    if row.id not in found:
        return False
    is_whole = found.pop(row.id)
    return not any(found.values()) if is_whole else not found


def _require_lasting(row: sa.Row[Any]) -> None:
    if row.created_by.startswith(access_control.SIGN_IN_ACTOR):
        raise Conflict(
            f"API key {row.id} was made for a sign-in and ends with it: create another key, or "
            f"sign in again",
            key=row.id,
        )


def _require_unrevoked(row: sa.Row[Any]) -> None:
    if row.revoked_at is not None:
        raise Conflict(f"API key {row.id} was revoked: create a new one", key=row.id)


def _check_customer(customer: str | None, scope: Scope) -> None:
    if customer is None:
        return
    require_customer(customer)
    if scope is not Scope.INVOKE:
        raise InvalidInput(
            f"a key with scope {scope.value!r} cannot be bound to a customer, because it reaches "
            f"what is of all of them: use scope 'invoke'",
            parameter="customer",
        )


def _check(name: str, reach: KeyRestrictions, expires_in_s: float | None) -> None:
    if len(name) > MAX_LABEL:
        raise InvalidInput(
            f"the key's name has {len(name)} characters; the maximum is {MAX_LABEL}",
            parameter="name",
        )
    if expires_in_s is not None and not 0 < expires_in_s <= MAX_LIFE_S:
        raise InvalidInput(
            f"expires_in_s = {expires_in_s:g}: must be above 0, at most {MAX_LIFE_S:g}",
            parameter="expires_in_s",
        )
    if reach.function is not None and reach.app is None:
        raise InvalidInput(f"function = {reach.function!r}: also name its app", parameter="app")
    for kind, given in (("app", reach.app), ("function", reach.function)):
        if given is not None:
            require_name(kind, given)
