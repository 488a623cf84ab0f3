"""The store's directory: what lies where, and how each thing appears and disappears so that a kill
at any moment does no harm.

    lock                 held (flock) by the owner, and naming it
    partial/             files on their way in (`weight_cache.fetch.partial_files`); renamed to files/ when complete
    files/<digest>       whole files, verified, 0444; renamed in after fsync
    models/<manifest>/   hard links to files under the model's own paths, 0555; renamed in when complete
    manifests/<sha256>   the manifests of the models that are here, and the newest of others
    leases/<id>          one JSON document per lease
    pins/<manifest>      empty: this model stays
    scrubbed             name of the file that was checked last
    quarantine/<digest>  corrupt files, for whoever wants to know what happened to the disk; at most
    two, and 2 GiB
    tmp/                 everything on its way in or out; emptied at start-up

Blocking; called in threads, except for the renames.
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
from weight_cache.errors import StoreOwned
from weight_cache.fetch.partial_files import PartialFiles
from weight_cache.manifest import Manifest
from weight_cache.store.eviction import EvictionPlan
from weight_cache.store.store_metadata import FOLDERS, StoreMetadata, sync_directory

_QUARANTINE_KEPT = 2
_QUARANTINE_BYTES = 2 * 1024**3
_STEPS_BETWEEN_LOOKS = 64
"""Links, each with up to 32 directories, or flushes, between two looks at the disk."""
_COPY_BYTES = 4 * 1024**2
_SEALED_AT_S = 1_000_000_000
"""Modification time of every sealed file: whoever writes to one afterwards moves it, and is noticed
without reading it again."""


class LinkingStopped(Exception):
    """Raised by the linking of a model that is not waited for."""


class StoreDirectory:
    """The directory, locked for this process until `close`. Raises StoreOwned naming the owner when
    another one has it."""

    def __init__(self, root: Path, *, floor: DiskFloor | None = None) -> None:
        """`floor`: free disk that making directories leaves to others; None: none."""
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
                or "a process that has not said its name yet"
            )
            os.close(self._lock)
            raise StoreOwned(
                f"{root} belongs to {owner}: one weight cache per directory. Stop that one, or "
                f"set another home"
            ) from e
        self._renewing = threading.Lock()
        self.partials = PartialFiles(root / "partial")
        self.notes = StoreMetadata(root, self.temp)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()}".encode(), 0)

    def close(self) -> None:
        """Let go of the directory. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def empty_tmp(self) -> None:
        """Remove what a dead owner left half done."""
        for entry in (self.root / "tmp").iterdir():
            self.remove(entry)

    def temp(self) -> Path:
        """A new path below tmp/."""
        return self.root / "tmp" / secrets.token_hex(8)

    def file(self, digest: str) -> Path:
        """Where a file lies."""
        return self.root / "files" / digest

    def model(self, manifest: str) -> Path:
        """Where a model's directory lies."""
        return self.root / "models" / manifest

    def publish_file(self, temp: Path, digest: str) -> None:
        """Give a verified, durable file its name. The name itself is durable with the first model
        that has it."""
        os.utime(temp, (_SEALED_AT_S, _SEALED_AT_S))
        temp.rename(self.file(digest))
        self.partials.finish(digest)

    def publish_model(
        self, name: str, manifest: Manifest, stopped: threading.Event | None = None
    ) -> None:
        """Build the model's directory from files that are here, and give it its name; the manifest
        was kept before.

        Raises LinkingStopped soon after `stopped` is set, BelowFloor where directories would take
        what is kept for journals."""
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
        """Close a model's own directory for writing: only now, because without root a closed one
        could not be moved in."""
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
        """One more name for a file. A file has as many as its file system allows (65,000 on ext4):
        then a copy of it takes its place here, and those that have the old one keep it."""
        source = self.file(digest)
        if _has_linked(source, path):
            return
        with self._renewing:
            # somebody else may have renewed it, and used that up, too
            while not _has_linked(source, path):
                self._floor.require(source.stat().st_size)
                self._renew(source, step)

    def _renew(self, source: Path, step: Callable[[], None]) -> None:
        """Put a copy in a file's place, under its name without a gap."""
        fresh = self.temp()
        try:
            with source.open("rb") as old, fresh.open("xb") as new:
                while chunk := old.read(_COPY_BYTES):
                    step()
                    new.write(chunk)
                new.flush()
                os.fsync(new.fileno())
                if not os.path.samestat(os.fstat(old.fileno()), source.stat()):
                    raise FileNotFoundError(f"{source} was set aside while it was copied")
            self.reseal(fresh)
            fresh.replace(source)
        finally:
            fresh.unlink(missing_ok=True)

    def detach_model(self, name: str) -> Path | None:
        """Take a model's name away (one rename); the returned remains are `remove`d later. None
        when it was not here."""
        grave = self.temp()
        try:
            self.model(name).chmod(0o755)
            self.model(name).rename(grave)
        except FileNotFoundError:
            return None
        return grave

    def detach_file(self, digest: str) -> Path | None:
        """Take a file's name away."""
        return self._bury(self.file(digest))

    def _bury(self, path: Path) -> Path | None:
        grave = self.temp()
        try:
            path.rename(grave)
        except FileNotFoundError:
            return None
        return grave

    def bury(self, removal: EvictionPlan) -> list[Path]:
        """Take names away at once; whoever asks for these next fetches them anew. The remains are
        for `remove`."""
        graves = [self.detach_model(name) for name in removal.models]
        graves += [self.detach_file(digest) for digest in removal.files]
        graves += [self._bury(self.root / "partial" / digest) for digest in removal.partials]
        for digest in removal.partials:
            self.partials.remove(digest)
        return [grave for grave in graves if grave is not None]

    def quarantine(self, digest: str) -> None:
        """Set a corrupt file aside: from now on nobody finds it."""
        with contextlib.suppress(FileNotFoundError):
            self.file(digest).rename(self.root / "quarantine" / digest)
            os.utime(self.root / "quarantine" / digest)

    def trim_quarantine(self) -> None:
        """Keep the newest corrupt files, few and of few bytes: they are outside the budget."""
        found, room = [], _QUARANTINE_BYTES
        for path in (self.root / "quarantine").iterdir():
            with contextlib.suppress(FileNotFoundError):  # another thread trims, too
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        for kept, (_, size, path) in enumerate(sorted(found, reverse=True)):
            room -= size
            if kept >= _QUARANTINE_KEPT or room < 0:
                self.remove(path)

    def remove(self, *graves: Path) -> None:
        """Remove remains, read-only directories included."""
        for grave in graves:
            if not grave.is_dir():
                grave.unlink(missing_ok=True)
                continue
            for folder, _, _ in os.walk(grave):
                os.chmod(folder, 0o700)
            shutil.rmtree(grave)

    def is_sealed(self, path: Path, size_bytes: int) -> bool:
        """Whether a file looks as it was published: size, modification time, mode. Cheap; it does
        not read the bytes."""
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
        """A file was read again and is what it should be: say so."""
        path.chmod(0o444)
        os.utime(path, (_SEALED_AT_S, _SEALED_AT_S))

    def models(self) -> Iterator[tuple[str, float]]:
        """Every model directory and its last use."""
        for entry in sorted((self.root / "models").iterdir()):
            yield entry.name, entry.stat().st_mtime

    def files(self) -> Iterator[tuple[str, int]]:
        """Every file and its size."""
        for entry in sorted((self.root / "files").iterdir()):
            yield entry.name, entry.stat().st_size

    def touch(self, name: str, *, now: float) -> None:
        """Write down a model's last use, for the eviction order after a restart."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.model(name), (now, now))


def _has_linked(source: Path, path: Path) -> bool:
    """Link it; False when it has as many names as it may have."""
    try:
        os.link(source, path)
    except OSError as e:
        if e.errno != errno.EMLINK:
            raise
        return False
    return True
