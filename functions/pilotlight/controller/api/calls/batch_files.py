"""Routes for batch files, as OpenAI's clients speak them."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import Path, Query, Request
from fastapi.responses import StreamingResponse

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.batches import batches, files, uploads
from pilotlight.controller.batches.files import KEEP_S, MAX_FILE_BYTES, MIN_KEEP_S
from pilotlight.controller.context import REQUIRE_DISK_SPACE, Ctx, Invoker, RequestId
from pilotlight.controller.database import audit_trail
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import Conflict

router = APIRouter(prefix="/v1/files", tags=["batches"])
FileId = Annotated[str, Path(max_length=64)]
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["purpose", "file"],
                    "properties": {
                        "purpose": {"const": "batch"},
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": f"JSON lines, at most {MAX_FILE_BYTES} bytes",
                        },
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": MIN_KEEP_S,
                            "maximum": int(KEEP_S),
                        },
                    },
                }
            }
        },
    }
}


class FileObject(Body):
    """A file, as OpenAI's clients read it."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["uploading", "processed"]
    status_details: None = None


class FileList(Body):
    """A page of files; the next one has `after` = `last_id`."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Body):
    """A file that was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


@router.post("", openapi_extra=_FORM, dependencies=[REQUIRE_DISK_SPACE])
async def create_batch_file(
    context: Ctx, caller: Invoker, request: Request, request_id: RequestId
) -> FileObject:
    """Upload the file of a batch: JSON lines, each of at most 1 MiB. The form's fields come before
    the file, or after it."""
    return FileObject(**(await uploads.receive(context, caller, request, request_id)).to_json())


@router.get("")
def list_batch_files(
    *,
    context: Ctx,
    caller: Invoker,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> FileList:
    """List the environment's batch files; of a key that is bound to an app, its own."""
    with context.store.read() as sql:
        found = files.listing(
            sql,
            caller,
            now=context.clock(),
            after=after,
            limit=limit + 1,
            is_ascending=order == "asc",
            purpose=purpose,
        )
    data = [FileObject(**one.to_json()) for one in found[:limit]]
    return FileList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(found) > limit,
    )


@router.get("/{file}")
def get_batch_file(context: Ctx, caller: Invoker, file: FileId) -> FileObject:
    """Return a file."""
    with context.store.read() as sql:
        return FileObject(**files.find(sql, caller, file, now=context.clock()).to_json())


@router.get(
    "/{file}/content",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/jsonl": {}}}},
)
async def get_batch_file_content(context: Ctx, caller: Invoker, file: FileId) -> StreamingResponse:
    """Return the content of a file."""
    found = await context.read(
        caller.tenant, lambda sql: files.find(sql, caller, file, now=context.clock())
    )
    return StreamingResponse(
        files.pieces(context, found),
        media_type="application/jsonl",
        headers={
            "content-length": str(found.size_bytes),
            "content-disposition": f"attachment; filename*=utf-8''{quote(found.filename, safe='')}",
            "x-content-type-options": "nosniff",
        },
    )


@router.delete("/{file}")
def delete_batch_file(
    context: Ctx, caller: Invoker, request_id: RequestId, file: FileId
) -> DeletedFile:
    """Delete a file. 409 while a batch reads it."""
    with context.store.write() as write:
        found = files.find(write.sql, caller, file, now=write.now)
        if (batch := batches.is_used(write.sql, found.id)) is not None:
            raise Conflict(f"file {found.id} is in use by {batch}: cancel that batch, or wait")
        files.end(write, found.id)
        audit_trail.record(
            write,
            tenant=caller.tenant,
            actor=caller.key,
            action="batch_file.delete",
            subject=found.id,
            request=request_id,
        )
    return DeletedFile(id=found.id)
