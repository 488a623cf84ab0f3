"""What activators are told of a function: read from the tables, in the transaction that changed them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import sqlalchemy as sa

from pilotlight.controller import feed, launch, tables
from pilotlight.controller.store import Write
from pilotlight.spec import FunctionSpec, from_json


def publish(write: Write, function: str) -> None:
    """Feed the route of a function that has traffic, as the tables say it now. `function` is its id."""
    functions, apps, tenants = tables.functions, tables.apps, tables.tenants
    same_app = (apps.c.tenant == functions.c.tenant) & (apps.c.environment == functions.c.environment) & (apps.c.name == functions.c.app)
    query = sa.select(functions, apps.c.stopped, tenants.c.uid).join(apps, same_app).join(tenants, tenants.c.id == functions.c.tenant)
    row = write.sql.execute(query.where(functions.c.id == function)).one()
    traffic, specs = _traffic(write.sql, function)
    named = {secret for spec in specs.values() for secret in spec.secrets}
    route = launch.route(
        tenant=row.tenant,
        uid=row.uid,
        environment=row.environment,
        app=row.app,
        function=row.name,
        traffic=traffic,
        specs=specs,
        stopped=row.stopped,
        snapshots=row.snapshots,
        variables=_variables(write.sql, tenant=row.tenant, environment=row.environment, names=named),
    )
    feed.append(write, feed.FUNCTION, _key(row), route)


def withdraw(write: Write, function: str) -> None:
    """Tell that a function is gone."""
    row = write.sql.execute(sa.select(tables.functions).where(tables.functions.c.id == function)).one()
    feed.append(write, feed.FUNCTION, _key(row), None)


def users_of_secret(sql: sa.Connection, *, tenant: str, environment: str, name: str) -> dict[str, str]:
    """Functions (id → `app/function`) with a revision in traffic that names the secret."""
    functions, traffic, revisions = tables.functions, tables.traffic, tables.revisions
    query = (
        sa.select(functions.c.id, functions.c.app, functions.c.name, revisions.c.spec)
        .join(traffic, traffic.c.function == functions.c.id)
        .join(revisions, (revisions.c.function == traffic.c.function) & (revisions.c.name == traffic.c.revision))
        .where(functions.c.tenant == tenant, functions.c.environment == environment, functions.c.removed_at.is_(None))
        .where(revisions.c.spec.contains(f'"{name}"', autoescape=True))  # narrows in the database; the next line decides
    )
    return {row.id: f"{row.app}/{row.name}" for row in sql.execute(query) if name in json.loads(row.spec)["secrets"]}


def _traffic(sql: sa.Connection, function: str) -> tuple[list[tuple[str, int]], dict[str, FunctionSpec]]:
    traffic, revisions = tables.traffic, tables.revisions
    query = (
        sa.select(traffic.c.revision, traffic.c.weight, revisions.c.spec)
        .join(revisions, (revisions.c.function == traffic.c.function) & (revisions.c.name == traffic.c.revision))
        .where(traffic.c.function == function)
        .order_by(traffic.c.revision)
    )
    rows = sql.execute(query).all()
    return [(row.revision, row.weight) for row in rows], {row.revision: from_json(FunctionSpec, json.loads(row.spec)) for row in rows}


def _variables(sql: sa.Connection, *, tenant: str, environment: str, names: Iterable[str]) -> Mapping[str, list[str]]:
    wanted = sorted(names)
    if not wanted:
        return {}
    table = tables.secrets
    query = sa.select(table.c.name, table.c.variables)
    rows = sql.execute(query.where(table.c.tenant == tenant, table.c.environment == environment, table.c.name.in_(wanted)))
    return {row.name: json.loads(row.variables) for row in rows}


def _key(row: sa.Row[tuple[object, ...]]) -> str:
    return f"{row.tenant}/{row.environment}/{row.app}/{row.name}"
