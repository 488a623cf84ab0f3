"""Publication of functions to the change feed that activators read, built from the tables in the
transaction that changed them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import feed, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.database.tables.releases import ACTIVE_ROLLOUT_STATES
from pilotlight.controller.registry import launch_spec, revisions
from pilotlight.controller.scheduling import schedules
from pilotlight.errors import NotFound, TooLarge
from pilotlight.spec import traffic
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import canonical_json, from_json
from pilotlight.spec.traffic import TrafficDocument

STABLE, CANDIDATE = "stable", "candidate"
"""Aliases managed by the platform: the serving revision, and the candidate of a rollout."""

MAX_ROUTE_BYTES = 4 * 1024 * 1024
"""Maximum size of one function's route: activators parse it on their event loops, which takes some
20 milliseconds per MiB. With 256 callable revisions, each has 16 KiB, several times the size of a
spec with schemas."""
MOVED_BYTES, MOVED_TOTAL_BYTES = 1024, 65_536
"""How much one change, and all changes together, may exceed the maximum, so that a few bytes of
weights do not prevent a traffic change, above all a rollback."""


def publish(write: Write, function: str) -> None:
    """Publish the current route of a function that has traffic. `function` is its id. Raises
    TooLarge."""
    functions, apps, tenants = tables.functions, tables.apps, tables.tenants
    same_app = (
        (apps.c.tenant == functions.c.tenant)
        & (apps.c.environment == functions.c.environment)
        & (apps.c.name == functions.c.app)
    )
    query = (
        sa.select(functions, apps.c.stopped, tenants.c.uid)
        .join(apps, same_app)
        .join(tenants, tenants.c.id == functions.c.tenant)
    )
    row = write.sql.execute(query.where(functions.c.id == function)).one()
    document = traffic_document(write.sql, function)
    if not document.weights:
        return  # its first revision is still waiting for approval
    document = replace(
        document,
        tags={
            **stored_aliases(write.sql, function),
            **reserved_aliases(write.sql, document),
            **document.tags,
        },
    )
    specs = _specs(write.sql, function, document.kept())
    named = {secret for spec in specs.values() for secret in spec.secrets}
    route = launch_spec.function_route(
        tenant=row.tenant,
        uid=row.uid,
        environment=row.environment,
        app=row.app,
        function=row.name,
        document=document,
        specs=specs,
        stopped=row.stopped,
        snapshots=row.snapshots,
        variables=_variables(
            write.sql, tenant=row.tenant, environment=row.environment, names=named
        ),
    )
    _check_size(write.sql, row, route, revisions=len(specs))
    feed.append(write, feed.FUNCTION, _key(row), route)
    schedules.sync_schedules(write, function, None if row.stopped else specs[document.heaviest()])


def _check_size(sql: sa.Connection, row: sa.Row[Any], route: Any, *, revisions: int) -> None:
    """Raise TooLarge for a route over the limit. One that was over it before may shrink."""
    size_bytes = len(canonical_json(route))
    if size_bytes <= MAX_ROUTE_BYTES:
        return
    known_bytes = feed.size_bytes(sql, feed.FUNCTION, _key(row))
    if size_bytes > max(
        known_bytes, min(known_bytes + MOVED_BYTES, MAX_ROUTE_BYTES + MOVED_TOTAL_BYTES)
    ):
        name = f"{row.app}/{row.name}"
        raise TooLarge(
            f"{name} would have {revisions} callable revisions with {size_bytes} bytes of "
            f"specs: the maximum is {MAX_ROUTE_BYTES}. "
            f"Remove tags and aliases (`pilotlight traffic show {name}` lists them), or use "
            f"smaller schemas",
            limit_bytes=MAX_ROUTE_BYTES,
        )


def traffic_document(sql: sa.Connection, function: str) -> TrafficDocument:
    """A function's stored traffic; its rows are authoritative for the weights. Raises NotFound."""
    functions, table = tables.functions, tables.traffic
    row = sql.execute(
        sa.select(functions.c.document, functions.c.generation).where(functions.c.id == function)
    ).first()
    if row is None:
        raise NotFound(f"there is no function {function}", function=function)
    rows = sql.execute(
        sa.select(table.c.revision, table.c.weight)
        .where(table.c.function == function)
        .order_by(table.c.revision)
    )
    weights = {row.revision: row.weight for row in rows if row.weight}
    if not weights:
        return TrafficDocument(salt=function, generation=row.generation)
    stored = replace(
        traffic.from_json(json.loads(row.document)), generation=row.generation, salt=function
    )
    return (
        stored
        if stored.weights == weights and stored.segments
        else traffic.with_weights(stored, weights)
    )


