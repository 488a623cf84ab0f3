"""Routes for volumes: creating, listing and deleting them, and the files that they have."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import REQUIRE_DISK_SPACE, Ctx, Deployer, RequestId
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry.app_ref import EnvironmentRef
from pilotlight.controller.volumes import volumes
from pilotlight.controller.volumes.volumes import Volume
from pilotlight.errors import Conflict

router = APIRouter(prefix="/v1", tags=["volumes"])
Name = Annotated[str, Path(max_length=63)]
FilePath = Annotated[str, Query(max_length=1024)]


class VolumeInfo(Body):
    """A volume, and what its newest manifest has."""

    name: str
    id: str
    version: int = Field(description="number of its commits")
    entries: int = Field(description="files, directories and links")
    size_bytes: int = Field(description="of its files; equal chunks are stored once")
    created_at: float
    updated_at: float

    @classmethod
    def of(cls, volume: Volume) -> VolumeInfo:
        """Describe a volume."""
        return cls(**{name: getattr(volume, name) for name in cls.model_fields})


class VolumeList(Body):
    """The volumes of one environment."""

    volumes: list[VolumeInfo]


class VolumeEntries(Body):
    """Entries of a volume, by path. `next`: pass it as `after` for those that follow; null: there
    are no more."""

    entries: list[dict[str, Any]]
    next: str | None


class CommitRequest(Body):
    """What a commit changes: entries that are added or replaced, paths that are removed, and
    directories that are removed with all that they contain."""

    put: list[dict[str, Any]] = Field(default=[], max_length=1000)
    remove: list[str] = Field(default=[], max_length=1000)
    remove_trees: list[str] = Field(default=[], max_length=100)


class CommitResponse(Body):
    """The version that the commit made."""

    version: int


class ChunkInfo(Body):
    """A stored chunk."""

    digest: str
    size_bytes: int


@router.get("/volumes")
async def list_volumes(context: Ctx, caller: Deployer) -> VolumeList:
    """List the volumes of the environment."""
    rows = await context.read(caller.tenant, partial(volumes.listing, scope=_scope(caller)))
    return VolumeList(volumes=[VolumeInfo.of(row) for row in rows])


@router.get("/volumes/{name}")
async def get_volume(context: Ctx, caller: Deployer, name: Name) -> VolumeInfo:
    """Return one volume."""
    return VolumeInfo.of(
        await context.read(caller.tenant, partial(volumes.find, scope=_scope(caller), name=name))
    )


@router.put("/volumes/{name}", dependencies=[REQUIRE_DISK_SPACE])
async def create_volume(
    context: Ctx, caller: Deployer, request: RequestId, name: Name
) -> VolumeInfo:
    """Create an empty volume; one that exists stays as it is."""
    caller.require_whole_environment()
    scope = _scope(caller, request)
    return VolumeInfo.of(
        await context.write(caller.tenant, partial(volumes.create, scope=scope, name=name))
    )


@router.delete("/volumes/{name}", status_code=204)
async def delete_volume(context: Ctx, caller: Deployer, request: RequestId, name: Name) -> Response:
    """Delete a volume and its files. Functions that mount it keep what is on their node until they
    end, and cannot commit it."""
    caller.require_whole_environment()
    await context.volumes.delete(_scope(caller, request), name)
    return Response(status_code=204)


@router.get("/volumes/{name}/files")
async def list_files(
    context: Ctx,
    caller: Deployer,
    name: Name,
    *,
    path: FilePath = "",
    recursive: bool = False,
    after: FilePath = "",
) -> VolumeEntries:
    """List what is in a directory of a volume, or below it; a file lists itself."""

    def look(sql: Any) -> list[Mapping[str, Any]]:
        volume = volumes.find(sql, _scope(caller), name=name)
        found = volumes.entries(sql, volume, below=path, after=after, recursive=recursive)
        return [entry.to_json() for entry in found]

    rows = await context.read(caller.tenant, look)
    more = len(rows) == volumes.MAX_LISTED
    shown = [{k: v for k, v in row.items() if k != "chunks"} for row in rows]
    return VolumeEntries(entries=shown, next=str(rows[-1]["path"]) if more else None)


@router.get("/volumes/{name}/content", response_class=StreamingResponse)
async def read_file(context: Ctx, caller: Deployer, name: Name, path: FilePath) -> Response:
    """Return the content of a file."""
    entry, pieces = await context.volumes.content(_scope(caller), name, path)
    headers = {
        "content-length": str(entry.size_bytes),
        "cache-control": "private, no-transform",
        "content-disposition": "attachment",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(pieces, headers=headers, media_type="application/octet-stream")


@router.post("/volumes/{name}/commit", dependencies=[REQUIRE_DISK_SPACE])
async def commit_volume(
    *, context: Ctx, caller: Deployer, request: RequestId, name: Name, body: CommitRequest
) -> CommitResponse:
    """Change files of a volume in one step. 409 with `missing` names chunks to upload first; then
    nothing was changed."""
    caller.require_whole_environment()
    version, missing = await context.volumes.commit_client(
        _scope(caller, request),
        name,
        put=volumes.parse_entries(body.put),
        remove=volumes.parse_paths(body.remove),
        remove_trees=volumes.parse_paths(body.remove_trees),
    )
    if version is None:
        raise Conflict(
            f"{len(missing)} chunks were not uploaded: PUT /v1/volume-chunks/{{digest}} each, and "
            f"commit again",
            missing=missing,
        )
    return CommitResponse(version=version)


@router.put(
    "/volume-chunks/{digest}",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        }
    },
)
async def put_chunk(context: Ctx, caller: Deployer, request: Request, digest: str) -> ChunkInfo:
    """Store a chunk of a file, of at most 16 MiB, under its sha256. It is kept for
    `controller.blob_grace_s` unless a commit refers to it."""
    caller.require_whole_environment()
    size = await context.volumes.upload(caller.tenant, digest, request.stream())
    return ChunkInfo(digest=digest, size_bytes=size)


def _scope(caller: Principal, request: str = "") -> EnvironmentRef:
    return EnvironmentRef(
        tenant=caller.tenant, environment=caller.environment, actor=caller.key, request=request
    )
