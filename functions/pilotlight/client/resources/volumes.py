"""Client methods for volumes: names, files, and commits of what this machine has."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import posixpath
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self

from pilotlight.client.json_stream import Json
from pilotlight.client.resources.weights import WeightsResources
from pilotlight.client.transport import path_segment
from pilotlight.core.volumes.entries import CHUNK_BYTES, Entry, EntryInvalid, EntryKind
from pilotlight.errors import Conflict, InvalidInput

_PUT_ENTRIES = 500
_PUT_CHUNKS = 5000
"""Of one commit: the controller reads 10,000 JSON values of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeInfo:
    """A volume, and its newest manifest's version (commits so far), entries and size."""

    name: str
    id: str
    version: int
    entries: int
    size_bytes: int
    created_at: float
    updated_at: float

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse the response of the controller. Unknown members, of newer servers, are ignored."""
        return cls(**{f.name: body[f.name] for f in dataclasses.fields(cls) if f.name in body})


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeEntry:
    """A path of a volume. `kind`: `file`, `directory` or `link` (to `target`)."""

    path: str
    kind: str
    size_bytes: int = 0
    mode: int = 0
    modified_ns: int = 0
    target: str = ""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse an entry of the controller's answer."""
        return cls(**{f.name: body[f.name] for f in dataclasses.fields(cls) if f.name in body})


class _Source:
    """What is put at one path: a file of this machine, or bytes."""

    def __init__(self, path: str, source: Path | bytes | BinaryIO) -> None:
        self.path = path
        self._source = source.read() if isinstance(source, io.IOBase) else source
        if not isinstance(self._source, bytes | os.PathLike):
            raise InvalidInput(f"{path}: give a path, bytes, or a file opened as binary")
        self.entry = self._described()

    def _described(self) -> Entry:
        with self.opened() as file:
            status = os.fstat(file.fileno()) if isinstance(self._source, os.PathLike) else None
            chunks, size = [], 0
            while data := file.read(CHUNK_BYTES):
                chunks.append(hashlib.sha256(data).hexdigest())
                size += len(data)
        return Entry(
            path=self.path,
            kind=EntryKind.FILE,
            size_bytes=size,
            mode=0o644 if status is None else stat.S_IMODE(status.st_mode) & 0o777,
            modified_ns=0 if status is None else status.st_mtime_ns,
            chunks=tuple(chunks),
        )

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        if isinstance(self._source, bytes):
            yield io.BytesIO(self._source)
            return
        assert isinstance(self._source, os.PathLike)
        with open(self._source, "rb") as file:
            yield file

    def chunk(self, digest: str) -> bytes:
        """The bytes of a chunk. Raises InvalidInput if the file was changed."""
        with self.opened() as file:
            file.seek(self.entry.chunks.index(digest) * CHUNK_BYTES)
            data = file.read(CHUNK_BYTES)
        if hashlib.sha256(data).hexdigest() != digest:
            raise InvalidInput(f"{self.path} changed while it was read: put it again")
        return data


