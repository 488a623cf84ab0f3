"""Deployed state: apps, functions, immutable revisions, traffic, and the deployment history.

A deploy is one transaction over rows and feed. Its cost is proportional to the change: a function
with an unchanged spec keeps its revision and adds no feed entry, and other apps are not read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, bulk, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.deployments import releases
from pilotlight.controller.deployments.releases import ReleaseOptions, ReleaseResult, ReleaseStage
from pilotlight.controller.experiments import lifecycle as experiments
from pilotlight.controller.registry import feed_publisher, revisions
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.registry.revisions import RevisionMetadata
from pilotlight.controller.release import app_history
from pilotlight.controller.rollouts import lifecycle as rollouts
from pilotlight.controller.scheduling import schedules
from pilotlight.errors import NotFound
from pilotlight.spec.bound import is_bound_of
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import to_json

_AT_ONCE = ReleaseOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionDeployment:
    """One function after a deploy; `created`: its revision is new; the other fields are those of
    `releases.ReleaseResult`."""

    function: str
    revision: str
    created: bool
    stage: str = ReleaseStage.LIVE.value
    approvals: int = 0
    rollout: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The outcome of a deploy; `removed`: ids of the functions that were removed from the app."""

    app: str
    environment: str
    version: int
    functions: tuple[FunctionDeployment, ...]
    removed: tuple[str, ...] = ()


def deploy(
    write: Write,
    place: AppRef,
    *,
    specs: Sequence[FunctionSpec],
    message: str = "",
    labels: Mapping[str, str] | None = None,
    terms: ReleaseOptions = _AT_ONCE,
    lease_s: float | None = None,
    keep_others: bool = False,
) -> Deployment:
    """Make the app consist of exactly `specs`, released according to `terms`, for as long as its
    lease is renewed (None: until it is deleted). The caller has checked their dependencies.

    `keep_others`: add `specs` to the app, which keeps its other functions and its lease.

    Raises Incompatible, GateFailed, ReleaseFrozen, InvalidInput, without changing anything.
    """
    before = _current(write.sql, place)
    if keep_others:
        version = continue_deployment(write, place)
    else:
        version = app_history.next_version(write, place, stopped=False)
        expires_at = None if lease_s is None else write.now + lease_s
        lease = {"lease_s": lease_s, "expires_at": expires_at}
        write.sql.execute(sa.update(tables.apps).where(*place.is_app()).values(**lease))
    done = tuple(_deploy_function(write, place, spec, terms) for spec in specs)
    named = {spec.name for spec in specs}
    others = set() if keep_others else set(before) - named
    gone = {n for n in others if not any(is_bound_of(n, base) for base in named)}
    removed = _remove(write, place, names=gone)
    after = {d.function: d.revision for d in done}
    app_history.record_version(
        write,
        place,
        version=version,
        action="deploy",
        message=message,
        labels=labels,
        functions=to_json(done),
    )
    record_app_change(
        write,
        place,
        "app.deploy",
        before={"functions": before},
        after={"functions": after, "version": version},
    )
    return Deployment(
        app=place.app,
        environment=place.environment,
        version=version,
        functions=done,
        removed=removed,
    )


def stop(write: Write, place: AppRef) -> int:
    """Stop the app: its functions answer 503 until it is deployed again. Returns the new version.
    Raises NotFound."""
    row_of(write.sql, place)
    version = app_history.next_version(write, place, stopped=True)
    names = _current(write.sql, place)
    for name in names:
        feed_publisher.publish(write, place.function_id(name))
    app_history.record_version(
        write, place, version=version, action="stop", functions=_entries(names)
    )
    record_app_change(write, place, "app.stop", after={"version": version})
    return version


def delete(write: Write, place: AppRef) -> tuple[str, ...]:
    """Remove the app's functions; returns their ids. History and revisions are kept within the
    limits of the plan. Raises NotFound."""
    row_of(write.sql, place)
    names = _current(write.sql, place)
    version = app_history.next_version(write, place)
    removed = _remove(write, place, names=set(names))
    write.sql.execute(sa.update(tables.apps).where(*place.is_app()).values(deleted_at=write.now))
    app_history.record_version(
        write, place, version=version, action="delete", functions=_entries(names)
    )
    record_app_change(write, place, "app.delete", before={"functions": names})
    return removed


def continue_deployment(write: Write, place: AppRef) -> int:
    """Begin a deploy of a part of the app; returns the version of its history entry. A stopped app
    starts again with all its functions."""
    was_stopped = write.sql.execute(
        sa.select(tables.apps.c.stopped).where(*place.is_app())
    ).scalar()
    version = app_history.next_version(write, place, stopped=False)
    if was_stopped:
        for name in _current(write.sql, place):
            feed_publisher.publish(write, place.function_id(name))
    return version


