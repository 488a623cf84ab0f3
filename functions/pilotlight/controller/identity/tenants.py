"""Tenants, their plans and their environments."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, feed, retention, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity import access_control
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.identity.tenant_plan import (
    DEFAULT_TENANT_PLAN,
    TenantPlan,
    tenant_plan_of,
)
from pilotlight.core.settings import SettingsInvalid
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.protocol import TenantRecord
from pilotlight.spec.identifiers import DEFAULT_ENVIRONMENT, require_name
from pilotlight.spec.quotas import BUILT_IN_PLANS, Plan
from pilotlight.spec.record_json import canonical_json, to_json

MAX_ENVIRONMENTS = 100
"""Environments per tenant. It also bounds per tenant what is limited per environment (webhooks)."""


def create(
    write: Write,
    *,
    name: str,
    uid_base: int | None,
    actor: str,
    request: str = "",
    terms: TenantPlan = DEFAULT_TENANT_PLAN,
) -> TenantRecord:
    """Create a tenant with its environment `main`, and with its own uid if `uid_base` is given.
    Raises InvalidInput, Conflict."""
    require_name("tenant", name, parameter="name")
    table = tables.tenants
    same = sa.select(table.c.deleted_at).where(table.c.name == name)
    if (known := write.sql.execute(same).first()) is not None:
        if known.deleted_at is not None:
            raise Conflict(
                f"tenant {name!r} was deleted: its name stays with its invoices; choose another one"
            )
        raise Conflict(f"tenant {name!r} already exists")
    tenant = f"t-{secrets.token_hex(6)}"
    uid = None if uid_base is None else _next_uid(write, uid_base)
    overrides = canonical_json(dict(terms.overrides)).decode()
    terms.resolve()
    write.sql.execute(
        sa.insert(table).values(
            id=tenant,
            name=name,
            uid=uid,
            created_at=write.now,
            plan=terms.plan,
            overrides=overrides,
        )
    )
    record = publish(write, tenant, plans=terms.plans)
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="tenant.create",
        subject=name,
        after=to_json(record),
        request=request,
    )
    create_environment(write, tenant=tenant, name=DEFAULT_ENVIRONMENT, actor=actor, request=request)
    return record


def assign_uids(
    write: Write, *, uid_base: int, plans: Mapping[str, Plan] = BUILT_IN_PLANS
) -> list[str]:
    """Assign a uid to each tenant that has none, because the platform ran without root before;
    return their ids.

    The launch documents of functions deployed before contain no uid, so the node rejects them until
    they are deployed again."""
    table = tables.tenants
    without = list(
        write.sql.execute(
            sa.select(table.c.id).where(table.c.uid.is_(None)).order_by(table.c.created_at)
        ).scalars()
    )
    for tenant in without:
        write.sql.execute(
            sa.update(table).where(table.c.id == tenant).values(uid=_next_uid(write, uid_base))
        )
        publish(write, tenant, plans=plans)
    return [str(tenant) for tenant in without]


def change(
    write: Write,
    *,
    name: str,
    terms: TenantPlan,
    suspended: bool | None = None,
    actor: str,
    request: str = "",
) -> TenantRecord:
    """Set a tenant's plan, and suspend or resume it (None: unchanged). Raises NotFound,
    InvalidInput, Conflict."""
    row = find_existing(write.sql, name=name)
    if suspended and name == access_control.PLATFORM_TENANT:
        raise Conflict(
            f"tenant {name!r} operates the platform and cannot be suspended: no other tenant could "
            f"resume it",
            tenant=name,
        )
    terms.resolve()
    since = (
        row.suspended_at
        if suspended is None
        else (row.suspended_at or write.now)
        if suspended
        else None
    )
    values = {
        "plan": terms.plan,
        "overrides": canonical_json(dict(terms.overrides)).decode(),
        "suspended_at": since,
    }
    before = {
        "plan": row.plan,
        "overrides": json.loads(row.overrides),
        "suspended": row.suspended_at is not None,
    }
    write.sql.execute(
        sa.update(tables.tenants).where(tables.tenants.c.id == row.id).values(**values)
    )
    after = {"plan": terms.plan, "overrides": dict(terms.overrides), "suspended": since is not None}
    audit_trail.record(
        write,
        tenant=row.id,
        actor=actor,
        action="tenant.change",
        subject=name,
        before=before,
        after=after,
        request=request,
    )
    return publish(write, row.id, plans=terms.plans)


def publish(write: Write, tenant: str, *, plans: Mapping[str, Plan]) -> TenantRecord:
    """Publish a tenant in the feed: its plan with overrides, and whether it is suspended or
    deleted."""
    row = write.sql.execute(sa.select(tables.tenants).where(tables.tenants.c.id == tenant)).one()
    plan = tenant_plan_of(row, plans).resolve().to_json()
    record = TenantRecord(
        id=row.id,
        name=row.name,
        uid=row.uid,
        plan=plan,
        suspended=row.suspended_at is not None,
        deleted=row.deleted_at is not None,
    )
    value = to_json(record)
    if not record.deleted:
        del value["deleted"]  # activators before version 0029 do not know it
    feed.append(write, feed.TENANT, row.id, value)
    return record


def publish_all(write: Write, *, plans: Mapping[str, Plan]) -> None:
    """Publish every tenant, because plans in platform.yaml may have changed. Raises SettingsInvalid
    naming the tenant."""
    for row in write.sql.execute(sa.select(tables.tenants.c.id, tables.tenants.c.name)).all():
        try:
            publish(write, row.id, plans=plans)
        except InvalidInput as e:
            raise SettingsInvalid(f"plans: tenant {row.name!r}: {e}") from e


def find(sql: sa.Connection, *, name: str) -> sa.Row[Any]:
    """Return a tenant's row by its name, also of one that is deleted. Raises NotFound."""
    row = sql.execute(sa.select(tables.tenants).where(tables.tenants.c.name == name)).first()
    if row is None:
        raise NotFound(f"there is no tenant {name!r}", tenant=name)
    return row