def stored_aliases(sql: sa.Connection, function: str) -> dict[str, str]:
    """A function's aliases: name → revision."""
    table = tables.aliases
    rows = sql.execute(
        sa.select(table.c.name, table.c.revision).where(table.c.function == function)
    )
    return {row.name: row.revision for row in rows}


def reserved_aliases(sql: sa.Connection, document: TrafficDocument) -> dict[str, str]:
    """The platform's own aliases: `stable` is the revision that serves, or that a rollout reverts
    to; `candidate` is the revision that an active rollout introduces."""
    rollouts = tables.rollouts
    candidate = sql.execute(
        sa.select(rollouts.c.candidate).where(
            rollouts.c.function == document.salt, rollouts.c.state.in_(ACTIVE_ROLLOUT_STATES)
        )
    ).scalar()
    return {
        STABLE: document.stable or document.heaviest(),
        **({CANDIDATE: candidate} if candidate is not None else {}),
    }


def withdraw(write: Write, function: str) -> None:
    """Publish the removal of a function. A later function of that name starts without its tags,
    pins and experiments."""
    row = write.sql.execute(
        sa.select(tables.functions).where(tables.functions.c.id == function)
    ).one()
    write.sql.execute(
        sa.update(tables.functions).where(tables.functions.c.id == function).values(document="{}")
    )
    feed.append(write, feed.FUNCTION, _key(row), None)
    schedules.sync_schedules(write, function, None)


def functions_using_secret(
    sql: sa.Connection, *, tenant: str, environment: str, name: str
) -> dict[str, str]:
    """Functions (id → `app/function`) with a callable revision that uses the secret."""
    functions, revisions = tables.functions, tables.revisions
    query = (
        sa.select(
            functions.c.id,
            functions.c.app,
            functions.c.name,
            revisions.c.name.label("revision"),
            revisions.c.spec,
        )
        .join(revisions, revisions.c.function == functions.c.id)
        .where(
            functions.c.tenant == tenant,
            functions.c.environment == environment,
            functions.c.removed_at.is_(None),
        )
        # a prefilter in the database; the next lines decide
        .where(revisions.c.spec.contains(f'"{name}"', autoescape=True))
    )
    found: dict[str, str] = {}
    for row in sql.execute(query):
        if (
            row.id not in found
            and name in json.loads(row.spec)["secrets"]
            and row.revision in _callable(sql, row.id)
        ):
            found[row.id] = f"{row.app}/{row.name}"
    return found


def _callable(sql: sa.Connection, function: str) -> frozenset[str]:
    return traffic_document(sql, function).kept() | frozenset(
        stored_aliases(sql, function).values()
    )


def _specs(sql: sa.Connection, function: str, names: Collection[str]) -> dict[str, FunctionSpec]:
    table = tables.revisions
    columns = (table.c.name, table.c.spec, table.c.pruned_at)
    rows = sql.execute(
        sa.select(*columns).where(table.c.function == function, table.c.name.in_(names))
    ).all()
    for row in rows:
        revisions.require_blobs(row)
    return {row.name: from_json(FunctionSpec, json.loads(row.spec)) for row in rows}


def _variables(
    sql: sa.Connection, *, tenant: str, environment: str, names: Iterable[str]
) -> Mapping[str, list[str]]:
    wanted = sorted(names)
    if not wanted:
        return {}
    table = tables.secrets
    query = sa.select(table.c.name, table.c.variables)
    rows = sql.execute(
        query.where(
            table.c.tenant == tenant, table.c.environment == environment, table.c.name.in_(wanted)
        )
    )
    return {row.name: json.loads(row.variables) for row in rows}


def _key(row: sa.Row[tuple[object, ...]]) -> str:
    return f"{row.tenant}/{row.environment}/{row.app}/{row.name}"