def switch_snapshots(write: Write, place: AppRef, *, function: str, enabled: bool) -> str:
    """Enable or disable snapshots of a function for all revisions; later deploys keep the setting.
    Returns the function's id. Raises NotFound."""
    found = find_function(write.sql, place, function)
    if found.snapshots != enabled:
        write.sql.execute(
            sa.update(tables.functions)
            .where(tables.functions.c.id == found.id)
            .values(snapshots=enabled)
        )
        feed_publisher.publish(write, found.id)
        subject, action = (
            f"{place.environment}/{place.app}/{function}",
            f"snapshots.{'enable' if enabled else 'disable'}",
        )
        audit_trail.record(
            write,
            tenant=place.tenant,
            actor=place.actor,
            action=action,
            subject=subject,
            request=place.request,
        )
    return str(found.id)


def find_function(sql: sa.Connection, place: AppRef, name: str) -> sa.Row[Any]:
    """The row of a deployed function. Raises NotFound."""
    table = tables.functions
    row = sql.execute(
        sa.select(table).where(table.c.id == place.function_id(name), table.c.removed_at.is_(None))
    ).first()
    if row is None:
        raise NotFound(
            f"there is no function {place.app}/{name} in environment {place.environment!r}",
            app=place.app,
            function=name,
        )
    return row


def require_known(sql: sa.Connection, place: AppRef, function: str | None) -> None:
    """Raise NotFound for an app, or a function of it, that was never deployed. Deleted ones are
    accepted."""
    table = tables.functions
    if sql.execute(sa.select(tables.apps.c.name).where(*place.is_app())).first() is None:
        raise _no_app(place.app, place.environment)
    if (
        function
        and sql.execute(
            sa.select(table.c.id).where(table.c.id == place.function_id(function))
        ).first()
        is None
    ):
        raise NotFound(
            f"app {place.app!r} never had a function {function!r}", app=place.app, function=function
        )


def apps(sql: sa.Connection, *, tenant: str, environment: str) -> list[dict[str, Any]]:
    """The apps of an environment, by name, with the number of their functions."""
    table, functions = tables.apps, tables.functions
    count = sa.select(sa.func.count()).where(
        functions.c.tenant == table.c.tenant,
        functions.c.environment == table.c.environment,
        functions.c.app == table.c.name,
        functions.c.removed_at.is_(None),
    )
    columns = (
        table.c.name,
        table.c.version,
        table.c.stopped,
        table.c.created_at,
        table.c.updated_at,
        table.c.expires_at,
    )
    query = sa.select(*columns, count.scalar_subquery().label("functions"))
    query = query.where(
        table.c.tenant == tenant, table.c.environment == environment, table.c.deleted_at.is_(None)
    ).order_by(table.c.name)
    return [dict(row) for row in sql.execute(query).mappings()]


def app(sql: sa.Connection, *, tenant: str, environment: str, name: str) -> dict[str, Any]:
    """One app with its functions, their traffic and specs. Raises NotFound."""
    place = AppRef(tenant=tenant, uid=None, environment=environment, app=name, actor="")
    row = row_of(sql, place)
    out = {
        key: row[key]
        for key in (
            "name",
            "environment",
            "version",
            "stopped",
            "created_at",
            "updated_at",
            "expires_at",
        )
    }
    functions, traffic, revisions, later = (
        tables.functions,
        tables.traffic,
        tables.revisions,
        tables.revisions.alias(),
    )
    newest = (
        sa.select(later.c.name)
        .where(later.c.function == functions.c.id)
        .order_by(later.c.ordinal.desc())
        .limit(1)
        .scalar_subquery()
    )
    query = (
        sa.select(functions, traffic.c.revision, traffic.c.weight, revisions.c.spec)
        .outerjoin(traffic, traffic.c.function == functions.c.id)
        .outerjoin(
            revisions,
            (revisions.c.function == functions.c.id)
            & (revisions.c.name == sa.func.coalesce(traffic.c.revision, newest)),
        )
        .where(*place.in_app(), functions.c.removed_at.is_(None))
        .order_by(functions.c.name, traffic.c.revision)
    )
    found: dict[str, dict[str, Any]] = {}
    for part in sql.execute(query):
        entry = {
            "id": part.id,
            "name": part.name,
            "created_at": part.created_at,
            "snapshots": part.snapshots,
            "traffic": [],
        }
        entry["spec"] = json.loads(part.spec)
        shares = found.setdefault(part.name, entry)["traffic"]
        if part.revision is not None:  # otherwise its first revision is waiting for approval
            shares.append({"revision": part.revision, "weight": part.weight})
    return {**out, "functions": list(found.values())}


