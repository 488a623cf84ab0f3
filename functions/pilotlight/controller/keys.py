"""API keys: 256 random bits, stored as a hash, shown once, revocable at once (through the feed)."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller import access, audit, feed, tables
from pilotlight.controller.store import Write
from pilotlight.controller.tenants import demand_environment
from pilotlight.errors import InvalidInput, NotFound
from pilotlight.protocol import KeyRecord
from pilotlight.spec import canonical_json, to_json
from pilotlight.types import Scope

MAX_LABEL = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key just made. `secret` is its text, which nobody can show again."""

    record: KeyRecord
    secret: str
    name: str
    created_at: float


def create(
    write: Write,
    *,
    tenant: str,
    scope: Scope,
    actor: str,
    environment: str | None = None,
    name: str = "",
    expires_in_s: float | None = None,
    request: str = "",
) -> NewKey:
    """Make a key. Raises InvalidInput, or NotFound for an environment that does not exist."""
    if len(name) > MAX_LABEL:
        raise InvalidInput(f"a key's name has {len(name)} characters: at most {MAX_LABEL}", parameter="name")
    if expires_in_s is not None and expires_in_s <= 0:
        raise InvalidInput(f"expires_in_s = {expires_in_s:g}: must be above 0", parameter="expires_in_s")
    if environment is not None:
        demand_environment(write.sql, tenant=tenant, name=environment)
    text = "pl_" + secrets.token_urlsafe(32)
    key = KeyRecord(
        id=f"k-{secrets.token_hex(6)}",
        hash=access.hash_key(text),
        tenant=tenant,
        scope=scope.value,
        environment=environment,
        expires_at=None if expires_in_s is None else write.now + expires_in_s,
    )
    row = {**to_json(key), "quotas": canonical_json(key.quotas).decode(), "name": name, "created_by": actor, "created_at": write.now}
    write.sql.execute(sa.insert(tables.api_keys).values(**row))
    feed.append(write, feed.KEY, key.id, to_json(key))
    after = {"id": key.id, "scope": key.scope, "environment": environment, "name": name, "expires_at": key.expires_at}
    audit.record(write, tenant=tenant, actor=actor, action="key.create", subject=key.id, after=after, request=request)
    return NewKey(record=key, secret=text, name=name, created_at=write.now)


def revoke(write: Write, *, tenant: str, key_id: str, actor: str, request: str = "") -> None:
    """End a key now; ending it again changes nothing. Raises NotFound."""
    table = tables.api_keys
    row = write.sql.execute(sa.select(table.c.revoked_at).where(table.c.id == key_id, table.c.tenant == tenant)).first()
    if row is None:
        raise NotFound(f"there is no API key {key_id}")
    if row.revoked_at is None:
        write.sql.execute(sa.update(table).where(table.c.id == key_id).values(revoked_at=write.now))
        feed.append(write, feed.KEY, key_id, None)
        audit.record(write, tenant=tenant, actor=actor, action="key.revoke", subject=key_id, request=request)


def listing(sql: sa.Connection, *, tenant: str) -> list[dict[str, Any]]:
    """A tenant's keys, newest first, without their hashes."""
    table = tables.api_keys
    columns = [c for c in table.c if c.name not in ("hash", "tenant")]
    query = sa.select(*columns).where(table.c.tenant == tenant).order_by(table.c.created_at.desc(), table.c.id)
    return [{**row, "quotas": json.loads(row["quotas"])} for row in sql.execute(query).mappings()]


def any_exists(sql: sa.Connection) -> bool:
    """Whether any key was ever made: False means that nobody can get in yet."""
    return sql.execute(sa.select(tables.api_keys.c.id).limit(1)).first() is not None
