"""Routes for batches, as OpenAI's clients speak them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Header, Path, Query
from pydantic import Field, StringConstraints

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.batches import batches
from pilotlight.controller.batches.targets import MAX_ENDPOINT
from pilotlight.controller.context import REQUIRE_DISK_SPACE, Ctx, Invoker, RequestId
from pilotlight.controller.database import audit_trail
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.protocol import HEADER_CUSTOMER

router = APIRouter(prefix="/v1/batches", tags=["batches"])
BatchId = Annotated[str, Path(max_length=64)]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
MetadataName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class CreateBatch(Body):
    """A batch to run."""

    input_file_id: str = Field(max_length=64)
    endpoint: str = Field(
        max_length=MAX_ENDPOINT,
        description="/v1/chat/completions, /v1/completions, /v1/embeddings, or "
        "/v1/functions/APP/FUNCTION:invoke; the `url` of every line",
    )
    completion_window: str = Field(
        default="24h",
        max_length=16,
        description="hours or days, at most 7d: what has not run by then is not run",
    )
    metadata: dict[MetadataName, MetadataValue] | None = Field(default=None, max_length=16)


class BatchProblem(Body):
    """What is wrong with a file, or why a batch stopped."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchProblems(Body):
    """Problems of a batch."""

    object: Literal["list"]
    data: list[BatchProblem]


class RequestCounts(Body):
    """The progress of a batch."""

    total: int
    completed: int
    failed: int


class BatchObject(Body):
    """A batch, as OpenAI's clients read it."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = Field(description="answers; once the batch has ended")
    error_file_id: str | None = Field(description="lines without an answer, and failed ones")
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Body):
    """A page of batches; the next one has `after` = `last_id`."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


@router.post("", dependencies=[REQUIRE_DISK_SPACE])
def create_batch(
    *,
    context: Ctx,
    caller: Invoker,
    request_id: RequestId,
    body: CreateBatch,
    customer: Annotated[
        str | None, Header(alias=HEADER_CUSTOMER, description="for which its lines are run")
    ] = None,
) -> BatchObject:
    """Run the lines of a file. They run with the rights and quotas of this key, at priority
    `batch`."""
    with context.store.write() as write:
        batch = batches.create(
            write,
            caller,
            input_file=body.input_file_id,
            endpoint=body.endpoint,
            completion_window=body.completion_window,
            metadata=body.metadata or {},
            customer=customer,
        )
        after = {"endpoint": body.endpoint, "input_file": body.input_file_id}
        _record(write, caller, "batch.create", batch.id, request=request_id, after=after)
    return BatchObject(**batch.to_json())


@router.get("")
def list_batches(
    *,
    context: Ctx,
    caller: Invoker,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> BatchList:
    """List the environment's batches, newest first; of a key that is bound to an app, its own."""
    with context.store.read() as sql:
        found = batches.listing(sql, caller, after=after, limit=limit + 1)
        ended = batches.ended_lines(sql, [one.id for one in found if one.is_active])
    data = [BatchObject(**one.to_json(ended.get(one.id, (0, 0)))) for one in found[:limit]]
    return BatchList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(found) > limit,
    )


@router.get("/{batch}")
def get_batch(context: Ctx, caller: Invoker, batch: BatchId) -> BatchObject:
    """Return a batch and its progress."""
    with context.store.read() as sql:
        found = batches.find(sql, caller, batch)
        ended = batches.ended_lines(sql, [found.id])
    return BatchObject(**found.to_json(ended.get(found.id, (0, 0))))


@router.post("/{batch}/cancel")
def cancel_batch(
    context: Ctx, caller: Invoker, request_id: RequestId, batch: BatchId
) -> BatchObject:
    """Cancel a batch. Answers so far are in its files; other lines are in its error file."""
    with context.store.write() as write:
        cancelled = batches.cancel(write, caller, batch)
        _record(write, caller, "batch.cancel", cancelled.id, request=request_id)
        ended = batches.ended_lines(write.sql, [cancelled.id])
    return BatchObject(**cancelled.to_json(ended.get(cancelled.id, (0, 0))))


def _record(
    write: Write, caller: Principal, action: str, subject: str, *, request: str, after: Any = None
) -> None:
    audit_trail.record(
        write,
        tenant=caller.tenant,
        actor=caller.key,
        action=action,
        subject=subject,
        after=after,
        request=request,
    )