def gpus_of(sql: sa.Connection, revisions: Sequence[str]) -> dict[str, int]:
    """Number of accelerators that one instance of each revision holds; `revisions` as nodes name
    them, `<function id>@<revision>`."""
    table = tables.revisions
    names = (revision.partition("@")[::2] for revision in revisions)
    query = sa.select(table.c.function, table.c.name, table.c.spec).where(
        bulk.is_one_of(sql, (table.c.function, table.c.name), names)
    )
    found = {
        f"{row.function}@{row.name}": json.loads(row.spec)["resources"]
        for row in sql.execute(query)
    }
    return {
        revision: max(1, resources["gpu_count"]) if resources["gpu"] else 0
        for revision, resources in found.items()
    }


def place_revision(
    write: Write, place: AppRef, spec: FunctionSpec, *, metadata: RevisionMetadata
) -> tuple[str, bool]:
    """Get or create the function and the revision; returns the revision's name and whether it is
    new."""
    function = place.function_id(spec.name)
    row = {
        "tenant": place.tenant,
        "environment": place.environment,
        "app": place.app,
        "name": spec.name,
    }
    insert = write.insert(tables.functions).values(
        id=function, **row, revisions=0, created_at=write.now
    )
    write.sql.execute(
        insert.on_conflict_do_update(index_elements=["id"], set_={"removed_at": None})
    )
    return revisions.get_or_create(write, function, spec, metadata=metadata)


def publish_unchanged_traffic(
    write: Write, place: AppRef, function: str, done: ReleaseResult
) -> None:
    """Publish a function whose release changed no traffic, so that a stopped one starts again."""
    if done.stage is not ReleaseStage.LIVE:
        feed_publisher.publish(write, place.function_id(function))


def to_function_deployment(
    function: str, revision: str, done: ReleaseResult, *, created: bool
) -> FunctionDeployment:
    """Build the deploy outcome of a function from its release result."""
    stage = done.stage.value
    return FunctionDeployment(
        function=function,
        revision=revision,
        created=created,
        stage=stage,
        approvals=done.approvals,
        rollout=done.rollout,
    )


def _deploy_function(
    write: Write, place: AppRef, spec: FunctionSpec, terms: ReleaseOptions
) -> FunctionDeployment:
    metadata = replace(terms.metadata, author=terms.metadata.author or place.actor)
    revision, created = place_revision(write, place, spec, metadata=metadata)
    done = releases.release(write, place, function=spec.name, revision=revision, terms=terms)
    publish_unchanged_traffic(write, place, spec.name, done)
    return to_function_deployment(spec.name, revision, done, created=created)


def _remove(write: Write, place: AppRef, *, names: set[str]) -> tuple[str, ...]:
    table = tables.functions
    gone = tuple(place.function_id(name) for name in sorted(names))
    for function in gone:
        rollouts.end(write, function, reason="the function was removed")
        experiments.stop(write, function, reason="the function was removed")
        schedules.sync_schedules(write, function, None)
        write.sql.execute(sa.delete(tables.traffic).where(tables.traffic.c.function == function))
        write.sql.execute(
            sa.update(table).where(table.c.id == function).values(removed_at=write.now)
        )
        feed_publisher.withdraw(write, function)
    return gone


def _current(sql: sa.Connection, place: AppRef) -> dict[str, str]:
    """Current functions of the app with their revision of most traffic; "" for one whose first
    revision is waiting for approval."""
    functions, traffic = tables.functions, tables.traffic
    query = sa.select(functions.c.name, traffic.c.revision).outerjoin(
        traffic, traffic.c.function == functions.c.id
    )
    query = query.where(*place.in_app(), functions.c.removed_at.is_(None)).order_by(
        functions.c.name, traffic.c.weight
    )
    return {row.name: row.revision or "" for row in sql.execute(query)}


def row_of(sql: sa.Connection, place: AppRef) -> sa.RowMapping:
    """The row of an app that is not deleted. Raises NotFound."""
    row = (
        sql.execute(
            sa.select(tables.apps).where(*place.is_app(), tables.apps.c.deleted_at.is_(None))
        )
        .mappings()
        .first()
    )
    if row is None:
        raise _no_app(place.app, place.environment)
    return row


def _no_app(name: str, environment: str) -> NotFound:
    return NotFound(
        f"there is no app {name!r} in environment {environment!r}",
        app=name,
        environment=environment,
    )


def _entries(names: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"function": name, "revision": revision, "created": False}
        for name, revision in names.items()
    ]


def function_names(sql: sa.Connection, place: AppRef) -> list[str]:
    """Names of the app's functions, sorted."""
    table = tables.functions
    query = (
        sa.select(table.c.name)
        .where(*place.in_app(), table.c.removed_at.is_(None))
        .order_by(table.c.name)
    )
    return list(sql.execute(query).scalars())


def record_app_change(
    write: Write, place: AppRef, action: str, *, before: Any = None, after: Any = None
) -> None:
    """Record a change of the app in the audit log."""
    named = {
        "tenant": place.tenant,
        "actor": place.actor,
        "subject": place.subject,
        "request": place.request,
    }
    audit_trail.record(write, **named, action=action, before=before, after=after)
