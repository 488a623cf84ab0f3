"""Saves the platform's state to one backup file, and loads it.

A backup is a tar archive: `manifest.json` (format, time, sha256 of every file), the database
(copied through SQLite's online backup interface, so that a running platform can be backed up), the
platform key (without which sealed secrets cannot be read), the blobs and the activators' journals.
It omits what can be rebuilt (the node's unpacked code and images, the weight cache, logs) and blobs
stored elsewhere (`platform.blobs`), whose location the manifest records. The file contains the
platform key: it has mode 0600 and must be protected like a password."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import shutil
import sqlite3
import stat
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pilotlight.controller.database import sqlite_file
from pilotlight.core.openat2 import open_file_beneath
from pilotlight.core.settings import PlatformSettings
from pilotlight.core.tar_stream import TarContent, read_tar_entries
from pilotlight.errors import Conflict, InvalidInput, NotFound
from snapshotter.linux.process_user import chown_to_root

FORMAT = 1
_DATABASE = "controller.db"
KEPT = ("activator", "blobs", _DATABASE, "platform.key")
"""Contents of a backup. The database has its name from homes of earlier releases; the next start
moves it to its directory."""
_INCOMPLETE = "blobs/incoming/"
"""Uploads in progress: they grow during the backup and are deleted when the platform starts."""
_MANIFEST = "manifest.json"
_PIECE_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 1 << 30
"""Maximum size of a manifest: names and hashes of some six million files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupSummary:
    """Summary of a saved or loaded backup.

    Attributes:
        blobs_at: location of blobs that are not part of the backup; None if they are.
    """

    files: int
    size_bytes: int
    created_at: float
    blobs_at: str | None = None


def external_blob_location(settings: PlatformSettings, home: Path) -> str | None:
    """The location of the platform's blobs; None if it is the home."""
    where = settings.blobs
    if where is None or (
        "://" not in where and Path(where).resolve() == (home / "blobs").resolve()
    ):
        return None
    return where


