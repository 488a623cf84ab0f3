"""`pilotlight volume …`: create, list and delete volumes, and copy files to and from them."""

from __future__ import annotations

import dataclasses
import posixpath
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import count_files, format_bytes, format_table, format_time
from pilotlight.cli.core.session import Session
from pilotlight.core.terminal import ForeignOutput
from pilotlight.errors import Conflict, InvalidInput

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pilotlight.client.client import Client
    from pilotlight.client.resources.volumes import VolumeEntry

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name, as shown by `pilotlight volume list`.")
]
Recursive = Annotated[
    bool, typer.Option("--recursive", "-r", help="Directories with all that they contain.")
]
_COLUMNS = {
    "name": "volume",
    "size_bytes": "size",
    "entries": "entries",
    "version": "commits",
    "updated_at": "changed",
}
_ENTRY_COLUMNS = {"path": "path", "kind": "kind", "size_bytes": "size", "modified_ns": "modified"}


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "volume",
        "Manage volumes: files that functions write, commit and share.",
        {
            "list": list_,
            "create": create,
            "ls": ls,
            "put": put,
            "get": get,
            "rm": rm,
            "delete": delete,
        },
    )


def list_(session: Session) -> None:
    """List the volumes of the environment."""
    found = session.request(lambda client: client.list_volumes())
    rows = [dataclasses.asdict(one) for one in found]
    session.show(rows, lambda: _volumes(rows))


def create(session: Session, name: Name) -> None:
    """Create an empty volume; one that exists stays as it is."""
    made = session.request(lambda client: client.create_volume(name))
    session.show(dataclasses.asdict(made), lambda: f"volume {made.name}")


def ls(
    session: Session,
    name: Name,
    path: Annotated[str, typer.Argument(metavar="[PATH]", help="A directory of it.")] = "/",
    recursive: Recursive = False,
) -> None:
    """List the committed files of a volume."""
    found = session.request(
        lambda client: list(client.list_volume_files(name, path, recursive=recursive))
    )
    rows = [dataclasses.asdict(one) for one in found]
    session.show(rows, lambda: _entries(rows))


def put(
    session: Session,
    name: Name,
    local: Annotated[Path, typer.Argument(metavar="LOCAL", help="A file, or a directory.")],
    remote: Annotated[
        str,
        typer.Argument(
            metavar="[REMOTE]", help="Where in the volume; with a / at its end, below it."
        ),
    ] = "/",
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace files that exist.")] = False,
) -> None:
    """Upload files of this machine, and commit them."""
    from pilotlight.client.resources.volumes import files_below

    files = files_below(session.cwd / local.expanduser(), remote)

    def send(client: Client) -> int:
        return client.put_volume_files(name, files, force=force)

    version = session.request(send)
    session.show(
        {"volume": name, "files": sorted(files), "version": version},
        lambda: f"{count_files(len(files))} put into volume {name}",
    )


def get(
    session: Session,
    name: Name,
    remote: Annotated[str, typer.Argument(metavar="REMOTE", help="A file, or a directory.")],
    local: Annotated[
        str,
        typer.Argument(
            metavar="[LOCAL]", help="A file or directory of this machine; - is standard output."
        ),
    ] = ".",
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace files that exist.")] = False,
) -> None:
    """Download a file, or a directory with all that it contains."""
    with session.client() as client:
        found = list(client.list_volume_files(name, remote, recursive=True))
        files = [entry for entry in found if entry.kind == "file"]
        if local == "-":
            if len(files) != 1:
                raise InvalidInput(f"{remote} is not one file: give a directory in place of -")
            output = ForeignOutput(sys.stdout)
            for piece in client.read_volume_file(name, files[0].path):
                output.write(piece)
            return
        target = session.cwd / Path(local).expanduser()
        places = _places(files, remote.strip("/"), target)
        if not force and (taken := [p for p in places.values() if p.exists()]):
            raise Conflict(f"{taken[0]} exists: pass --force to replace it")
        for path, place in places.items():
            _download(client, name, path, place)
    session.show(
        {"volume": name, "files": {path: str(place) for path, place in places.items()}},
        lambda: f"{count_files(len(places))} of volume {name} in {target}",
    )


def rm(
    session: Session,
    name: Name,
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file, or a directory.")],
    recursive: Recursive = False,
    yes: Yes = False,
) -> None:
    """Remove a file or directory of a volume, and commit that."""
    if recursive:
        session.confirm(f"Remove {path} of volume {name}, with all that it contains?", yes=yes)
    version = session.request(
        lambda client: client.remove_volume_file(name, path, recursive=recursive)
    )
    session.show(
        {"volume": name, "removed": path, "version": version},
        lambda: f"{path} removed from volume {name}",
    )


def delete(session: Session, name: Name, yes: Yes = False) -> None:
    """Delete a volume and all its files. Functions that mount it cannot commit it."""
    session.confirm(f"Delete volume {name}, with all its files?", yes=yes)
    session.request(lambda client: client.delete_volume(name))
    session.show({"deleted": name}, lambda: f"volume {name} deleted")


def _places(files: list[VolumeEntry], remote: str, target: Path) -> dict[str, Path]:
    """Path in the volume → where it is written."""
    if [entry.path for entry in files] == [remote]:
        inside = target.is_dir()
        return {remote: target / posixpath.basename(remote) if inside else target}
    prefix = f"{remote}/" if remote else ""
    return {entry.path: target / entry.path.removeprefix(prefix) for entry in files}


def _download(client: Client, name: str, path: str, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = place.with_name(f".{place.name}.part")
    try:
        with fresh.open("wb") as file:
            for piece in client.read_volume_file(name, path):
                file.write(piece)
        fresh.rename(place)
    finally:
        fresh.unlink(missing_ok=True)


def _volumes(rows: list[dict[str, Any]]) -> RenderableType:
    texts = [
        {
            **row,
            "size_bytes": format_bytes(row["size_bytes"]),
            "updated_at": format_time(row["updated_at"]),
        }
        for row in rows
    ]
    return format_table(texts, _COLUMNS, empty="no volumes: pilotlight volume create NAME")


def _entries(rows: list[dict[str, Any]]) -> RenderableType:
    texts = [
        {
            **row,
            "path": f"{row['path']} -> {row['target']}" if row["target"] else row["path"],
            "size_bytes": format_bytes(row["size_bytes"]) if row["kind"] == "file" else "",
            "modified_ns": format_time(row["modified_ns"] / 1e9) if row["modified_ns"] else "",
        }
        for row in rows
    ]
    return format_table(texts, _ENTRY_COLUMNS, empty="no files")
