"""Routes for snapshots on the node: list, verify, delete, and disable for a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pilotlight.controller import audit, garbage, registry
from pilotlight.controller.access import Principal
from pilotlight.controller.api import models
from pilotlight.controller.builds import BuildBill
from pilotlight.controller.context import Context, Ctx, Deployer, RequestId, place
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.store import Write
from pilotlight.errors import NotFound
from snapshotter.types import SnapshotInfo

router = APIRouter(prefix="/v1", tags=["snapshots"])
T = TypeVar("T")


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


async def _write(context: Context, tenant: str, change: Callable[[Write], T]) -> T:
    def run() -> T:
        with context.store.write() as write:
            return change(write)

    return await context.threads.run(tenant, run)


@router.get("/snapshots", response_model=models.Snapshots)
async def snapshots(
    context: Ctx, caller: Deployer, app: str | None = None, function: str | None = None
) -> dict[str, Any]:
    """List the environment's snapshots on the node, including those of older revisions and
    quarantined ones."""
    found = await _list_snapshots(context, caller, app=app, function=function)
    return {"snapshots": [info.to_json() for info in found]}


@router.get("/snapshots/{snapshot}", response_model=models.Snapshot)
async def snapshot(context: Ctx, caller: Deployer, snapshot: str) -> dict[str, Any]:
    """Return one snapshot: its state, times, size and identity."""
    return (await _owned(context, caller, snapshot)).to_json()


@router.post("/snapshots/{snapshot}:prove", response_model=models.Snapshot)
async def prove_snapshot(
    context: Ctx, caller: Deployer, request: RequestId, snapshot: str
) -> dict[str, Any]:
    """Restore the snapshot once and check its response to the example request. Afterwards it is
    READY, or QUARANTINED with a reason. The CPU time is charged as BUILD."""
    await _owned(context, caller, snapshot)
    await _record_audit(
        context, caller, request=request, action="snapshot.prove", snapshot=snapshot
    )
    async with BuildBill(context.builds, context.store, context.config, caller, snapshot) as bill:
        return (await context.agent.prove_snapshot(snapshot, bill.on_message)).to_json()


@router.delete("/snapshots/{snapshot}")
async def delete_snapshot(
    context: Ctx, caller: Deployer, request: RequestId, snapshot: str
) -> models.SnapshotsDeleted:
    """Delete a snapshot from the node. The function's next deploy or cold start creates another."""
    await _owned(context, caller, snapshot)
    await _record_audit(
        context, caller, request=request, action="snapshot.delete", snapshot=snapshot
    )
    return models.SnapshotsDeleted(
        deleted=await context.agent.delete_snapshots(snapshot_id=snapshot)
    )


@router.delete("/functions/{app}/{function}/snapshots")
async def delete_snapshots(
    context: Ctx, caller: Deployer, request: RequestId, app: str, function: str
) -> models.SnapshotsDeleted:
    """Delete the snapshots of all revisions of a function."""
    caller.demand_function(app, function)
    where = place(caller, app, request)

    def record(write: Write) -> str:
        found = registry.find_function(write.sql, where, function)
        subject = f"{caller.environment}/{app}/{function}"
        audit.record(
            write,
            tenant=caller.tenant,
            actor=caller.key,
            action="snapshots.delete",
            subject=subject,
            request=request,
        )
        return str(found.id)

    return models.SnapshotsDeleted(
        deleted=await context.agent.delete_snapshots(
            function=await _write(context, caller.tenant, record)
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
    body: models.SnapshotsSwitch,
) -> models.SnapshotsSwitched:
    """Enable or disable snapshots for a function; the setting persists across deploys. Disabling
    deletes those on the node (`deleted`; null = later)."""
    caller.demand_function(app, function)
    where = place(caller, app, request)
    switched = await _write(
        context,
        caller.tenant,
        lambda write: registry.switch_snapshots(
            write, where, function=function, enabled=body.enabled
        ),
    )
    deleted = 0 if body.enabled else await garbage.forget(context.agent, [switched])
    return models.SnapshotsSwitched(
        app=app, function=function, enabled=body.enabled, deleted=deleted
    )


async def _record_audit(
    context: Context, caller: Principal, *, request: str, action: str, snapshot: str
) -> None:
    def record(write: Write) -> None:
        audit.record(
            write,
            tenant=caller.tenant,
            actor=caller.key,
            action=action,
            subject=snapshot,
            request=request,
        )

    await _write(context, caller.tenant, record)