class VolumeResources(WeightsResources):
    """Methods of `pilotlight.client.client.Client` for volumes."""

    # -- volumes -----------------------------------------------------------------------------------
    def list_volumes(self) -> list[VolumeInfo]:
        """List the volumes of the environment by name."""
        return [VolumeInfo.from_json(body) for body in self._list("/v1/volumes", "volumes")]

    def get_volume(self, name: str) -> VolumeInfo:
        """Return a volume. Raises NotFound."""
        return VolumeInfo.from_json(self._transport.request("GET", _path(name)).json())

    def create_volume(self, name: str) -> VolumeInfo:
        """Create an empty volume; one that exists stays as it is."""
        return VolumeInfo.from_json(self._transport.request("PUT", _path(name)).json())

    def delete_volume(self, name: str) -> None:
        """Delete a volume and its files. Raises NotFound."""
        self._transport.request("DELETE", _path(name))

    def list_volume_files(
        self, name: str, path: str = "", *, recursive: bool = False
    ) -> Iterator[VolumeEntry]:
        """Yield what is in a directory of a volume, by path; a file yields itself. Raises
        NotFound."""
        params = {"path": path.strip("/"), "recursive": "true" if recursive else "false"}
        after: str | None = ""
        while after is not None:
            answer: Json = self._transport.request(
                "GET", f"{_path(name)}/files", params={**params, "after": after}
            ).json()
            yield from map(VolumeEntry.from_json, answer["entries"])
            after = answer["next"]

    def read_volume_file(self, name: str, path: str) -> Iterator[bytes]:
        """Yield the content of a file. Raises NotFound, InvalidInput."""
        params = {"path": path.strip("/")}
        with self._transport.stream("GET", f"{_path(name)}/content", params=params) as response:
            yield from response.iter_bytes()

    def put_volume_files(
        self, name: str, files: Mapping[str, Path | bytes | BinaryIO], *, force: bool = True
    ) -> int:
        """Upload files, and commit them: path in the volume → file of this machine, or bytes.
        Returns the version. 500 files are one commit; more are several, in order of their paths.

        `force`: replace files that exist; else Conflict is raised before anything is changed."""
        sources = [_source(path, files[path]) for path in sorted(files)]
        if not force:
            there = {e.path for e in self.list_volume_files(name, recursive=True)}
            if taken := sorted(there & {source.path for source in sources}):
                raise Conflict(f"volume {name!r} has {taken[0]!r} already", path=taken[0])
        version = 0
        for part in _parts(sources):
            version = self._commit_sources(name, part)
        return version if sources else self.get_volume(name).version

    def remove_volume_file(self, name: str, path: str, *, recursive: bool = False) -> int:
        """Remove a file, a link, or an empty directory, and commit; `recursive`: a directory with
        all that it contains. Raises NotFound, Conflict for a directory that is not empty."""
        at = path.strip("/")
        found = list(self.list_volume_files(name, at))
        if not recursive and any(entry.path != at for entry in found):
            raise Conflict(
                f"{at!r} is a directory that is not empty: pass recursive=True, or -r",
                path=at,
            )
        return self._commit(name, {"remove_trees": [at]} if recursive else {"remove": [at]})

    def _commit_sources(self, name: str, sources: Sequence[_Source]) -> int:
        body = {"put": [source.entry.to_json() for source in sources]}
        where = {digest: source for source in sources for digest in source.entry.chunks}
        answer = self._transport.request(
            "POST", f"{_path(name)}/commit", json=body, accept_status=frozenset({409})
        )
        if answer.status_code != 409:
            return int(answer.json()["version"])
        for digest in answer.json().get("missing", ()):
            self._transport.request(
                "PUT", f"/v1/volume-chunks/{digest}", content=where[digest].chunk(digest)
            )
        return self._commit(name, body)

    def _commit(self, name: str, body: Json) -> int:
        return int(
            self._transport.request("POST", f"{_path(name)}/commit", json=body).json()["version"]
        )


def files_below(local: Path, remote: str) -> dict[str, Path | bytes | BinaryIO]:
    """The files of a directory of this machine, by their path in a volume below `remote`; a file is
    put at `remote`, or below it if that ends in `/`. Symbolic links are followed."""
    if local.is_file():
        at = f"{remote}{local.name}" if remote.endswith("/") or not remote else remote
        return {at.strip("/"): local}
    if not local.is_dir():
        raise InvalidInput(f"{local} is neither a file nor a directory", parameter="local")
    found: dict[str, Path | bytes | BinaryIO] = {}
    for folder, names, files in os.walk(local):
        names.sort()
        for file in sorted(files):
            path = Path(folder) / file
            inside = PurePosixPath(path.relative_to(local).as_posix())
            found[posixpath.join(remote.strip("/"), str(inside)).strip("/")] = path
    return found


def _source(path: str, source: Path | bytes | BinaryIO) -> _Source:
    try:
        return _Source(path.strip("/"), source)
    except EntryInvalid as e:
        raise InvalidInput(str(e), parameter="path") from e


def _parts(sources: Sequence[_Source]) -> Iterator[list[_Source]]:
    part: list[_Source] = []
    chunks = 0
    for source in sources:
        if part and (len(part) >= _PUT_ENTRIES or chunks + len(source.entry.chunks) > _PUT_CHUNKS):
            yield part
            part, chunks = [], 0
        part.append(source)
        chunks += len(source.entry.chunks)
    if part:
        yield part


def _path(name: str) -> str:
    return f"/v1/volumes/{path_segment(name)}"
