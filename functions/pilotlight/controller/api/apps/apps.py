"""Routes for deploying, listing, stopping, deleting and pruning apps."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Path, Query, Response
from pydantic import Field

from pilotlight.controller.api import schemas
from pilotlight.controller.api.artifacts.container_images import repository_of
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.billing import price_lists
from pilotlight.controller.context import (
    REQUIRE_DISK_SPACE,
    Context,
    Ctx,
    Deployer,
    RequestId,
    app_ref_of,
)
from pilotlight.controller.database.store import Write
from pilotlight.controller.deployments import (
    app_leases,
    app_registry,
    dependency_checks,
    fleet_checks,
    revision_pruning,
)
from pilotlight.controller.deployments.releases import ReleaseOptions
from pilotlight.controller.identity import tenants
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry import container_images, feed_publisher, snapshot_gc
from pilotlight.controller.registry.revisions import RevisionMetadata
from pilotlight.controller.release import app_history as histories
from pilotlight.controller.release import release_gates
from pilotlight.controller.rollouts import plan
from pilotlight.controller.weights import blob_deletion, node_cache, storage_usage, weight_names
from pilotlight.errors import InvalidInput
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.record_json import to_json
from snapshotter.errors import SnapshotterError

router = APIRouter(prefix="/v1/apps", tags=["apps"])
AppName = Annotated[str, Path(max_length=63)]


class AppLease(Body):
    """When an app's lease ends (seconds since the epoch)."""

    app: str
    expires_at: float


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


@router.post("/{app}/deploy", dependencies=[REQUIRE_DISK_SPACE])
async def deploy(
    context: Ctx, caller: Deployer, request: RequestId, app: AppName, body: schemas.DeployRequest
) -> schemas.DeployResponse:
    """Replace the app's functions with exactly these functions, in one transaction."""
    caller.require_app(app)
    if body.override_freeze:
        caller.require_scope(Scope.ADMIN)
    done, unpinned = await context.threads.run(
        caller.tenant, _deploy, context, caller, request=request, app=app, body=body
    )
    await snapshot_gc.delete_snapshots(context.agent, done.removed)
    await node_cache.unpin_unused(context.cache, context.store, unpinned)
    context.metrics.deploys.inc()
    answer = to_json(done)
    del answer["removed"]
    return schemas.DeployResponse(**answer)


def _deploy(
    context: Context, caller: Principal, *, request: str, app: str, body: schemas.DeployRequest
) -> tuple[app_registry.Deployment, list[str]]:
    specs = fleet_checks.settled(dependency_checks.parse_specs(app, body.functions), context.config)
    dependency_checks.check_fallbacks(caller, app=app, specs=specs)
    dependency_checks.check_egress(specs, context.config.egress)
    with context.store.read() as sql:
        manifests = dependency_checks.check_weights(
            sql, context.files, tenant=caller.tenant, specs=specs
        )

    def make(write: Write) -> tuple[app_registry.Deployment, list[str]]:
        tenants.require_environment(write.sql, tenant=caller.tenant, name=caller.environment)
        dependency_checks.check_access(write.sql, specs)
        fleet_checks.check_fleet(write.sql, context.config, tenant=caller.tenant, specs=specs)
        fleet_checks.check_sandboxes(specs, uid=caller.uid)
        if any(spec.resources.gpu for spec in specs):
            dependency_checks.check_prices(
                specs, price_lists.of_tenant(write.sql, context.config, caller.tenant)
            )
        dependency_checks.check_dependencies(
            write.sql,
            tenant=caller.tenant,
            environment=caller.environment,
            specs=specs,
            manifests=manifests,
            bundle_max_bytes=context.config.settings.bundle_max_bytes,
        )
        where = app_ref_of(caller, app, request)
        is_bound = caller.bound_app is not None
        unpinned = weight_names.record_deployed(
            write, where, specs=specs, manifests=manifests, is_bound=is_bound
        )
        complete = (
            specs
            if context.config.platform.fleet == "local"
            else container_images.with_references(
                write.sql, where, specs, repository=repository_of(context, caller)
            )
        )
        with storage_usage.enforce_deploy_limits(write, context.config.plans, tenant=caller.tenant):
            done = app_registry.deploy(
                write,
                where,
                specs=complete,
                message=body.message,
                labels=body.labels,
                terms=_terms(body),
                lease_s=body.lease_s,
                keep_others=body.keep_others,
            )
        return done, unpinned

    return release_gates.write_with_gates(context.store, make)


