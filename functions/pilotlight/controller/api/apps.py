"""Routes for deploying, listing, stopping, deleting and pruning apps."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Path, Query, Response
from pydantic import Field

from pilotlight.controller import (
    garbage,
    guards,
    holdings,
    prices,
    publishing,
    references,
    registry,
    tenants,
    weights,
)
from pilotlight.controller import history as histories
from pilotlight.controller.access import Principal
from pilotlight.controller.api import models
from pilotlight.controller.api.models import Body
from pilotlight.controller.context import ROOM, Context, Ctx, Deployer, RequestId, place
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.releases import Terms
from pilotlight.controller.revisions import Told
from pilotlight.controller.rollouts import plan
from pilotlight.controller.store import Write
from pilotlight.controller.stored import accounting, deletion, pruning
from pilotlight.errors import InvalidInput
from pilotlight.spec import to_json
from pilotlight.types import Scope
from snapshotter.errors import SnapshotterError

router = APIRouter(prefix="/v1/apps", tags=["apps"])
AppName = Annotated[str, Path(max_length=63)]


class PruneRequest(Body):
    """How many of the newest revisions of each function to keep."""

    keep: int = Field(default=10, ge=1, le=100_000)
    dry_run: bool = False


class PruneResponse(Body):
    """The number of pruned revisions, and the bytes that no longer count towards the tenant's
    storage. With `dry_run`, nothing was changed."""

    revisions: int
    freed_bytes: int
    dry_run: bool


@router.post("/{app}/deploy", dependencies=[ROOM])
async def deploy(
    context: Ctx, caller: Deployer, request: RequestId, app: AppName, body: models.DeployRequest
) -> models.DeployResponse:
    """Replace the app's functions with exactly these functions, in one transaction."""
    caller.demand_app(app)
    if body.override_freeze:
        caller.require_scope(Scope.ADMIN)
    done, unpinned = await context.threads.run(
        caller.tenant, _deploy, context, caller, request=request, app=app, body=body
    )
    await garbage.forget(context.agent, done.removed)
    await holdings.settle(context.cache, context.store, unpinned)
    context.metrics.deploys.inc()
    answer = to_json(done)
    del answer["removed"]
    return models.DeployResponse(**answer)


def _deploy(
    context: Context, caller: Principal, *, request: str, app: str, body: models.DeployRequest
) -> tuple[registry.Deployment, list[str]]:
    specs = references.parse(app, body.functions)
    references.check_rungs(caller, app=app, specs=specs)
    references.check_egress(specs, context.config.egress)
    with context.store.read() as sql:
        manifests = references.check_weights(sql, context.files, tenant=caller.tenant, specs=specs)

    def make(write: Write) -> tuple[registry.Deployment, list[str]]:
        tenants.demand_environment(write.sql, tenant=caller.tenant, name=caller.environment)
        references.check_access(write.sql, specs)
        if any(spec.resources.gpu for spec in specs):
            references.check_prices(
                specs, prices.of_tenant(write.sql, context.config, caller.tenant)
            )
        references.check(
            write.sql,
            tenant=caller.tenant,
            environment=caller.environment,
            specs=specs,
            manifests=manifests,
            bundle_max_bytes=context.config.settings.bundle_max_bytes,
        )
        where = place(caller, app, request)
        is_bound = caller.bound_app is not None
        unpinned = weights.note_deployed(
            write, where, specs=specs, manifests=manifests, is_bound=is_bound
        )
        with accounting.deploying(write, context.config.plans, tenant=caller.tenant):
            done = registry.deploy(
                write,
                where,
                specs=specs,
                message=body.message,
                labels=body.labels,
                terms=_terms(body),
            )
        return done, unpinned

    return guards.change(context.store, make)


def _terms(body: models.DeployRequest) -> Terms:
    if body.no_traffic and body.rollout is not None:
        text = "no_traffic and rollout exclude each other: set only one of them"
        raise InvalidInput(text, parameter="rollout")
    return Terms(
        told=Told(lineage=body.meta, evaluation=body.evaluation),
        plan=plan.parse(body.rollout) if body.rollout is not None else None,
        no_traffic=body.no_traffic,
        tag=body.tag or "",
        allow_breaking=body.allow_breaking,
        override_freeze=body.override_freeze,
    )


