"""Routes for prediction logs. A key that may deploy a function may read its log, and each read is
in the audit log. Queries run where the caller is: the controller sends files."""

from __future__ import annotations

import math
from typing import Annotated

import anyio.to_thread
from fastapi import Depends, Query, Request
from fastapi.responses import StreamingResponse

from pilotlight.controller.api.account.billing import parse_time
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import Ctx, Deployer, RequestId, require_platform_token
from pilotlight.controller.database import audit_trail
from pilotlight.controller.drift import sketch_store
from pilotlight.controller.drift.sketch_store import SketchFile
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.predictions import files, storage
from pilotlight.controller.predictions.files import FileQuery, PredictionFile, StoredFile
from pilotlight.controller.registry import launch_spec
from pilotlight.errors import TooLarge
from pilotlight.protocol import PREDICTIONS_PATH

router = APIRouter(prefix="/v1/apps", tags=["prediction logs"])
internal = APIRouter(dependencies=[Depends(require_platform_token)], include_in_schema=False)
Time = Annotated[
    str | None, Query(max_length=200, description="seconds since the epoch, or ISO 8601")
]


class DeletedPredictions(Body):
    """What was deleted. Rows that are on their way are not among them."""

    files: int
    rows: int


@router.get(
    "/{app}/functions/{function}/predictions",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-tar": {}}}},
)
async def read_predictions(
    *,
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    app: str,
    function: str,
    since: Time = None,
    until: Time = None,
) -> StreamingResponse:
    """Return the Parquet files of a prediction log as a tar archive, in whole hours. The read is
    recorded in the audit log before the first byte."""
    query = _query(caller, app, function, since, until)

    def find() -> list[StoredFile]:
        with context.store.write() as write:
            found = files.find(write.sql, query, now=write.now)
            audit_trail.record(
                write,
                tenant=caller.tenant,
                actor=caller.key,
                action="predictions.read",
                subject=_subject(query),
                after={
                    "since": since,
                    "until": until,
                    "files": len(found),
                    "rows": sum(one.rows for one in found),
                    "bytes": sum(one.size_bytes for one in found),
                },
                request=request,
            )
        return found

    found = await context.threads.run(caller.tenant, find)
    archive = storage.archive(context, caller.tenant, found)
    return StreamingResponse(archive, media_type="application/x-tar")


@router.delete("/{app}/functions/{function}/predictions")
def delete_predictions(
    *,
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    app: str,
    function: str,
    until: Time = None,
) -> DeletedPredictions:
    """Delete the prediction log of a function, or the hours that begin before `until`."""
    query = _query(caller, app, function, None, until)
    with context.store.write() as write:
        count, rows = files.delete(write, query)
        function_id = launch_spec.function_id(
            tenant=caller.tenant, environment=caller.environment, app=app, function=function
        )
        sketch_store.end(write, function_id, tenant=caller.tenant, until=query.until)
        audit_trail.record(
            write,
            tenant=caller.tenant,
            actor=caller.key,
            action="predictions.delete",
            subject=_subject(query),
            after={"until": until, "files": count, "rows": rows},
            request=request,
        )
    return DeletedPredictions(files=count, rows=rows)


@internal.put(f"{PREDICTIONS_PATH}/{{name}}")
async def put_predictions(context: Ctx, request: Request, name: str) -> dict[str, bool]:
    """Store a file of an activator, or count its sketch. `stored` is false for a deleted function,
    or after its window."""
    data = await _body(request)
    if not name.endswith(sketch_store.SUFFIX):
        return {"stored": await storage.store(context, name, data)}
    file = PredictionFile.parse(name)

    def count() -> bool:
        found = SketchFile.parse(data)
        with context.store.write() as write:
            return sketch_store.ingest(write, file, found, plans=context.config.plans)

    return {"stored": await anyio.to_thread.run_sync(count)}


async def _body(request: Request) -> bytes:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > files.MAX_FILE_BYTES:
            raise TooLarge(
                f"predictions: a file has at most {files.MAX_FILE_BYTES} bytes",
                limit_bytes=files.MAX_FILE_BYTES,
            )
    return bytes(data)


def _query(
    caller: Principal, app: str, function: str, since: str | None, until: str | None
) -> FileQuery:
    caller.require_function(app, function)
    begin, end = parse_time("since", since), parse_time("until", until)
    return FileQuery(
        tenant=caller.tenant,
        environment=caller.environment,
        app=app,
        function=function,
        since=-math.inf if begin is None else begin,
        until=math.inf if end is None else end,
    )


def _subject(query: FileQuery) -> str:
    return f"{query.environment}/{query.app}/{query.function}"
