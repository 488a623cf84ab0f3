"""Routes for collections: dicts and queues, and one route for all operations on each.

A value is base64 of bytes that the platform stores and never reads; the SDK puts pickles there. A
key is a text; the SDK puts JSON there (`pilotlight.spec.collection`)."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import sqlalchemy as sa
from fastapi import Body as RequestBody
from fastapi import Path, Request, Response
from pydantic import Field

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.collections import collections
from pilotlight.controller.collections.collections import Collection, CollectionScope
from pilotlight.controller.collections.recent_operations import is_known
from pilotlight.controller.context import Context, Ctx, Deployer, RequestId, require_disk_space
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.weights import storage_usage
from pilotlight.errors import InvalidInput, TooLarge
from pilotlight.spec.collection import (
    MAX_REQUEST_VALUES,
    MAX_VALUE_BYTES,
    MAX_WAIT_S,
    CollectionKind,
    check_key,
)
from pilotlight.spec.quotas import Plan

router = APIRouter(tags=["dicts and queues"])
T = TypeVar("T")
Name = Annotated[str, Path(max_length=63)]
DICT, QUEUE = CollectionKind.DICT, CollectionKind.QUEUE


class CollectionInfo(Body):
    """A dict or queue."""

    name: str
    entries: int = Field(description="values; of a queue in all partitions")
    size_bytes: int = Field(description="keys and values")
    created_at: float
    updated_at: float

    @classmethod
    def of(cls, found: Collection) -> CollectionInfo:
        """Describe a collection."""
        return cls(**{name: getattr(found, name) for name in cls.model_fields})


class DictList(Body):
    """The dicts of one environment."""

    dicts: list[CollectionInfo]


class QueueList(Body):
    """The queues of one environment."""

    queues: list[CollectionInfo]


class Operation(Body):
    """What all operations have. `create`: create the dict or queue if it is missing."""

    create: bool = False


class Entry(Body):
    """A key and its value, as base64; null where values were not asked for."""

    key: str
    value: str | None = None


class DictGet(Operation):
    """Return the entries of these keys that are there; with `next`, ask again for those keys that
    follow it."""

    op: Literal["get"]
    keys: list[str] = Field(max_length=MAX_REQUEST_VALUES)


class RepeatableOperation(Operation):
    """`id`: of the caller's choice; the same operation on the dict or queue under the same one
    within 5 minutes, as after a lost connection, is not done again, and has the same answer. 409
    where that is no longer kept. "": none."""

    id: str = Field(default="", max_length=64)


class DictPut(RepeatableOperation):
    """Store entries; `skip_if_exists`: leave keys as they are that are there. `count` says how many
    were stored."""

    op: Literal["put"]
    entries: list[Entry] = Field(max_length=MAX_REQUEST_VALUES)
    skip_if_exists: bool = False


class DictPop(RepeatableOperation):
    """Remove a key and return its entry, no entry where it is not there."""

    op: Literal["pop"]
    key: str


class DictEntries(Operation):
    """Return entries by key, from `after` on."""

    op: Literal["list"]
    after: str = ""
    values: bool = True


class DictClear(Operation):
    """Remove all entries; `count` says how many there were."""

    op: Literal["clear"]


class DictCount(Operation):
    """Return the number of entries as `count`."""

    op: Literal["count"]


class DictAnswer(Body):
    """What an operation on a dict returns. `next`: pass it as `after` for the entries that follow;
    null: there are no more."""

    entries: list[Entry] = Field(default_factory=list)
    count: int = 0
    next: str | None = None


class QueuePut(RepeatableOperation):
    """Append values, as base64, to a partition."""

    op: Literal["put"]
    values: list[str] = Field(max_length=MAX_REQUEST_VALUES)
    partition: str = ""


class QueueGet(RepeatableOperation):
    """Remove and return the first values of a partition: at most `number`, and as many as an answer
    has room for. `wait_s`: wait so long for one. A value that was removed is in this answer alone:
    if that is lost, and not asked for again under its `id`, so is the value."""

    op: Literal["get"]
    number: int = Field(default=1, ge=1, le=MAX_REQUEST_VALUES)
    partition: str = ""
    wait_s: float = Field(default=0.0, ge=0.0, le=MAX_WAIT_S)


class QueueClear(Operation):
    """Remove the values of a partition, null: of all; `count` says how many there were."""

    op: Literal["clear"]
    partition: str | None = None


class QueueCount(Operation):
    """Return the number of values in a partition, null: in all, as `count`."""

    op: Literal["count"]
    partition: str | None = None


class QueueAnswer(Body):
    """What an operation on a queue returns."""

    values: list[str] = Field(default_factory=list)
    count: int = 0


DictOperation = Annotated[
    DictGet | DictPut | DictPop | DictEntries | DictClear | DictCount,
    RequestBody(discriminator="op"),
]
QueueOperation = Annotated[
    QueuePut | QueueGet | QueueClear | QueueCount, RequestBody(discriminator="op")
]


@router.get(DICT.path)
async def list_dicts(context: Ctx, caller: Deployer) -> DictList:
    """List the dicts of the environment."""
    return DictList(dicts=await _listed(context, _scope(caller, DICT)))


@router.get(QUEUE.path)
async def list_queues(context: Ctx, caller: Deployer) -> QueueList:
    """List the queues of the environment."""
    return QueueList(queues=await _listed(context, _scope(caller, QUEUE)))


@router.delete(f"{DICT.path}/{{name}}", status_code=204)
async def delete_dict(context: Ctx, caller: Deployer, request: RequestId, name: Name) -> Response:
    """Delete a dict and its entries."""
    return await _deleted(context, _scope(caller, DICT, name, request))


@router.delete(f"{QUEUE.path}/{{name}}", status_code=204)
async def delete_queue(context: Ctx, caller: Deployer, request: RequestId, name: Name) -> Response:
    """Delete a queue and its values."""
    return await _deleted(context, _scope(caller, QUEUE, name, request))


@router.post(f"{DICT.path}/{{name}}")
async def operate_dict(
    *, context: Ctx, caller: Deployer, request: RequestId, name: Name, body: DictOperation
) -> DictAnswer:
    """Do one operation on a dict, in one transaction. 507 when it is full; then nothing was
    stored."""
    return await do_dict(context, _scope(caller, DICT, name, request), body)


@router.post(f"{QUEUE.path}/{{name}}")
async def operate_queue(
    *,
    context: Ctx,
    caller: Deployer,
    request: Request,
    request_id: RequestId,
    name: Name,
    body: QueueOperation,
) -> QueueAnswer:
    """Do one operation on a queue, in one transaction. 507 when it is full; then nothing was
    stored. `get` waits if the tenant has fewer than 32 requests that wait; otherwise it is answered
    at once, and the caller asks again later."""
    return await do_queue(context, _scope(caller, QUEUE, name, request_id), body, request)


async def do_dict(context: Context, scope: CollectionScope, body: Any) -> DictAnswer:
    """Do one operation. Raises InvalidInput, NotFound, TooLarge, StorageFull."""
    match body:
        case DictPut():
            await require_disk_space(context)
            given = {check_key(entry.key): _decoded(entry.value or "") for entry in body.entries}

            def put(write: Write, found: Collection, plan: Plan) -> int:
                skips = body.skip_if_exists
                return collections.put(
                    write, found, plan, given, skip_if_exists=skips, operation_id=_id_of(body)
                )

            return DictAnswer(count=await _write(context, scope, body, put))
        case DictPop():
            key = check_key(body.key)
            value = await _write(
                context,
                scope,
                body,
                lambda write, found, _: collections.pop(
                    write, found, key, operation_id=_id_of(body)
                ),
            )
            entries = [] if value is None else [Entry(key=key, value=_encoded(value))]
            return DictAnswer(entries=entries)
        case DictClear():
            return DictAnswer(count=await _clear(context, scope, body, None))
        case DictCount():
            return DictAnswer(count=await _read(context, scope, body, _counted(None)))
    return await _entries(context, scope, body)


async def do_queue(
    context: Context, scope: CollectionScope, body: Any, request: Request
) -> QueueAnswer:
    """Do one operation. Raises InvalidInput, NotFound, TooLarge, StorageFull."""
    partition = None if body.partition is None else check_key(body.partition)
    match body:
        case QueuePut():
            await require_disk_space(context)
            values = [_decoded(value) for value in body.values]

            def push(write: Write, found: Collection, plan: Plan) -> None:
                collections.push(
                    write, found, plan, partition or "", values, operation_id=_id_of(body)
                )

            await _write(context, scope, body, push)
            context.waiters.wake(_place(scope, partition), len(values))
            return QueueAnswer(count=len(values))
        case QueueClear():
            return QueueAnswer(count=await _clear(context, scope, body, partition))
        case QueueCount():
            return QueueAnswer(count=await _read(context, scope, body, _counted(partition)))
    taken = await _take(context, scope, body, request)
    return QueueAnswer(values=list(map(_encoded, taken)), count=len(taken))


async def _entries(
    context: Context, scope: CollectionScope, body: DictGet | DictEntries
) -> DictAnswer:
    if isinstance(body, DictEntries) and not body.values:
        after = body.after
        keys = await _read(
            context, scope, body, lambda sql, found: collections.keys(sql, found, after=after)
        )
        is_more = len(keys) == MAX_REQUEST_VALUES
        return DictAnswer(
            entries=[Entry(key=key) for key in keys], next=keys[-1] if is_more else None
        )
    chosen = list(map(check_key, body.keys)) if isinstance(body, DictGet) else None
    after = body.after if isinstance(body, DictEntries) else ""
    entries, is_more = await _read(
        context, scope, body, partial(collections.entries, keys=chosen, after=after)
    )
    return DictAnswer(
        entries=[Entry(key=key, value=_encoded(value)) for key, value in entries],
        next=entries[-1][0] if is_more else None,
    )


async def _take(
    context: Context, scope: CollectionScope, body: QueueGet, request: Request
) -> list[bytes]:
    """Take values, and wait for one. Returns none when there was none in time, when no more
    requests may wait, and when the caller is gone."""
    until, waiters = time.monotonic() + body.wait_s, context.waiters
    place = _place(scope, body.partition)
    with waiters.waiting(place) if body.wait_s else contextlib.nullcontext() as event:
        while True:
            if event is not None:
                event.clear()  # before the look, so that no value is missed after it
            taken = await _taken(context, scope, body)
            if taken or event is None or waiters.is_closed:
                return taken
            if not await _wait(event, request, until - time.monotonic()):
                return []


async def _taken(context: Context, scope: CollectionScope, body: QueueGet) -> list[bytes]:
    """Take values; a queue that is empty costs no writing transaction."""
    partition, operation_id = body.partition, _id_of(body)

    def has_nothing(sql: sa.Connection, found: Collection) -> bool:
        return collections.is_empty(sql, found, partition) and not is_known(
            sql, found.id, operation_id
        )

    if await _read(context, scope, body, has_nothing):
        return []
    return await _write(
        context,
        scope,
        body,
        lambda write, found, _: collections.take(
            write, found, partition, body.number, operation_id=operation_id
        ),
    )


def _id_of(body: DictPut | DictPop | QueuePut | QueueGet) -> str:
    """The id of an operation, of its kind alone; "": it has none."""
    return body.id and f"{body.op}:{body.id}"


async def _wait(event: asyncio.Event, request: Request, timeout_s: float) -> bool:
    """Wait until the event is set; False: it was not in time, or the caller is gone."""
    is_set = asyncio.create_task(event.wait(), name="a value of a queue")
    gone = asyncio.ensure_future(request.receive())  # the body was read: it is the disconnect
    try:
        await asyncio.wait(
            {is_set, gone}, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        is_set.cancel()
        gone.cancel()
    return event.is_set() and not gone.done()


async def _listed(context: Context, scope: CollectionScope) -> list[CollectionInfo]:
    rows = await context.read(scope.tenant, partial(collections.listing, scope=scope))
    return [CollectionInfo.of(row) for row in rows]


async def _clear(
    context: Context, scope: CollectionScope, body: Operation, partition: str | None
) -> int:
    """Remove values in several transactions; returns how many."""
    total = 0
    while removed := await _write(
        context, scope, body, lambda write, found, _: collections.clear(write, found, partition)
    ):
        total += removed
        if total >= collections.MAX_ENTRIES:  # others put as fast
            break
    return total


async def _deleted(context: Context, scope: CollectionScope) -> Response:
    await _clear(context, scope, Operation(), None)
    await context.write(scope.tenant, partial(collections.delete, scope=scope))
    return Response(status_code=204)


async def _read(
    context: Context,
    scope: CollectionScope,
    body: Operation,
    query: Callable[[sa.Connection, Collection], T],
) -> T:
    def look(sql: sa.Connection) -> tuple[T] | None:
        if body.create and collections.find_or_none(sql, scope) is None:
            return None
        return (query(sql, collections.find(sql, scope)),)

    found = await context.read(scope.tenant, look)
    if found is None:
        await require_disk_space(context)
        return await _write(context, scope, body, lambda write, made, _: query(write.sql, made))
    return found[0]


async def _write(
    context: Context,
    scope: CollectionScope,
    body: Operation,
    change: Callable[[Write, Collection, Plan], T],
) -> T:
    def run(write: Write) -> T:
        if body.create:
            found = collections.create(write, scope)
        else:
            found = collections.find(write.sql, scope)
        plan = storage_usage.plan_of(write.sql, context.config.plans, tenant=scope.tenant)
        return change(write, found, plan)

    return await context.write(scope.tenant, run)


def _counted(partition: str | None) -> Callable[[sa.Connection, Collection], int]:
    return lambda sql, found: collections.count(sql, found, partition)


def _scope(
    caller: Principal, kind: CollectionKind, name: str = "", request: str = ""
) -> CollectionScope:
    caller.require_whole_environment()
    return CollectionScope(
        tenant=caller.tenant,
        environment=caller.environment,
        kind=kind,
        name=name,
        actor=caller.key,
        request=request,
    )


def _place(scope: CollectionScope, partition: str | None) -> tuple[str, str, str, str]:
    return scope.tenant, scope.environment, scope.name, partition or ""


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _decoded(text: str) -> bytes:
    """The bytes of a value. Raises InvalidInput, TooLarge."""
    try:
        value = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise InvalidInput(f"a value is not base64: {e}", parameter="value") from e
    if len(value) > MAX_VALUE_BYTES:
        raise TooLarge(
            f"a value of {len(value)} bytes: at most {MAX_VALUE_BYTES} are allowed; keep larger "
            f"ones in a volume, and put their path here",
            limit_bytes=MAX_VALUE_BYTES,
        )
    return value
