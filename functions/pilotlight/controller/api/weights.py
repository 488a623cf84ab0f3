"""Weights by name: what a name means, where its bytes are, and bringing, checking and keeping them
on the node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, TypeVar

import sqlalchemy as sa
from fastapi import Path, Response
from pydantic import Field

from pilotlight.controller import blobs, holdings, references, weights
from pilotlight.controller.access import Principal
from pilotlight.controller.api.models import Body
from pilotlight.controller.context import ROOM, Admin, Context, Ctx, Deployer, RequestId
from pilotlight.controller.holdings import Tell
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.store import Write
from pilotlight.controller.stored import accounting, deletion
from pilotlight.controller.streams import NdjsonResponse
from pilotlight.controller.weights import Holder
from pilotlight.protocol import CONTENT_NDJSON
from snapshotter.errors import SnapshotterError
from weight_cache.manifest import Manifest
from weight_cache.types import Prediction, Tier

router = APIRouter(prefix="/v1/weights", tags=["weights"])
Name = Annotated[str, Path(max_length=63)]
NDJSON: dict[int | str, dict[str, Any]] = {200: {"content": {CONTENT_NDJSON: {}}}}
T = TypeVar("T")


class WeightsRequest(Body):
    """What a name shall mean: a manifest that was uploaded, and where it came from (for people;
    addresses lose their secrets)."""

    manifest: str = Field(description="sha256 of the manifest")
    source: str = ""


class WeightsInfo(Body):
    """What a name means. What only the node knows is null while it does not answer."""

    name: str
    manifest: str
    size_bytes: int
    files: int
    source: str
    app: str | None = Field(description="whose deploy brought it; null: it was pushed")
    is_pinned: bool
    created_at: float
    updated_at: float
    tier: Tier | None = Field(description="where its bytes are, for a start on this node")
    expected_s: float | None = Field(description="what a start would wait for them, predicted")
    instances: int | None = Field(description="running instances of this environment that map it")


class WeightsList(Body):
    """Weights of one environment."""

    weights: list[WeightsInfo]


@router.get("")
async def list_weights(context: Ctx, caller: Deployer) -> WeightsList:
    """Weights of the environment, and where they are."""
    rows = await _read(context, caller.tenant, lambda sql: weights.listing(sql, _holder(caller)))
    return WeightsList(weights=await _shown(context, caller, rows))


@router.get("/{name}")
async def get_weights(context: Ctx, caller: Deployer, name: Name) -> WeightsInfo:
    """One of them."""
    return await _info(context, caller, name)


@router.put("/{name}", dependencies=[ROOM])
async def put_weights(
    *, context: Ctx, caller: Deployer, request: RequestId, name: Name, body: WeightsRequest
) -> WeightsInfo:
    """Let a name mean a manifest, which with all its files was uploaded before. A name that meant
    another is not pinned any more."""
    caller.demand_whole_environment()
    digest = blobs.check_digest(body.manifest, "manifest")
    manifest = await context.threads.run(caller.tenant, _manifest_of, context, caller, digest)
    holder = _holder(caller, request)

    def put(write: Write) -> str | None:
        references.check_files(write.sql, tenant=caller.tenant, digest=digest, named=manifest)
        return weights.put(
            write, holder, name=name, model=weights.Model.of(digest, manifest), source=body.source
        )

    released = await _write(context, caller.tenant, put)
    await holdings.settle(context.cache, context.store, [released] if released else [])
    return await _info(context, caller, name)


@router.delete("/{name}", status_code=204)
async def delete_weights(
    context: Ctx, caller: Deployer, request: RequestId, name: Name
) -> Response:
    """Forget a name that no function uses, and delete the files of its manifest that no revision or
    other name refers to."""
    caller.demand_whole_environment()
    manifest = await _write(
        context,
        caller.tenant,
        lambda write: weights.delete(write, _holder(caller, request), name=name),
    )
    await holdings.forget(context.cache, context.store, manifest)
    await deletion.give_up(context, caller, [], request, manifests=[manifest])
    return Response(status_code=204)


@router.post("/{name}/verify", status_code=200, response_class=NdjsonResponse, responses=NDJSON)
async def verify_weights(
    context: Ctx, caller: Deployer, request: RequestId, name: Name
) -> NdjsonResponse:
    """Read the node's copy again: lines `{"elapsed_s"}`, then `{"is_here", "corrupt": [paths]}`;
    they are fetched anew when needed."""
    manifest = await _manifest(context, caller, name)
    await holdings.demand(context.cache)
    await _write(
        context,
        caller.tenant,
        lambda write: weights.note(write, _holder(caller, request), "verify", name),
    )

    async def work(_: Tell) -> Mapping[str, Any]:
        found = await holdings.verify(context.cache, manifest)
        paths = await context.threads.run(
            caller.tenant, _paths, context, caller, manifest, found["corrupt"]
        )
        return {**found, "corrupt": paths}

    return NdjsonResponse(holdings.following(work), request=request)


@router.post("/{name}/prefetch", status_code=200, response_class=NdjsonResponse, responses=NDJSON)
async def prefetch_weights(
    context: Ctx, caller: Deployer, request: RequestId, name: Name
) -> NdjsonResponse:
    """Bring it to the node's disk: lines `{"done_bytes", "total_bytes", "elapsed_s"}`, then
    `{"weights": {…}}`."""
    manifest = await _manifest(context, caller, name)
    await holdings.demand(context.cache)
    await _write(
        context,
        caller.tenant,
        lambda write: weights.note(write, _holder(caller, request), "prefetch", name),
    )

    async def work(tell: Tell) -> Mapping[str, Any]:
        await holdings.prefetch(context.cache, manifest, tell)
        return {"weights": (await _info(context, caller, name)).model_dump()}

    return NdjsonResponse(holdings.following(work), request=request)


@router.post("/{name}/pin", status_code=200, response_class=NdjsonResponse, responses=NDJSON)
async def pin_weights(
    context: Ctx, caller: Admin, request: RequestId, name: Name
) -> NdjsonResponse:
    """Bring it to the node's disk and keep it there whoever needs room; lines as of prefetch."""
    caller.demand_whole_environment()
    # Now, because once the answer has begun it is a line only.
    await _read(context, caller.tenant, lambda sql: _check_pin(context, sql, _holder(caller), name))
    await holdings.demand(context.cache)

    async def work(tell: Tell) -> Mapping[str, Any]:
        await _pin(context, _holder(caller, request), name, tell)
        return {"weights": (await _info(context, caller, name)).model_dump()}

    return NdjsonResponse(holdings.following(work), request=request)


