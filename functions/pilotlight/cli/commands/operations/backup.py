"""All that a platform must not lose, as one file, and back.

A backup is a tar archive: `manifest.json` (format, time, sha256 of every file), the databases
(copied through SQLite's online backup interface, so that a running platform can be saved), the
platform's key (without which the sealed secrets cannot be read), the blobs and the activators'
journals. What can be made again (the node's unpacked code and images, the weight cache, logs) is
left out, and so are blobs that lie elsewhere (`platform.blobs`): the manifest then says where. The
file holds the key: it is written 0600 and must be kept like a password."""

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
from snapshotter.linux.process_user import take_file_back

FORMAT = 1
_DATABASE = "controller.db"
KEPT = ("activator", "blobs", _DATABASE, "platform.key")
"""What a backup carries. The database has the name that it had in homes of earlier releases; the
next start moves it to its directory."""
_INCOMPLETE = "blobs/incoming/"
"""Uploads under way: they grow while we read, and go when the platform starts."""
_MANIFEST = "manifest.json"
_PIECE_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 1 << 30
"""Of a backup: names and hashes of some six million files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupSummary:
    """What was saved or loaded.

    Attributes:
        blobs_at: where the platform's blobs lie that are not part of the backup; None: they are.
    """

    files: int
    size_bytes: int
    created_at: float
    blobs_at: str | None = None


def external_blob_location(settings: PlatformSettings, home: Path) -> str | None:
    """Where the platform's blobs lie, when that is not in its home."""
    where = settings.blobs
    if where is None or (
        "://" not in where and Path(where).resolve() == (home / "blobs").resolve()
    ):
        return None
    return where


def save_backup(
    home: Path, target: Path, *, now: float, blobs_at: str | None = None
) -> BackupSummary:
    """Write a backup of `home` to `target`, whole or not at all; without blobs when they lie at
    `blobs_at`.

    Raises NotFound when there is nothing to save.
    """
    if sqlite_file.find_database(home) is None:
        raise NotFound(
            f"{home} holds no platform's state",
            hint="Name its --home, or start one with `pilotlight up`.",
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
    """Put the state of `source` into `home`. Every file is checked before anything is touched.

    With `replace`, what is there is moved aside to `<home>.before-<time>`. Raises NotFound,
    InvalidInput (broken or altered) or Conflict (the home is not empty and `replace` is False)."""
    if not source.exists():
        raise NotFound(
            f"there is no file {source}", hint="Name a file that `pilotlight state backup` wrote."
        )
    if holds_state(home) and not replace:
        raise Conflict(
            f"{home} already holds a platform's state",
            hint="Pass --yes to set it aside, or name an empty --home.",
        )
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pilotlight-load-", dir=home.parent) as name:
        staging = Path(name) / "home"
        summary = _unpack(source, staging)
        if home.exists():
            if (configuration := home / "platform.yaml").exists():
                # how it is run here is not part of a backup
                shutil.copyfile(configuration, staging / "platform.yaml")
            home.rename(home.with_name(f"{home.name}.before-{int(now)}"))
        staging.rename(home)
    return summary


def holds_state(home: Path) -> bool:
    """Whether anything in `home` would be lost by replacing it."""
    return sqlite_file.find_database(home) is not None or any(
        (home / name).exists() for name in KEPT
    )


def file_sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as f:
        return _sha256(f)


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Kept:
    """A file of the home, or our copy of one: `name` below `root`."""

    root: Path
    name: str

    def open(self) -> BinaryIO:
        """Without following a link below `root`. Raises OSError."""
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
    """Regular files below `top`, relative to it."""
    for folder, _, names, descriptor in os.fwalk(top, follow_symlinks=False):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # it was there
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
        take_file_back(into)
    return _Kept(into, "copy.db")


def _copy_growing(found: _Kept, staging: Path) -> _Kept:
    """A journal is appended to while we read: what is hashed and what is packed must be the same
    bytes."""
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
            f"{source} is not a whole backup: {e}",
            hint="Use a file that `pilotlight state backup` wrote.",
        ) from e
    if missing := sorted(name for name in manifest["sha256"] if not (staging / name).exists()):
        raise InvalidInput(
            f"{source} lacks {missing[0]}", hint="The file was cut short: use another copy."
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
                f"{source} has a manifest of {first[0].size} bytes: at most {MAX_MANIFEST_BYTES}",
                hint="Do not load it.",
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
            hint="Use a file that `pilotlight state backup` wrote.",
        )
    return body


def _extract(
    member: tarfile.TarInfo,
    content: TarContent,
    staging: Path,
    hashes: Mapping[str, str],
    source: Path,
) -> None:
    # Names come from the file: only those that the manifest lists, only plain files, only below the
    # home.
    parts = member.name.split("/")
    if not member.isreg() or member.name not in hashes or parts[0] not in KEPT or ".." in parts:
        raise InvalidInput(
            f"{source} carries {member.name!r}, which no backup does", hint="Do not load it."
        )
    path = staging / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        while piece := content.read(_PIECE_BYTES):
            file.write(piece)
    if file_sha256(path) != hashes[member.name]:
        raise InvalidInput(f"{source}: {member.name} was altered", hint="Use another copy.")
