"""Routes for named weights: what a name refers to, where its bytes are, and prefetching, verifying
and pinning them on the node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Path, Response
from pydantic import Field

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import (
    REQUIRE_DISK_SPACE,
    Admin,
    Context,
    Ctx,
    Deployer,
    RequestId,
)
from pilotlight.controller.database.store import Write
from pilotlight.controller.deployments import dependency_checks
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry.app_ref import EnvironmentRef
from pilotlight.controller.server.ndjson import NdjsonResponse
from pilotlight.controller.weights import (
    blob_deletion,
    blobs,
    node_cache,
    storage_usage,
    weight_names,
)
from pilotlight.controller.weights.node_cache import ReportProgress
from pilotlight.protocol import CONTENT_NDJSON
from snapshotter.errors import SnapshotterError
from weight_cache.manifest import Manifest
from weight_cache.types import Prediction, Tier

router = APIRouter(prefix="/v1/weights", tags=["weights"])
Name = Annotated[str, Path(max_length=63)]
NDJSON: dict[int | str, dict[str, Any]] = {200: {"content": {CONTENT_NDJSON: {}}}}


class WeightsRequest(Body):
    """The manifest to which a name refers; it must have been uploaded. `source` is for display;
    credentials are removed from addresses."""

    manifest: str = Field(description="sha256 of the manifest")
    source: str = ""


class WeightsOnGpu(Body):
    """Weights in the memory of one GPU, or MIG instance."""

    gpu: str = Field(description="kind of the GPU")
    uuid: str
    memory_bytes: int = Field(description="memory of the GPU")
    bytes: int | None = Field(description="its part on this GPU; null: not known")
    state: str = Field(description="`arriving`, `delivered` or `asleep`")
    instance: str


class WeightsInfo(Body):
    """The manifest to which a name refers. Fields that only the node knows are null while it does
    not respond."""

    name: str
    manifest: str
    size_bytes: int
    files: int
    source: str
    app: str | None = Field(description="app whose deploy created it; null: it was pushed")
    is_pinned: bool
    created_at: float
    updated_at: float
    tier: Tier | None = Field(description="storage tier of its bytes, for a start on this node")
    expected_s: float | None = Field(
        description="predicted time that a start waits for them, in seconds"
    )
    instances: int | None = Field(description="running instances of this environment that map it")
    hbm: list[WeightsOnGpu] | None = Field(
        description="GPUs whose memory holds it for instances of this environment; null: the node "
        "has no GPU, or does not respond"
    )


class WeightsList(Body):
    """Weights of one environment."""

    weights: list[WeightsInfo]


@router.get("")
async def list_weights(context: Ctx, caller: Deployer) -> WeightsList:
    """List the weights of the environment, and where they are."""
    rows = await context.read(caller.tenant, lambda sql: weight_names.listing(sql, _holder(caller)))
    return WeightsList(weights=await _describe_all(context, caller, rows))


@router.get("/{name}")
async def get_weights(context: Ctx, caller: Deployer, name: Name) -> WeightsInfo:
    """Return the weights of one name."""
    return await _info(context, caller, name)


@router.put("/{name}", dependencies=[REQUIRE_DISK_SPACE])
async def put_weights(
    *, context: Ctx, caller: Deployer, request: RequestId, name: Name, body: WeightsRequest
) -> WeightsInfo:
    """Set a name to a manifest that was uploaded with all its files. A name that referred to
    another manifest loses its pin."""
    caller.require_whole_environment()
    digest = blobs.check_digest(body.manifest, "manifest")
    manifest = await context.threads.run(caller.tenant, _manifest_of, context, caller, digest)
    holder = _holder(caller, request)

    def put(write: Write) -> str | None:
        dependency_checks.check_files(
            write.sql, tenant=caller.tenant, digest=digest, named=manifest
        )
        return weight_names.put(
            write,
            holder,
            name=name,
            model=weight_names.NamedWeights.of(digest, manifest),
            source=body.source,
        )

    released = await context.write(caller.tenant, put)
    await node_cache.unpin_unused(context.cache, context.store, [released] if released else [])
    return await _info(context, caller, name)


@router.delete("/{name}", status_code=204)
async def delete_weights(
    context: Ctx, caller: Deployer, request: RequestId, name: Name
) -> Response:
    """Delete a name that no function uses, and the files of its manifest that no revision or other
    name refers to."""
    caller.require_whole_environment()
    manifest = await context.write(
        caller.tenant,
        lambda write: weight_names.delete(write, _holder(caller, request), name=name),
    )
    await node_cache.evict(context.cache, context.store, manifest)
    await blob_deletion.release_blobs(
        context.collector,
        context.metrics,
        tenant=caller.tenant,
        actor=caller.key,
        digests=[],
        request=request,
        manifests=[manifest],
    )
    return Response(status_code=204)


@router.post("/{name}/verify", status_code=200, response_class=NdjsonResponse, responses=NDJSON)
async def verify_weights(
    context: Ctx, caller: Deployer, request: RequestId, name: Name
) -> NdjsonResponse:
    """Verify the node's copy. Streams lines `{"elapsed_s"}`, then `{"is_here", "corrupt":
    [paths]}`; corrupt files are fetched again when needed."""
    manifest = await _manifest(context, caller, name)
    await node_cache.require_available(context.cache)
    await context.write(
        caller.tenant,
        lambda write: weight_names.record_node_request(
            write, _holder(caller, request), "verify", name
        ),
    )

    async def work(_: ReportProgress) -> Mapping[str, Any]:
        found = await node_cache.verify(context.cache, manifest)
        paths = await context.threads.run(
            caller.tenant, _paths, context, caller, manifest, found["corrupt"]
        )
        return {**found, "corrupt": paths}

    return NdjsonResponse(node_cache.stream_progress(work), request=request)


@router.post("/{name}/prefetch", status_code=200, response_class=NdjsonResponse, responses=NDJSON)
async def prefetch_weights(
    context: Ctx, caller: Deployer, request: RequestId, name: Name
) -> NdjsonResponse:
    """Fetch the weights to the node's disk. Streams lines `{"done_bytes", "total_bytes",
    "elapsed_s"}`, then `{"weights": {…}}`."""
    manifest = await _manifest(context, caller, name)
    await node_cache.require_available(context.cache)
    await context.write(
        caller.tenant,
        lambda write: weight_names.record_node_request(
            write, _holder(caller, request), "prefetch", name
        ),
    )

    async def work(report: ReportProgress) -> Mapping[str, Any]:
        await node_cache.prefetch(context.cache, manifest, report)
        return {"weights": (await _info(context, caller, name)).model_dump()}

    return NdjsonResponse(node_cache.stream_progress(work), request=request)


@router.post("/{name}/pin", status_code=200, response_class=NdjsonResponse, responses=NDJSON)
async def pin_weights(
    context: Ctx, caller: Admin, request: RequestId, name: Name
) -> NdjsonResponse:
    """Fetch the weights to the node's disk and exclude them from eviction. Streams the same lines
    as prefetch."""
    caller.require_whole_environment()
    # Check now: once the stream has begun, an error is only a line.
    await context.read(caller.tenant, lambda sql: _check_pin(context, sql, _holder(caller), name))
    await node_cache.require_available(context.cache)

    async def work(report: ReportProgress) -> Mapping[str, Any]:
        await _pin(context, _holder(caller, request), name, report)
        return {"weights": (await _info(context, caller, name)).model_dump()}

    return NdjsonResponse(node_cache.stream_progress(work), request=request)


@router.post("/{name}/unpin")
async def unpin_weights(context: Ctx, caller: Admin, request: RequestId, name: Name) -> WeightsInfo:
    """Allow the node to evict the weights again when it needs space."""
    caller.require_whole_environment()
    manifest = await context.write(
        caller.tenant,
        lambda write: weight_names.pin(write, _holder(caller, request), name=name, pinned=False),
    )
    await node_cache.unpin_unused(context.cache, context.store, [manifest])
    return await _info(context, caller, name)


async def _pin(context: Context, holder: EnvironmentRef, name: str, report: ReportProgress) -> None:
    # Write the row first, so that a concurrent sweep does not undo the cache's pin. If pinning
    # fails, the row is restored.
    was_pinned = (
        await context.read(holder.tenant, lambda sql: weight_names.find(sql, holder, name=name))
    )["is_pinned"]
    manifest = await context.write(
        holder.tenant, lambda write: _record_pin(context, write, holder, name)
    )
    pinned = False
    try:
        await node_cache.pin(context.cache, manifest, report)
        pinned = True
    finally:
        if not pinned and not was_pinned:
            await context.write(
                holder.tenant,
                lambda write: weight_names.pin(write, holder, name=name, pinned=False),
            )
        await node_cache.unpin_unused(context.cache, context.store, [manifest])


def _check_pin(context: Context, sql: sa.Connection, holder: EnvironmentRef, name: str) -> None:
    row = weight_names.find(sql, holder, name=name)
    plan = storage_usage.plan_of(sql, context.config.plans, tenant=holder.tenant)
    size_bytes = row["size_bytes"]
    storage_usage.require_room_for_pin(
        sql, plan, tenant=holder.tenant, manifest=row["manifest"], size_bytes=size_bytes
    )


def _record_pin(context: Context, write: Write, holder: EnvironmentRef, name: str) -> str:
    _check_pin(context, write.sql, holder, name)
    return weight_names.pin(write, holder, name=name, pinned=True)


def _holder(caller: Principal, request: str = "") -> EnvironmentRef:
    return EnvironmentRef(
        tenant=caller.tenant, environment=caller.environment, actor=caller.key, request=request
    )


async def _manifest(context: Context, caller: Principal, name: str) -> str:
    return str(
        (
            await context.read(
                caller.tenant,
                lambda sql: weight_names.find(sql, _holder(caller), name=name),
            )
        )["manifest"]
    )


async def _info(context: Context, caller: Principal, name: str) -> WeightsInfo:
    row = await context.read(
        caller.tenant, lambda sql: weight_names.find(sql, _holder(caller), name=name)
    )
    return (await _describe_all(context, caller, [row]))[0]


async def _describe_all(
    context: Context, caller: Principal, rows: list[dict[str, Any]]
) -> list[WeightsInfo]:
    predictions = (
        await node_cache.locations(context.cache, {row["manifest"] for row in rows}) if rows else {}
    )
    mapped = await _instances(context, caller) if rows else {}
    on_gpus = await _on_gpus(context, caller) if rows else None
    return [
        WeightsInfo(
            **row,
            **_node(row["manifest"], predictions, mapped),
            hbm=None if on_gpus is None else on_gpus.get(row["manifest"], []),
        )
        for row in rows
    ]


def _node(
    manifest: str, predictions: Mapping[str, Prediction] | None, mapped: Mapping[str, int] | None
) -> dict[str, Any]:
    found = None if predictions is None else predictions[manifest]
    instances = None if mapped is None else mapped.get(manifest, 0)
    return {
        "tier": found and found.tier,
        "expected_s": found and found.seconds,
        "instances": instances,
    }


async def _instances(context: Context, caller: Principal) -> dict[str, int] | None:
    # Query the agent by the caller's own labels: the cache's leases would reveal other tenants with
    # the same model.
    try:
        found = await context.agent.instances(
            {"tenant": caller.tenant, "environment": caller.environment}
        )
    except SnapshotterError:
        return None
    counted = Counter(str(instance.revision) for instance in found)
    return await context.read(caller.tenant, lambda sql: weight_names.instances_of(sql, counted))


async def _on_gpus(context: Context, caller: Principal) -> dict[str, list[WeightsOnGpu]] | None:
    """Return what the caller's own instances hold in GPUs, by manifest; None where there is no
    GPU."""
    own = {"tenant": caller.tenant, "environment": caller.environment}
    try:
        gpus = await context.agent.gpus()
    except SnapshotterError:
        return None
    found: dict[str, list[WeightsOnGpu]] = {}
    for gpu in gpus:
        if own.items() <= gpu["labels"].items():
            for weights in gpu["weights"]:
                found.setdefault(weights["manifest"], []).append(_weights_on_gpu(gpu, weights))
    return found if gpus else None


def _weights_on_gpu(gpu: Mapping[str, Any], weights: Mapping[str, Any]) -> WeightsOnGpu:
    return WeightsOnGpu(
        gpu=gpu["kind"],
        uuid=gpu["uuid"],
        memory_bytes=gpu["memory_bytes"],
        bytes=weights["bytes"],
        state=weights["state"],
        instance=gpu["instance"],
    )


def _manifest_of(context: Context, caller: Principal, digest: str) -> Manifest:
    with context.store.read() as sql:
        return dependency_checks.check_manifest(
            sql, context.files, tenant=caller.tenant, digest=digest
        )


def _paths(
    context: Context, caller: Principal, manifest: str, digests: Collection[str]
) -> list[str]:
    """Return the paths that files with these digests have in the model."""
    if not digests:
        return []
    with context.store.read() as sql:
        found = dependency_checks.check_manifest(
            sql, context.files, tenant=caller.tenant, digest=manifest
        )
    return [file.path for file in found.files if file.digest in set(digests)]
