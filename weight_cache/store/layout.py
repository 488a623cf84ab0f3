"""The store's directory: its layout, and operations that leave it consistent if the process is
killed at any moment.

    lock                 locked (flock) by the owner, contains its name
    partial/             incomplete files (`weight_cache.fetch.partial_files`); renamed to files/ when complete
    files/<digest>       complete files, verified, 0444; renamed in after fsync
    models/<manifest>/   hard links to files under the model's own paths, 0555; renamed in when complete
    manifests/<sha256>   the manifests of the models in the store, and the newest of others
    leases/<id>          one JSON document per lease
    pins/<manifest>      empty: the model is pinned
    scrubbed             name of the last checked file
    quarantine/<digest>  corrupt files, kept for diagnosis; at most two, and 2 GiB
    tmp/                 temporary files and files to be removed; emptied at startup

Blocking: called in threads, except for the renames.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from pilotlight.core.disk_floor import DiskFloor, no_floor
from pilotlight.core.durability import sync_directory
from weight_cache.errors import StoreOwned
from weight_cache.fetch.partial_files import PartialFiles
from weight_cache.manifest import Manifest
from weight_cache.store.disk_eviction import EvictionPlan
from weight_cache.store.store_metadata import FOLDERS, StoreMetadata

_QUARANTINE_KEPT = 2
_QUARANTINE_BYTES = 2 * 1024**3
_STEPS_BETWEEN_LOOKS = 64
"""Links (each with up to 32 directories) or flushes between two checks of the disk floor."""
_COPY_BYTES = 4 * 1024**2
_SEALED_AT_S = 1_000_000_000
"""Modification time of every sealed file: a later write changes it and is detected without reading
the contents."""


class LinkingStopped(Exception):
    """Raised when the linking of a model is cancelled."""


class StoreDirectory:
    """The store's directory, locked for this process until `close`. Raises StoreOwned, naming the
    owner, if another process has locked it."""

    def __init__(self, root: Path, *, floor: DiskFloor | None = None) -> None:
        """`floor`: free disk space to leave when creating directories; None: none."""
        self.root = root
        self._floor = floor or no_floor()
        for name in ("", "files", "partial", "models", "quarantine", "tmp", *FOLDERS):
            (root / name).mkdir(parents=True, exist_ok=True)
        root.chmod(0o700)
        self._lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            owner = (
                os.pread(self._lock, 200, 0).decode(errors="replace").strip()
                or "a process that has not written its name yet"
            )
            os.close(self._lock)
            raise StoreOwned(
                f"{root} is in use by {owner}: only one weight cache may use a directory. Stop "
                f"that process, or set another home"
            ) from e
        self._renewing = threading.Lock()
        self.partials = PartialFiles(root / "partial")
        self.notes = StoreMetadata(root, self.temp)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()}".encode(), 0)

    def close(self) -> None:
        """Release the directory. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def empty_tmp(self) -> None:
        """Remove the temporary files of a dead owner."""
        for entry in (self.root / "tmp").iterdir():
            self.remove(entry)

    def temp(self) -> Path:
        """A new path in tmp/."""
        return self.root / "tmp" / secrets.token_hex(8)

    def file(self, digest: str) -> Path:
        """Path of a file."""
        return self.root / "files" / digest

    def model(self, manifest: str) -> Path:
        """Path of a model's directory."""
        return self.root / "models" / manifest

    def publish_file(self, temp: Path, digest: str) -> None:
        """Give a verified, durable file its name. The name becomes durable with the first model
        that links it."""
        os.utime(temp, (_SEALED_AT_S, _SEALED_AT_S))
        temp.rename(self.file(digest))
        self.partials.finish(digest)

    def publish_model(
        self, name: str, manifest: Manifest, stopped: threading.Event | None = None
    ) -> None:
        """Build the model's directory from files in the store, and give it its name. The manifest
        must be stored already.

        Raises LinkingStopped soon after `stopped` is set, BelowFloor if the directories would use
        space reserved for journals."""
        building = self.temp()
        try:
            self._link(building, manifest, stopped or threading.Event())
            sync_directory(self.root / "files")
            building.rename(self.model(name))
        except (OSError, LinkingStopped):
            self.remove(building)
            raise
        self.settle(name)
        sync_directory(self.root / "models")

    def settle(self, name: str) -> None:
        """Make a model's root directory read-only. Done after the rename, because without root
        privileges a read-only directory cannot be moved."""
        self.model(name).chmod(0o555)

    def _link(self, building: Path, manifest: Manifest, stopped: threading.Event) -> None:
        steps = itertools.count(1)

        def step() -> None:
            if stopped.is_set():
                raise LinkingStopped
            if next(steps) % _STEPS_BETWEEN_LOOKS == 0:
                self._floor.require()

        building.mkdir()
        for file in manifest.files:
            step()
            path = building / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            self._link_file(file.digest, path, step)
        for folder, _, _ in os.walk(building, topdown=False):
            step()
            sync_directory(Path(folder))
            os.chmod(folder, 0o755 if folder == str(building) else 0o555)

    def _link_file(self, digest: str, path: Path, step: Callable[[], None]) -> None:
        """Add a name for a file. At the file system's limit of hard links (65,000 on ext4), a copy
        replaces the file in the store; existing links keep the old one."""
        source = self.file(digest)
        if _has_linked(source, path):
            return
        with self._renewing:
            # another thread may have renewed it, and used up its links
            while not _has_linked(source, path):
                self._floor.require(source.stat().st_size)
                self._renew(source, step)

    def _renew(self, source: Path, step: Callable[[], None]) -> None:
        """Replace a file by a copy of itself atomically."""
        fresh = self.temp()
        try:
            with source.open("rb") as old, fresh.open("xb") as new:
                while chunk := old.read(_COPY_BYTES):
                    step()
                    new.write(chunk)
                new.flush()
                os.fsync(new.fileno())
                if not os.path.samestat(os.fstat(old.fileno()), source.stat()):
                    raise FileNotFoundError(f"{source} was quarantined while it was copied")
            self.reseal(fresh)
            fresh.replace(source)
        finally:
            fresh.unlink(missing_ok=True)

    def detach_model(self, name: str) -> Path | None:
        """Remove a model's name (one rename) and return the path to `remove` later. None if it was
        not in the store."""
        grave = self.temp()
        try:
            self.model(name).chmod(0o755)
            self.model(name).rename(grave)
        except FileNotFoundError:
            return None
        return grave

    def detach_file(self, digest: str) -> Path | None:
        """Remove a file's name and return the path to `remove` later."""
        return self._bury(self.file(digest))

    def _bury(self, path: Path) -> Path | None:
        grave = self.temp()
        try:
            path.rename(grave)
        except FileNotFoundError:
            return None
        return grave

    def bury(self, removal: EvictionPlan) -> list[Path]:
        """Remove the names of evicted models and files immediately, so that later requests fetch
        them again; return the paths to `remove`."""
        graves = [self.detach_model(name) for name in removal.models]
        graves += [self.detach_file(digest) for digest in removal.files]
        graves += [self._bury(self.root / "partial" / digest) for digest in removal.partials]
        for digest in removal.partials:
            self.partials.remove(digest)
        return [grave for grave in graves if grave is not None]

    def quarantine(self, digest: str) -> None:
        """Move a corrupt file to quarantine, out of the store."""
        with contextlib.suppress(FileNotFoundError):
            self.file(digest).rename(self.root / "quarantine" / digest)
            os.utime(self.root / "quarantine" / digest)

    def trim_quarantine(self) -> None:
        """Keep only the newest corrupt files, limited in number and size: they are outside the
        budget."""
        found, room = [], _QUARANTINE_BYTES
        for path in (self.root / "quarantine").iterdir():
            with contextlib.suppress(FileNotFoundError):  # another thread may be trimming
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        for kept, (_, size, path) in enumerate(sorted(found, reverse=True)):
            room -= size
            if kept >= _QUARANTINE_KEPT or room < 0:
                self.remove(path)

    def remove(self, *graves: Path) -> None:
        """Remove detached files and directories, read-only ones included."""
        for grave in graves:
            if not grave.is_dir():
                grave.unlink(missing_ok=True)
                continue
            for folder, _, _ in os.walk(grave):
                os.chmod(folder, 0o700)
            shutil.rmtree(grave)

    def is_sealed(self, path: Path, size_bytes: int) -> bool:
        """Whether a file's size, modification time and mode are as published. Cheap: does not read
        the contents."""
        try:
            status = path.lstat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns, status.st_mode & 0o222) == (
            size_bytes,
            _SEALED_AT_S * 10**9,
            0,
        )

    def reseal(self, path: Path) -> None:
        """Mark a file as verified after its contents were checked."""
        path.chmod(0o444)
        os.utime(path, (_SEALED_AT_S, _SEALED_AT_S))

    def models(self) -> Iterator[tuple[str, float]]:
        """All model directories with their last use."""
        for entry in sorted((self.root / "models").iterdir()):
            yield entry.name, entry.stat().st_mtime

    def files(self) -> Iterator[tuple[str, int]]:
        """All files with their sizes."""
        for entry in sorted((self.root / "files").iterdir()):
            yield entry.name, entry.stat().st_size

    def touch(self, name: str, *, now: float) -> None:
        """Store a model's last use, for the eviction order after a restart."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.model(name), (now, now))


def _has_linked(source: Path, path: Path) -> bool:
    """Create a hard link; False if the file has the maximum number of links."""
    try:
        os.link(source, path)
    except OSError as e:
        if e.errno != errno.EMLINK:
            raise
        return False
    return True
