"""Routes for snapshots on the node, or on the nodes of a cluster: list, verify, quarantine, delete,
and disable for a function."""

from __future__ import annotations

from typing import Any

from pilotlight.controller.api import schemas
from pilotlight.controller.billing.build_charges import BuildCharge
from pilotlight.controller.context import Context, Ctx, Deployer, RequestId, app_ref_of
from pilotlight.controller.database import audit_trail
from pilotlight.controller.database.store import Write
from pilotlight.controller.deployments import app_registry
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry import snapshot_gc
from pilotlight.errors import NotFound
from snapshotter.types import SnapshotInfo

router = APIRouter(prefix="/v1", tags=["snapshots"])


async def _list_snapshots(
    context: Context, caller: Principal, *, app: str | None = None, function: str | None = None
) -> list[SnapshotInfo]:
    # The tenant comes from the key, never from the request: this isolates tenants from each other.
    app, function = caller.restrict(app, function)
    requested = {name: value for name, value in (("app", app), ("function", function)) if value}
    return await context.agent.snapshots(
        {"tenant": caller.tenant, "environment": caller.environment, **requested}
    )


async def _owned(context: Context, caller: Principal, snapshot: str) -> SnapshotInfo:
    for found in await _list_snapshots(context, caller):
        if found.id == snapshot:
            return found
    raise NotFound(
        f"there is no snapshot {snapshot} in environment {caller.environment!r}", snapshot=snapshot
    )


@router.get("/snapshots", response_model=schemas.Snapshots)
async def snapshots(
    context: Ctx, caller: Deployer, app: str | None = None, function: str | None = None
) -> dict[str, Any]:
    """List the environment's snapshots on the node, including those of older revisions and
    quarantined ones. On a cluster there is one entry for each node that has the snapshot (`node`),
    and one for a copy that is in the object store alone; `where` says which."""
    found = await _list_snapshots(context, caller, app=app, function=function)
    return {"snapshots": [info.to_json() for info in found]}


@router.get("/snapshots/{snapshot}", response_model=schemas.Snapshot)
async def snapshot(context: Ctx, caller: Deployer, snapshot: str) -> dict[str, Any]:
    """Return one snapshot: its state, times, size and identity."""
    return (await _owned(context, caller, snapshot)).to_json()


@router.post("/snapshots/{snapshot}:prove", response_model=schemas.Snapshot)
async def prove_snapshot(
    context: Ctx, caller: Deployer, request: RequestId, snapshot: str
) -> dict[str, Any]:
    """Restore the snapshot once and check its response to the example request. Afterwards it is
    READY, or QUARANTINED with a reason. The CPU time is charged as BUILD."""
    await _owned(context, caller, snapshot)
    await _record_audit(
        context, caller, request=request, action="snapshot.prove", snapshot=snapshot
    )
    async with BuildCharge(context.builds, context.store, context.config, caller, snapshot) as bill:
        return (await context.agent.prove_snapshot(snapshot, bill.on_message)).to_json()


@router.post("/snapshots/{snapshot}:quarantine", response_model=schemas.Snapshot)
async def quarantine_snapshot(
    *,
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    snapshot: str,
    body: schemas.SnapshotQuarantine,
) -> dict[str, Any]:
    """Quarantine the snapshot: it is never restored again, on a cluster on no node, and its copy is
    removed. The function's next cold start creates another."""
    await _owned(context, caller, snapshot)
    await _record_audit(
        context, caller, request=request, action="snapshot.quarantine", snapshot=snapshot
    )
    reason = f"by {caller.key}: {body.reason}"
    return (await context.agent.quarantine_snapshot(snapshot, reason=reason)).to_json()


@router.delete("/snapshots/{snapshot}")
async def delete_snapshot(
    context: Ctx, caller: Deployer, request: RequestId, snapshot: str
) -> schemas.SnapshotsDeleted:
    """Delete a snapshot from the node, on a cluster from all nodes, within seconds, and the object
    store. The function's next deploy or cold start creates another."""
    await _owned(context, caller, snapshot)
    await _record_audit(
        context, caller, request=request, action="snapshot.delete", snapshot=snapshot
    )
    return schemas.SnapshotsDeleted(
        deleted=await context.agent.delete_snapshots(snapshot_id=snapshot)
    )


@router.delete("/functions/{app}/{function}/snapshots")
async def delete_snapshots(
    context: Ctx, caller: Deployer, request: RequestId, app: str, function: str
) -> schemas.SnapshotsDeleted:
    """Delete the snapshots of all revisions of a function."""
    caller.require_function(app, function)
    where = app_ref_of(caller, app, request)

    def record(write: Write) -> str:
        found = app_registry.find_function(write.sql, where, function)
        subject = f"{caller.environment}/{app}/{function}"
        audit_trail.record(
            write,
            tenant=caller.tenant,
            actor=caller.key,
            action="snapshots.delete",
            subject=subject,
            request=request,
        )
        return str(found.id)

    return schemas.SnapshotsDeleted(
        deleted=await context.agent.delete_snapshots(
            function=await context.write(caller.tenant, record)
        )
    )


@router.put("/functions/{app}/{function}/snapshots")
async def switch_snapshots(
    *,
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    app: str,
    function: str,
    body: schemas.SnapshotsSwitch,
) -> schemas.SnapshotsSwitched:
    """Enable or disable snapshots for a function; the setting persists across deploys. Disabling
    deletes those on the node (`deleted`; null = later)."""
    caller.require_function(app, function)
    where = app_ref_of(caller, app, request)
    switched = await context.write(
        caller.tenant,
        lambda write: app_registry.switch_snapshots(
            write, where, function=function, enabled=body.enabled
        ),
    )
    deleted = 0 if body.enabled else await snapshot_gc.delete_snapshots(context.agent, [switched])
    return schemas.SnapshotsSwitched(
        app=app, function=function, enabled=body.enabled, deleted=deleted
    )


async def _record_audit(
    context: Context, caller: Principal, *, request: str, action: str, snapshot: str
) -> None:
    def record(write: Write) -> None:
        audit_trail.record(
            write,
            tenant=caller.tenant,
            actor=caller.key,
            action=action,
            subject=snapshot,
            request=request,
        )

    await context.write(caller.tenant, record)