def _terms(body: schemas.DeployRequest) -> ReleaseOptions:
    if body.keep_others and body.lease_s is not None:
        raise InvalidInput(
            "keep_others and lease_s exclude each other: the app keeps its lease",
            parameter="lease_s",
        )
    if body.no_traffic and body.rollout is not None:
        text = "no_traffic and rollout exclude each other: set only one of them"
        raise InvalidInput(text, parameter="rollout")
    return ReleaseOptions(
        metadata=RevisionMetadata(lineage=body.meta, evaluation=body.evaluation),
        plan=plan.parse(body.rollout) if body.rollout is not None else None,
        no_traffic=body.no_traffic,
        tag=body.tag or "",
        allow_breaking=body.allow_breaking,
        override_freeze=body.override_freeze,
    )


@router.get("", response_model=schemas.AppList)
def listing(context: Ctx, caller: Deployer) -> dict[str, Any]:
    """List the apps of the environment that the key may access."""
    with context.store.read() as sql:
        found = app_registry.apps(sql, tenant=caller.tenant, environment=caller.environment)
    return {"apps": [app for app in found if caller.may_see(app["name"])]}


@router.get("/{app}", response_model=schemas.AppDetail)
def detail(context: Ctx, caller: Deployer, app: AppName) -> dict[str, Any]:
    """Return one app with its functions."""
    caller.restrict(app, None)
    with context.store.read() as sql:
        found = app_registry.app(
            sql, tenant=caller.tenant, environment=caller.environment, name=app
        )
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
        and status.generation < feed_publisher.traffic_document(sql, function).generation
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


@router.get("/{app}/history", response_model=schemas.History)
def history(
    context: Ctx, caller: Deployer, app: AppName, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> dict[str, Any]:
    """List the changes of an app, newest first."""
    caller.require_app(app)
    with context.store.read() as sql:
        return {
            "history": histories.entries(
                sql, tenant=caller.tenant, environment=caller.environment, app=app, limit=limit
            )
        }


@router.post("/{app}:stop")
def stop(context: Ctx, caller: Deployer, request: RequestId, app: AppName) -> schemas.Stopped:
    """Stop the app: its functions answer 503 until it is deployed again."""
    caller.require_app(app)
    with context.store.write() as write:
        return schemas.Stopped(
            app=app, version=app_registry.stop(write, app_ref_of(caller, app, request))
        )


@router.post("/{app}:renew")
def renew(context: Ctx, caller: Deployer, request: RequestId, app: AppName) -> AppLease:
    """Extend the lease of an app that was deployed with `lease_s`. Without it the app is deleted
    when its lease ends. Renewals are not in the audit log; the deploy and the deletion are."""
    caller.require_app(app)
    with context.store.write() as write:
        return AppLease(
            app=app, expires_at=app_leases.renew(write, app_ref_of(caller, app, request))
        )


@router.delete("/{app}", status_code=204)
async def delete(context: Ctx, caller: Deployer, request: RequestId, app: AppName) -> Response:
    """Delete the app's functions, their snapshots, and the bundles and weights that only they refer
    to. The app's history is kept."""
    caller.require_app(app)
    place = app_ref_of(caller, app, request)
    removed, digests = await context.write(
        caller.tenant, lambda write: app_leases.remove(write, place)
    )
    await app_leases.release_contents(context, place, removed, digests)
    return Response(status_code=204)


@router.post("/{app}:prune")
async def prune(
    context: Ctx, caller: Deployer, request: RequestId, app: AppName, body: PruneRequest
) -> PruneResponse:
    """Delete old revisions of an active app, and the bundles and weights that only they refer to.

    Revisions that can be called (by traffic, tag, alias, pin, rollout or experiment) and the newest
    `keep` revisions of each function are kept."""
    caller.require_app(app)

    def delete_revisions() -> revision_pruning.PruneResult:
        with context.store.write() as write:
            return revision_pruning.prune(
                write, app_ref_of(caller, app, request), keep=body.keep, dry_run=body.dry_run
            )

    done = await context.threads.run(caller.tenant, delete_revisions)
    if body.dry_run:
        return PruneResponse(revisions=len(done.revisions), freed_bytes=0, dry_run=True)
    await _delete_snapshots(context, done)
    freed = await blob_deletion.release_blobs(
        context.collector,
        context.metrics,
        tenant=caller.tenant,
        actor=caller.key,
        digests=done.digests,
        request=request,
    )
    return PruneResponse(revisions=len(done.revisions), freed_bytes=freed.size_bytes, dry_run=False)


async def _delete_snapshots(context: Context, done: revision_pruning.PruneResult) -> None:
    """Delete the snapshots of pruned revisions: they cannot start without a bundle. If this fails,
    the node's own storage budget evicts them."""
    with contextlib.suppress(SnapshotterError, TimeoutError):
        async with asyncio.timeout(snapshot_gc.DELETE_TIMEOUT_S):
            for function, name in done.revisions:
                await context.agent.delete_snapshots(revision=f"{function}@{name}")