def find_existing(sql: sa.Connection, *, name: str) -> sa.Row[Any]:
    """Return a tenant's row by its name. Raises NotFound; Conflict for one that is deleted."""
    row = find(sql, name=name)
    if row.deleted_at is not None:
        raise Conflict(f"tenant {name!r} is deleted: nothing of it can be changed", tenant=name)
    return row


def resolve_tenant(sql: sa.Connection, caller: Principal, *, name: str | None) -> str:
    """Return the id of the tenant that a request is about: the caller's own, or the named one for
    platform administrators.

    Raises Forbidden, NotFound.
    """
    if name in (None, caller.tenant_name):
        return caller.tenant
    caller.require_platform()
    return str(find(sql, name=str(name)).id)


def get(sql: sa.Connection, *, tenant: str) -> sa.Row[Any]:
    """Return a tenant's row by its id."""
    return sql.execute(sa.select(tables.tenants).where(tables.tenants.c.id == tenant)).one()


def all_tenants(sql: sa.Connection) -> list[dict[str, Any]]:
    """Return all tenants, oldest first."""
    return [
        dict(row)
        for row in sql.execute(
            sa.select(tables.tenants).order_by(tables.tenants.c.created_at)
        ).mappings()
    ]


def unknown_names(sql: sa.Connection, names: Collection[str]) -> set[str]:
    """Return those of `names` that no tenant has."""
    if not names:
        return set()
    return set(names) - set(
        sql.execute(
            sa.select(tables.tenants.c.name).where(
                tables.tenants.c.name.in_(names), tables.tenants.c.deleted_at.is_(None)
            )
        ).scalars()
    )


def create_environment(
    write: Write, *, tenant: str, name: str, actor: str, request: str = ""
) -> dict[str, Any]:
    """Create an empty environment. Raises InvalidInput; Conflict if it exists or there are too
    many."""
    require_name("environment", name, parameter="name")
    if has_environment(write.sql, tenant=tenant, name=name):
        raise Conflict(f"environment {name!r} already exists")
    if len(environments(write.sql, tenant=tenant)) >= MAX_ENVIRONMENTS:
        raise Conflict(
            f"this tenant has {MAX_ENVIRONMENTS} environments, which is the maximum",
            hint="Delete one: `pilotlight environment delete NAME`.",
        )
    write.sql.execute(
        sa.insert(tables.environments).values(tenant=tenant, name=name, created_at=write.now)
    )
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="environment.create",
        subject=name,
        request=request,
    )
    return {"name": name, "created_at": write.now}


def environments(sql: sa.Connection, *, tenant: str) -> list[dict[str, Any]]:
    """Return a tenant's environments by name."""
    table = tables.environments
    query = (
        sa.select(table.c.name, table.c.created_at)
        .where(table.c.tenant == tenant)
        .order_by(table.c.name)
    )
    return [dict(row) for row in sql.execute(query).mappings()]


def has_environment(sql: sa.Connection, *, tenant: str, name: str) -> bool:
    """Whether the environment exists."""
    table = tables.environments
    return (
        sql.execute(
            sa.select(table.c.name).where(table.c.tenant == tenant, table.c.name == name)
        ).first()
        is not None
    )


def require_environment(sql: sa.Connection, *, tenant: str, name: str) -> None:
    """Raise NotFound, with the command that creates it, if the environment does not exist."""
    if not has_environment(sql, tenant=tenant, name=name):
        raise NotFound(
            f"environment {name!r} does not exist; create it with: pilotlight environment create "
            f"{name}",
            environment=name,
        )


