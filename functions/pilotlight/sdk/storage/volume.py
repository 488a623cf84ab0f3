"""`Volume`: named files that functions share, write and commit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from pilotlight.errors import InvalidInput, NotFound
from pilotlight.spec.identifiers import require_name
from pilotlight.spec.instances.volumes import check_mount_path

if TYPE_CHECKING:
    from pilotlight.client.client import Client
    from pilotlight.client.resources.volumes import VolumeEntry


class Volume:
    """A volume of the environment, by name: `@app.function(volumes={"/data": volume})`.

    In a function that mounts it, files are those below the mount path; `commit` stores what was
    written, `reload` brings what others committed. Outside, the methods below read and change what
    is committed."""

    def __init__(self, name: str, *, create_if_missing: bool = False) -> None:
        self.name = require_name("volume", name, parameter="name")
        self.create_if_missing = create_if_missing

    def __repr__(self) -> str:
        return f"<Volume {self.name}>"

    @classmethod
    def from_name(
        cls, name: str, *, create_if_missing: bool = False, environment_name: str | None = None
    ) -> Volume:
        """Refer to a volume. `create_if_missing`: a deploy, or a first use by a client, creates it.
        Raises InvalidInput for `environment_name`: a volume is one of the environment that is
        deployed to."""
        if environment_name is not None:
            raise InvalidInput(
                f"environment_name = {environment_name!r}: a function mounts volumes of its own "
                f"environment: deploy to it with -e",
                parameter="environment_name",
            )
        return cls(name, create_if_missing=create_if_missing)

    @classmethod
    def delete(cls, name: str) -> None:
        """Delete a volume and its files. Raises NotFound."""
        _client().delete_volume(name)

    def commit(self) -> None:
        """Store what this environment's functions wrote below the mount path, in one step. Raises
        Conflict for what a volume cannot have, StorageQuotaExceeded, StorageFull, Unavailable; then
        nothing was committed."""
        _in_function(self.name, "commit")

    def reload(self) -> None:
        """Bring what was committed elsewhere into the mount path. Files that were changed here and
        not committed stay as they are. Raises StorageFull, Unavailable."""
        _in_function(self.name, "reload")

    def listdir(self, path: str = "/", *, recursive: bool = False) -> list[VolumeEntry]:
        """List a directory of what is committed. Raises NotFound."""
        return list(self.iterdir(path, recursive=recursive))

    def iterdir(self, path: str = "/", *, recursive: bool = False) -> Iterator[VolumeEntry]:
        """Yield what is in a directory of what is committed, by path. Raises NotFound."""
        yield from self._ready().list_volume_files(self.name, path, recursive=recursive)

    def read_file(self, path: str) -> Iterator[bytes]:
        """Yield the committed content of a file. Raises NotFound."""
        yield from self._ready().read_volume_file(self.name, path)

    def read_file_into_fileobj(self, path: str, fileobj: BinaryIO) -> int:
        """Write the committed content of a file to `fileobj`; returns its size in bytes."""
        return sum(fileobj.write(piece) for piece in self.read_file(path))

    def remove_file(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, or with `recursive` a directory, and commit that."""
        self._ready().remove_volume_file(self.name, path, recursive=recursive)

    def batch_upload(self, *, force: bool = False) -> BatchUpload:
        """Upload files of this machine, and commit them at the end of the `with` block. `force`:
        replace files that exist."""
        return BatchUpload(self, force=force)

    def _ready(self) -> Client:
        client = _client()
        if self.create_if_missing:
            try:
                client.get_volume(self.name)
            except NotFound:
                client.create_volume(self.name)
        return client

    def put(self, files: Mapping[str, Path | bytes | BinaryIO], *, force: bool) -> None:
        """Upload files by their path in the volume, and commit them."""
        self._ready().put_volume_files(self.name, files, force=force)


class BatchUpload:
    """Files to upload, collected in a `with` block."""

    def __init__(self, volume: Volume, *, force: bool) -> None:
        self._volume = volume
        self._force = force
        self._files: dict[str, Path | bytes | BinaryIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self._volume.put(self._files, force=self._force)

    def put_file(self, local_file: str | os.PathLike[str] | BinaryIO, remote_path: str) -> None:
        """Add a file of this machine, or one that is opened as binary."""
        source = Path(local_file) if isinstance(local_file, str | os.PathLike) else local_file
        self._files[remote_path.strip("/")] = source

    def put_directory(self, local_path: str | os.PathLike[str], remote_path: str) -> None:
        """Add all files of a directory of this machine."""
        from pilotlight.client.resources.volumes import files_below

        self._files |= files_below(Path(local_path), remote_path)


def check_volumes(given: Any) -> dict[str, Volume]:
    """Check the option `volumes`: mount path → volume. Raises InvalidInput."""
    if not isinstance(given, Mapping):
        raise InvalidInput(
            f'volumes = {given!r}: must map paths to volumes, such as {{"/data": volume}}',
            parameter="volumes",
        )
    found: dict[str, Volume] = {}
    for path, volume in given.items():
        if not isinstance(volume, Volume):
            raise InvalidInput(
                f"volumes: {path!r}: {type(volume).__name__} is not a pilotlight.Volume",
                parameter="volumes",
            )
        found[check_mount_path(os.fspath(path))] = volume
    return found


def _client() -> Client:
    from pilotlight.client.sessions import client

    return client()


def _in_function(name: str, verb: str) -> None:
    from pilotlight.client.errors import error_from_response
    from pilotlight.client.socket_http import SocketClient
    from pilotlight.core.transport.calls_socket import calls_socket_here
    from pilotlight.current_call.context import calling_headers

    path = calls_socket_here(os.environ)
    if path is None:
        raise InvalidInput(
            f"{verb}() is for functions that mount the volume, while their instance takes calls: "
            f"not in enter() before the snapshot; outside, use batch_upload() and read_file()"
        )
    http = SocketClient(path, calling_headers)
    answer = http.send(http.build_request("POST", f"/v1/volumes/{name}:{verb}"), stream=True)
    body = answer.read()
    if not answer.is_success:
        raise error_from_response(answer.status_code, answer.headers, body)