@router.post("/{name}/unpin")
async def unpin_weights(context: Ctx, caller: Admin, request: RequestId, name: Name) -> WeightsInfo:
    """Let the node evict it again when it needs room."""
    caller.demand_whole_environment()
    manifest = await _write(
        context,
        caller.tenant,
        lambda write: weights.pin(write, _holder(caller, request), name=name, pinned=False),
    )
    await holdings.settle(context.cache, context.store, [manifest])
    return await _info(context, caller, name)


async def _pin(context: Context, holder: Holder, name: str, tell: Tell) -> None:
    # The row first: a sweep in between must not undo what the cache does next. A pin that fails is
    # none.
    was_pinned = (
        await _read(context, holder.tenant, lambda sql: weights.find(sql, holder, name=name))
    )["is_pinned"]
    manifest = await _write(
        context, holder.tenant, lambda write: _note_pin(context, write, holder, name)
    )
    pinned = False
    try:
        await holdings.pin(context.cache, manifest, tell)
        pinned = True
    finally:
        if not pinned and not was_pinned:
            await _write(
                context,
                holder.tenant,
                lambda write: weights.pin(write, holder, name=name, pinned=False),
            )
        await holdings.settle(context.cache, context.store, [manifest])


def _check_pin(context: Context, sql: sa.Connection, holder: Holder, name: str) -> None:
    row = weights.find(sql, holder, name=name)
    plan = accounting.plan_of(sql, context.config.plans, tenant=holder.tenant)
    size_bytes = row["size_bytes"]
    accounting.require_room_for_pin(
        sql, plan, tenant=holder.tenant, manifest=row["manifest"], size_bytes=size_bytes
    )


def _note_pin(context: Context, write: Write, holder: Holder, name: str) -> str:
    _check_pin(context, write.sql, holder, name)
    return weights.pin(write, holder, name=name, pinned=True)


def _holder(caller: Principal, request: str = "") -> Holder:
    return Holder(
        tenant=caller.tenant, environment=caller.environment, actor=caller.key, request=request
    )


async def _manifest(context: Context, caller: Principal, name: str) -> str:
    return str(
        (
            await _read(
                context, caller.tenant, lambda sql: weights.find(sql, _holder(caller), name=name)
            )
        )["manifest"]
    )


async def _info(context: Context, caller: Principal, name: str) -> WeightsInfo:
    row = await _read(
        context, caller.tenant, lambda sql: weights.find(sql, _holder(caller), name=name)
    )
    return (await _shown(context, caller, [row]))[0]


async def _shown(
    context: Context, caller: Principal, rows: list[dict[str, Any]]
) -> list[WeightsInfo]:
    held = await holdings.look(context.cache, {row["manifest"] for row in rows}) if rows else {}
    mapped = await _instances(context, caller) if rows else {}
    return [WeightsInfo(**row, **_node(row["manifest"], held, mapped)) for row in rows]


def _node(
    manifest: str, held: Mapping[str, Prediction] | None, mapped: Mapping[str, int] | None
) -> dict[str, Any]:
    found = None if held is None else held[manifest]
    instances = None if mapped is None else mapped.get(manifest, 0)
    return {
        "tier": found and found.tier,
        "expected_s": found and found.seconds,
        "instances": instances,
    }


async def _instances(context: Context, caller: Principal) -> dict[str, int] | None:
    # Asked of the agent by the caller's own labels: the cache's leases would tell of other tenants
    # with the same model.
    try:
        found = await context.agent.instances(
            {"tenant": caller.tenant, "environment": caller.environment}
        )
    except SnapshotterError:
        return None
    counted = Counter(str(instance.revision) for instance in found)
    return await _read(context, caller.tenant, lambda sql: weights.instances_of(sql, counted))


def _manifest_of(context: Context, caller: Principal, digest: str) -> Manifest:
    with context.store.read() as sql:
        return references.check_manifest(sql, context.files, tenant=caller.tenant, digest=digest)


def _paths(
    context: Context, caller: Principal, manifest: str, digests: Collection[str]
) -> list[str]:
    """The paths that files of these digests have in the model."""
    if not digests:
        return []
    with context.store.read() as sql:
        found = references.check_manifest(sql, context.files, tenant=caller.tenant, digest=manifest)
    return [file.path for file in found.files if file.digest in set(digests)]


async def _read(context: Context, tenant: str, question: Callable[[sa.Connection], T]) -> T:
    def run() -> T:
        with context.store.read() as sql:
            return question(sql)

    return await context.threads.run(tenant, run)


async def _write(context: Context, tenant: str, change: Callable[[Write], T]) -> T:
    def run() -> T:
        with context.store.write() as write:
            return change(write)

    return await context.threads.run(tenant, run)