def delete_environment(
    write: Write, *, tenant: str, name: str, actor: str, request: str = ""
) -> None:
    """Delete an environment, its history, its secrets, and the keys bound to it.

    Raises NotFound, or Conflict for `main` and while apps are deployed in it.
    """
    if name == DEFAULT_ENVIRONMENT:
        raise Conflict(f"environment {name!r} is the default one and cannot be deleted")
    require_environment(write.sql, tenant=tenant, name=name)
    apps = tables.apps
    inside = (apps.c.tenant == tenant) & (apps.c.environment == name)
    left = (
        write.sql.execute(
            sa.select(apps.c.name)
            .where(inside, apps.c.deleted_at.is_(None))
            .order_by(apps.c.name)
            .limit(5)
        )
        .scalars()
        .all()
    )
    if left:
        raise Conflict(
            f"environment {name!r} still has apps ({', '.join(left)}): delete them first",
            apps=list(left),
        )
    _require_no_storage(write.sql, tenant=tenant, name=name)
    _delete_rows(write, tenant=tenant, name=name)
    audit_trail.record(
        write,
        tenant=tenant,
        actor=actor,
        action="environment.delete",
        subject=name,
        request=request,
    )


def _require_no_storage(sql: sa.Connection, *, tenant: str, name: str) -> None:
    """Raise Conflict while an environment has volumes, or dicts or queues."""
    for what, table in (
        ("volumes", tables.volumes),
        ("dicts or queues", tables.collections),
    ):
        inside = (table.c.tenant == tenant) & (table.c.environment == name)
        left = sql.execute(sa.select(table.c.name).where(inside).order_by(table.c.name).limit(5))
        if names := left.scalars().all():
            raise Conflict(
                f"environment {name!r} still has {what} ({', '.join(names)}): delete them first",
                left=list(names),
            )


def _delete_rows(write: Write, *, tenant: str, name: str) -> None:
    sql, keys, secret = write.sql, tables.api_keys, tables.secrets
    bound = (keys.c.tenant == tenant) & (keys.c.environment == name) & (keys.c.revoked_at.is_(None))
    for key_id in (
        sql.execute(sa.update(keys).where(bound).values(revoked_at=write.now).returning(keys.c.id))
        .scalars()
        .all()
    ):
        feed.append(write, feed.KEY, key_id, None)
    held = (secret.c.tenant == tenant) & (secret.c.environment == name)
    for secret_name in (
        sql.execute(sa.delete(secret).where(held).returning(secret.c.name)).scalars().all()
    ):
        feed.append(write, feed.SECRET, f"{tenant}/{name}/{secret_name}", None)
    bounded = tables.function_quotas
    of_it = (bounded.c.tenant == tenant) & (bounded.c.environment == name)
    for row in sql.execute(
        sa.delete(bounded).where(of_it).returning(bounded.c.app, bounded.c.function)
    ).all():
        feed.append(write, feed.QUOTA, f"{tenant}/{name}/{row.app}/{row.function}", None)
    functions = tables.functions
    ids = sa.select(functions.c.id).where(
        functions.c.tenant == tenant, functions.c.environment == name
    )
    retention.delete_functions(sql, sql.execute(ids).scalars().all())
    logs = tables.prediction_files  # the janitor deletes their objects, then the rows
    sql.execute(
        sa.update(logs)
        .where(logs.c.tenant == tenant, logs.c.environment == name, logs.c.expires_at > write.now)
        .values(expires_at=write.now)
    )
    files, batches, lines = tables.batch_files, tables.batches, tables.batch_lines
    sql.execute(  # as above
        sa.update(files)
        .where(files.c.tenant == tenant, files.c.environment == name)
        .values(expires_at=write.now)
    )
    theirs = sa.select(batches.c.id).where(
        batches.c.tenant == tenant, batches.c.environment == name
    )
    sql.execute(sa.delete(lines).where(lines.c.batch.in_(theirs)))
    for owned in (
        tables.batches,
        tables.deployments,
        tables.apps,
        tables.container_images,
        tables.weights,
        tables.webhooks,
        tables.traces,
    ):
        sql.execute(sa.delete(owned).where(owned.c.tenant == tenant, owned.c.environment == name))
    sql.execute(
        sa.delete(tables.environments).where(
            tables.environments.c.tenant == tenant, tables.environments.c.name == name
        )
    )


def _next_uid(write: Write, uid_base: int) -> int:
    highest = write.sql.execute(sa.select(sa.func.max(tables.tenants.c.uid))).scalar_one()
    return uid_base if highest is None else max(uid_base, int(highest) + 1)
