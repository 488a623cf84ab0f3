"""Tenants and their environments."""

from __future__ import annotations

import secrets
from typing import Any

import sqlalchemy as sa

from pilotlight.controller import audit, feed, tables
from pilotlight.controller.store import Write
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.protocol import TenantRecord
from pilotlight.spec import to_json
from pilotlight.types import DEFAULT_ENVIRONMENT, check_name


def create(write: Write, *, name: str, uid_base: int | None, actor: str, request: str = "") -> TenantRecord:
    """A tenant with its environment `main`, and with a uid of its own where `uid_base` is given. Raises InvalidInput, Conflict."""
    _named("tenant", name)
    table = tables.tenants
    if write.sql.execute(sa.select(table.c.id).where(table.c.name == name)).first():
        raise Conflict(f"a tenant named {name!r} exists")
    uid = None
    if uid_base is not None:
        highest = write.sql.execute(sa.select(sa.func.max(table.c.uid))).scalar_one()
        uid = uid_base if highest is None else max(uid_base, int(highest) + 1)
    tenant = TenantRecord(id=f"t-{secrets.token_hex(6)}", name=name, uid=uid)
    write.sql.execute(sa.insert(table).values(id=tenant.id, name=name, uid=uid, created_at=write.now))
    feed.append(write, feed.TENANT, tenant.id, to_json(tenant))
    audit.record(write, tenant=tenant.id, actor=actor, action="tenant.create", subject=name, after=to_json(tenant), request=request)
    create_environment(write, tenant=tenant.id, name=DEFAULT_ENVIRONMENT, actor=actor, request=request)
    return tenant


def give_uids(write: Write, *, uid_base: int) -> list[str]:
    """Give tenants of a platform that ran without root a uid of their own, now that there is root; returns their ids.

    Functions deployed before name no uid in their launch, and the node refuses them until they are deployed again.
    """
    table = tables.tenants
    without = list(write.sql.execute(sa.select(table.c.id, table.c.name).where(table.c.uid.is_(None)).order_by(table.c.created_at)))
    for row in without:
        highest = write.sql.execute(sa.select(sa.func.max(table.c.uid))).scalar_one()
        uid = uid_base if highest is None else max(uid_base, int(highest) + 1)
        write.sql.execute(sa.update(table).where(table.c.id == row.id).values(uid=uid))
        feed.append(write, feed.TENANT, row.id, to_json(TenantRecord(id=row.id, name=row.name, uid=uid)))
    return [str(row.id) for row in without]


def all_tenants(sql: sa.Connection) -> list[dict[str, Any]]:
    """Every tenant, oldest first."""
    return [dict(row) for row in sql.execute(sa.select(tables.tenants).order_by(tables.tenants.c.created_at)).mappings()]


def count(sql: sa.Connection) -> int:
    """How many tenants there are."""
    return int(sql.execute(sa.select(sa.func.count()).select_from(tables.tenants)).scalar_one())


def create_environment(write: Write, *, tenant: str, name: str, actor: str, request: str = "") -> dict[str, Any]:
    """A new, empty environment. Raises InvalidInput, Conflict."""
    _named("environment", name)
    if has_environment(write.sql, tenant=tenant, name=name):
        raise Conflict(f"environment {name!r} exists")
    write.sql.execute(sa.insert(tables.environments).values(tenant=tenant, name=name, created_at=write.now))
    audit.record(write, tenant=tenant, actor=actor, action="environment.create", subject=name, request=request)
    return {"name": name, "created_at": write.now}


def environments(sql: sa.Connection, *, tenant: str) -> list[dict[str, Any]]:
    """A tenant's environments, by name."""
    table = tables.environments
    query = sa.select(table.c.name, table.c.created_at).where(table.c.tenant == tenant).order_by(table.c.name)
    return [dict(row) for row in sql.execute(query).mappings()]


def has_environment(sql: sa.Connection, *, tenant: str, name: str) -> bool:
    """Whether the environment exists."""
    table = tables.environments
    return sql.execute(sa.select(table.c.name).where(table.c.tenant == tenant, table.c.name == name)).first() is not None


def demand_environment(sql: sa.Connection, *, tenant: str, name: str) -> None:
    """Raise NotFound, with the way out, when the environment does not exist."""
    if not has_environment(sql, tenant=tenant, name=name):
        raise NotFound(f"environment {name!r} does not exist; create it with: pilotlight environment create {name}", environment=name)


def delete_environment(write: Write, *, tenant: str, name: str, actor: str, request: str = "") -> None:
    """Remove an environment, its history, its secrets, and the keys bound to it.

    Raises NotFound, or Conflict for `main` and while apps are deployed in it.
    """
    if name == DEFAULT_ENVIRONMENT:
        raise Conflict(f"environment {name!r} is the default one and stays")
    demand_environment(write.sql, tenant=tenant, name=name)
    apps = tables.apps
    inside = (apps.c.tenant == tenant) & (apps.c.environment == name)
    left = (
        write.sql.execute(sa.select(apps.c.name).where(inside, apps.c.deleted_at.is_(None)).order_by(apps.c.name).limit(5)).scalars().all()
    )
    if left:
        raise Conflict(f"environment {name!r} still has apps ({', '.join(left)}): delete them first", apps=list(left))
    _forget(write, tenant=tenant, name=name)
    audit.record(write, tenant=tenant, actor=actor, action="environment.delete", subject=name, request=request)


def _forget(write: Write, *, tenant: str, name: str) -> None:
    sql, keys, secret = write.sql, tables.api_keys, tables.secrets
    bound = (keys.c.tenant == tenant) & (keys.c.environment == name) & (keys.c.revoked_at.is_(None))
    for key_id in sql.execute(sa.update(keys).where(bound).values(revoked_at=write.now).returning(keys.c.id)).scalars().all():
        feed.append(write, feed.KEY, key_id, None)
    held = (secret.c.tenant == tenant) & (secret.c.environment == name)
    for secret_name in sql.execute(sa.delete(secret).where(held).returning(secret.c.name)).scalars().all():
        feed.append(write, feed.SECRET, f"{tenant}/{name}/{secret_name}", None)
    functions = tables.functions
    ids = sa.select(functions.c.id).where(functions.c.tenant == tenant, functions.c.environment == name)
    for table in (tables.traffic, tables.revisions):
        sql.execute(sa.delete(table).where(table.c.function.in_(ids)))
    for owned in (functions, tables.deployments, tables.apps, tables.weights):
        sql.execute(sa.delete(owned).where(owned.c.tenant == tenant, owned.c.environment == name))
    sql.execute(sa.delete(tables.environments).where(tables.environments.c.tenant == tenant, tables.environments.c.name == name))


def _named(kind: str, name: str) -> None:
    try:
        check_name(kind, name)
    except ValueError as e:
        raise InvalidInput(str(e), parameter="name") from e