@router.get("", response_model=models.AppList)
def listing(context: Ctx, caller: Deployer) -> dict[str, Any]:
    """List the apps of the environment that the key may access."""
    with context.store.read() as sql:
        found = registry.apps(sql, tenant=caller.tenant, environment=caller.environment)
    return {"apps": [app for app in found if caller.may_see(app["name"])]}


@router.get("/{app}", response_model=models.AppDetail)
def detail(context: Ctx, caller: Deployer, app: AppName) -> dict[str, Any]:
    """Return one app with its functions."""
    caller.restrict(app, None)
    with context.store.read() as sql:
        found = registry.app(sql, tenant=caller.tenant, environment=caller.environment, name=app)
        functions = [
            function for function in found["functions"] if caller.may_see(app, function["name"])
        ]
        for function in functions:
            function["cluster"] = _in_cluster(context, sql, function["id"])
    return {**found, "functions": functions}


def _in_cluster(context: Context, sql: sa.Connection, function: str) -> dict[str, Any] | None:
    """Return the reconciler's status of a function's current traffic, or None where there is no
    cluster."""
    status = context.statuses.get(function)
    if status is None:
        return None
    if (
        status.reason not in ("Stopped", "NotSeen")
        and status.generation < publishing.document(sql, function).generation
    ):
        return {
            "phase": "pending",
            "reason": "NotSeen",
            "message": "the latest change has not reached the cluster yet",
            "since": status.since,
        }
    return {
        key: value
        for key, value in status.to_json().items()
        if key in ("phase", "reason", "message", "since")
    }


@router.get("/{app}/history", response_model=models.History)
def history(
    context: Ctx, caller: Deployer, app: AppName, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> dict[str, Any]:
    """List the changes of an app, newest first."""
    caller.demand_app(app)
    with context.store.read() as sql:
        return {
            "history": histories.entries(
                sql, tenant=caller.tenant, environment=caller.environment, app=app, limit=limit
            )
        }


@router.post("/{app}:stop")
def stop(context: Ctx, caller: Deployer, request: RequestId, app: AppName) -> models.Stopped:
    """Stop the app: its functions answer 503 until it is deployed again."""
    caller.demand_app(app)
    with context.store.write() as write:
        return models.Stopped(app=app, version=registry.stop(write, place(caller, app, request)))


@router.delete("/{app}", status_code=204)
async def delete(context: Ctx, caller: Deployer, request: RequestId, app: AppName) -> Response:
    """Delete the app's functions, their snapshots, and the bundles and weights that only they refer
    to. The app's history is kept."""
    caller.demand_app(app)

    def remove() -> tuple[tuple[str, ...], set[str]]:
        with context.store.write() as write:
            removed = registry.delete(write, place(caller, app, request))
            return removed, pruning.blobs_of_functions(write.sql, removed)

    removed, digests = await context.threads.run(caller.tenant, remove)
    await garbage.forget(context.agent, removed)
    await deletion.give_up(context, caller, digests, request)
    return Response(status_code=204)


@router.post("/{app}:prune")
async def prune(
    context: Ctx, caller: Deployer, request: RequestId, app: AppName, body: PruneRequest
) -> PruneResponse:
    """Delete old revisions of an active app, and the bundles and weights that only they refer to.

    Revisions that can be called (by traffic, tag, alias, pin, rollout or experiment) and the newest
    `keep` revisions of each function are kept."""
    caller.demand_app(app)

    def delete_revisions() -> pruning.Pruned:
        with context.store.write() as write:
            return pruning.prune(
                write, place(caller, app, request), keep=body.keep, dry_run=body.dry_run
            )

    done = await context.threads.run(caller.tenant, delete_revisions)
    if body.dry_run:
        return PruneResponse(revisions=len(done.revisions), freed_bytes=0, dry_run=True)
    await _delete_snapshots(context, done)
    freed = await deletion.give_up(context, caller, done.digests, request)
    return PruneResponse(revisions=len(done.revisions), freed_bytes=freed.size_bytes, dry_run=False)


async def _delete_snapshots(context: Context, done: pruning.Pruned) -> None:
    """Delete the snapshots of pruned revisions: they cannot start without a bundle. If this fails,
    the node's own storage budget evicts them."""
    with contextlib.suppress(SnapshotterError, TimeoutError):
        async with asyncio.timeout(garbage.DELETE_TIMEOUT_S):
            for function, name in done.revisions:
                await context.agent.delete_snapshots(revision=f"{function}@{name}")