def save_backup(
    home: Path, target: Path, *, now: float, blobs_at: str | None = None
) -> BackupSummary:
    """Write a backup of `home` to `target` atomically; without blobs if they are at `blobs_at`.

    Raises NotFound if the home has no state.
    """
    if sqlite_file.find_database(home) is None:
        raise NotFound(
            f"{home} contains no platform state",
            hint="Pass the platform's --home, or start a platform with `pilotlight up`.",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pilotlight-backup-", dir=target.parent) as name:
        staging = Path(name)
        files = dict(
            _files(home, staging, [name for name in KEPT if name != "blobs" or blobs_at is None])
        )
        hashes = {relative: _sha256_of(kept) for relative, kept in files.items()}
        fresh = staging / "backup.tar"
        with tarfile.open(fresh, "w", format=tarfile.PAX_FORMAT) as tar:
            _add_manifest(tar, hashes, now, blobs_at)
            for relative, kept in sorted(files.items()):
                with kept.open() as file:
                    tar.addfile(_private(tar.gettarinfo(arcname=relative, fileobj=file)), file)
        fresh.chmod(0o600)
        fresh.replace(target)
        return BackupSummary(
            files=len(files), size_bytes=target.stat().st_size, created_at=now, blobs_at=blobs_at
        )


def load_backup(source: Path, home: Path, *, replace: bool, now: float) -> BackupSummary:
    """Load the backup `source` into `home`. All files are verified before anything is changed.

    With `replace`, an existing home is renamed to `<home>.before-<time>`. Raises NotFound,
    InvalidInput (damaged or altered) or Conflict (the home has state and `replace` is False)."""
    if not source.exists():
        raise NotFound(
            f"there is no file {source}", hint="Pass a file written by `pilotlight state backup`."
        )
    if holds_state(home) and not replace:
        raise Conflict(
            f"{home} already contains platform state",
            hint="Pass --yes to move it aside, or pass an empty --home.",
        )
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pilotlight-load-", dir=home.parent) as name:
        staging = Path(name) / "home"
        summary = _unpack(source, staging)
        if home.exists():
            if (configuration := home / "platform.yaml").exists():
                # a backup does not include the configuration
                shutil.copyfile(configuration, staging / "platform.yaml")
            home.rename(home.with_name(f"{home.name}.before-{int(now)}"))
        staging.rename(home)
    return summary


def holds_state(home: Path) -> bool:
    """Whether `home` contains state that a backup would include."""
    return sqlite_file.find_database(home) is not None or any(
        (home / name).exists() for name in KEPT
    )


def file_sha256(path: Path) -> str:
    """The hex SHA-256 digest of a file's content."""
    with path.open("rb") as f:
        return _sha256(f)


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Kept:
    """A file to back up, `name` below `root`: a file of the home, or a copy of one."""

    root: Path
    name: str

    def open(self) -> BinaryIO:
        """Open the file without following links below `root`. Raises OSError."""
        return os.fdopen(open_file_beneath(self.root, self.name), "rb")


def _files(home: Path, staging: Path, kept: Iterable[str]) -> Iterator[tuple[str, _Kept]]:
    for name in kept:
        if name == _DATABASE:
            yield name, _copy_database(home, staging)
        elif (top := (home / name).resolve()).is_dir():
            for below in sorted(_below(top)):
                relative = f"{name}/{below}"
                if not relative.startswith(_INCOMPLETE) and not below.endswith(
                    ("-wal", "-shm", ".lock", ".sock")
                ):
                    found = _Kept(top, below)
                    yield relative, _copy_growing(found, staging) if name == "activator" else found
        elif top.is_file():
            yield name, _Kept(home, name)


def _below(top: Path) -> Iterator[str]:
    """The regular files below `top`, relative to it."""
    for folder, _, names, descriptor in os.fwalk(top, follow_symlinks=False):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                if stat.S_ISREG(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                    yield (Path(folder) / name).relative_to(top).as_posix()


def _copy_database(home: Path, staging: Path) -> _Kept:
    path, owner = sqlite_file.find_database(home), sqlite_file.database_owner(home)
    assert path is not None
    into = staging / "database"
    into.mkdir(mode=0o700)
    if path == sqlite_file.database_path(home) and owner is not None:
        os.chown(into, owner.uid, owner.uid)
        owner = dataclasses.replace(owner, writes=(into,))
    else:
        owner = None

    def copy() -> None:
        with (
            contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as original,
            contextlib.closing(sqlite3.connect(into / "copy.db")) as fresh,
        ):
            original.backup(fresh)

    sqlite_file.run_as_owner(owner, copy)
    if owner is not None:
        chown_to_root(into)
    return _Kept(into, "copy.db")


def _copy_growing(found: _Kept, staging: Path) -> _Kept:
    """Copy a journal, which may be appended to meanwhile: the hash and the archive must be of the
    same bytes."""
    copy = hashlib.sha256(found.name.encode()).hexdigest()
    with found.open() as source, (staging / copy).open("xb") as target:
        shutil.copyfileobj(source, target)
    return _Kept(staging, copy)


def _sha256_of(kept: _Kept) -> str:
    with kept.open() as f:
        return _sha256(f)


def _add_manifest(
    tar: tarfile.TarFile, hashes: Mapping[str, str], now: float, blobs_at: str | None
) -> None:
    body = json.dumps(
        {"format": FORMAT, "created_at": now, "blobs_at": blobs_at, "sha256": dict(hashes)},
        sort_keys=True,
    ).encode()
    info = tarfile.TarInfo(_MANIFEST)
    info.size, info.mode, info.mtime = len(body), 0o600, int(now)
    tar.addfile(info, io.BytesIO(body))


def _private(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o600
    return info


def _unpack(source: Path, staging: Path) -> BackupSummary:
    staging.mkdir(mode=0o700)
    try:
        with source.open("rb") as file:
            found = read_tar_entries(file)
            manifest = _manifest(next(found, None), source)
            for member, content in found:
                _extract(member, content, staging, manifest["sha256"], source)
    except (tarfile.TarError, OSError) as e:
        raise InvalidInput(
            f"{source} is not a complete backup: {e}",
            hint="Use a file written by `pilotlight state backup`.",
        ) from e
    if missing := sorted(name for name in manifest["sha256"] if not (staging / name).exists()):
        raise InvalidInput(
            f"{source} lacks {missing[0]}", hint="The file is truncated: use another copy."
        )
    count, elsewhere = len(manifest["sha256"]), manifest.get("blobs_at")
    return BackupSummary(
        files=count,
        size_bytes=source.stat().st_size,
        created_at=float(manifest["created_at"]),
        blobs_at=None if elsewhere is None else str(elsewhere),
    )


def _manifest(first: tuple[tarfile.TarInfo, TarContent] | None, source: Path) -> Mapping[str, Any]:
    body: Any = None
    if first is not None and first[0].name == _MANIFEST:
        if first[0].size > MAX_MANIFEST_BYTES:
            raise InvalidInput(
                f"{source} has a manifest of {first[0].size} bytes: at most {MAX_MANIFEST_BYTES} "
                f"are allowed",
                hint="Do not load this file.",
            )
        with contextlib.suppress(ValueError, RecursionError):
            body = json.loads(b"".join(iter(lambda: first[1].read(_PIECE_BYTES), b"")))
    kinds = {"sha256": dict, "created_at": int | float}
    if (
        not isinstance(body, dict)
        or body.get("format") != FORMAT
        or not all(isinstance(body.get(k), t) for k, t in kinds.items())
    ):
        raise InvalidInput(
            f"{source} is not a backup of format {FORMAT}",
            hint="Use a file written by `pilotlight state backup`.",
        )
    return body


def _extract(
    member: tarfile.TarInfo,
    content: TarContent,
    staging: Path,
    hashes: Mapping[str, str],
    source: Path,
) -> None:
    # names come from the file: accept only regular files below the home that the manifest lists
    parts = member.name.split("/")
    if not member.isreg() or member.name not in hashes or parts[0] not in KEPT or ".." in parts:
        raise InvalidInput(
            f"{source} contains {member.name!r}, which no backup contains",
            hint="Do not load this file.",
        )
    path = staging / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        while piece := content.read(_PIECE_BYTES):
            file.write(piece)
    if file_sha256(path) != hashes[member.name]:
        raise InvalidInput(f"{source}: {member.name} was altered", hint="Use another copy.")
