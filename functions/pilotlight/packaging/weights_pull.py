"""Weights back from the platform: from a manifest to a directory, every chunk verified.

Files come into a staging directory, in chunks, several at once. A chunk that is there and has its
hash is not fetched again, so a pull that was cut off goes on where it was, whatever cut it off. A
target that does not exist is made by one rename, of the staging directory beside it, when all are
whole and on disk. A target that exists may be a disk of its own, or a link: the staging directory
is in it, and each file is renamed by itself."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pilotlight.errors import Conflict, InvalidInput, PilotlightError, StorageFull
from weight_cache.errors import ManifestInvalid
from weight_cache.manifest import CHUNK_BYTES, Manifest, ManifestFile, parse
from weight_cache.types import Chunk

CHUNKS_AT_ONCE = 8
"""Of 16 MiB each: 128 MiB of memory."""
ATTEMPTS = 3
"""How often a chunk whose bytes are wrong is asked for: a damaged answer is rare, a damaged blob
stays damaged."""

_DAMAGED = (
    "The platform's copy is damaged: have whoever runs it remove that blob from its store, "
    "then push the weights again."
)
_STAGING = re.compile(r"\.(.*\.)?[0-9a-f]{12}\.part")
Progress = Callable[[int, int], None]
"""Told (bytes that are here and verified, bytes in all), one call at a time, from any thread."""


class BlobReader(Protocol):
    """Where blobs come from: a `pilotlight.client.client.Client`."""

    def read_blob(
        self, digest: str, *, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> bytes:
        """A blob, or a range of it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """What a pull did. `fetched_bytes`: what had to come; the rest was there already."""

    directory: Path
    manifest: str
    size_bytes: int
    files: int
    fetched_bytes: int


def fetch_manifest(blobs: BlobReader, digest: str) -> Manifest:
    """The manifest of that digest. Raises NotFound, or PilotlightError when its bytes are not what
    it names."""
    raw = blobs.read_blob(digest)
    if hashlib.sha256(raw).hexdigest() != digest:
        raise PilotlightError(
            f"manifest {digest[:12]} came with other bytes than its hash names", hint=_DAMAGED
        )
    try:
        return parse(raw)
    except ManifestInvalid as e:
        raise InvalidInput(f"{digest[:12]} is no manifest: {e}", parameter="manifest") from e


def is_pull_target_empty(directory: Path) -> bool:
    """Whether nothing is there: no such path, or a directory without entries, but for a pull that
    was cut off.

    Raises InvalidInput for something else.
    """
    if not directory.exists():
        return True
    if not directory.is_dir():
        raise InvalidInput(
            f"{directory} is not a directory",
            hint="Name a directory; it is made when it is not there.",
        )
    return all(_STAGING.fullmatch(path.name) for path in directory.iterdir())


def free_disk_bytes(directory: Path) -> int:
    """Bytes that can still be written below `directory`."""
    return shutil.disk_usage(directory).free


def pull_weights(
    blobs: BlobReader,
    digest: str,
    directory: Path,
    *,
    progress: Progress | None = None,
    free_bytes: Callable[[Path], int] = free_disk_bytes,
) -> PullResult:
    """Bring the model of manifest `digest` to `directory`. Files of the same names are replaced,
    others stay.

    Raises NotFound, Conflict (another pull is at it), StorageFull, PilotlightError (damaged on the
    platform), OSError."""
    target = directory.absolute()
    manifest = fetch_manifest(blobs, digest)
    is_fresh = not os.path.lexists(target)
    part = f"{digest[:12]}.part"
    staging = target.with_name(f".{target.name}.{part}") if is_fresh else target / f".{part}"
    if not is_fresh:
        is_pull_target_empty(target)  # is it a directory?
    staging.mkdir(parents=True, exist_ok=True)
    with _alone(staging):
        task = _Pull(blobs, manifest, staging, here=None if is_fresh else target, progress=progress)
        fetched = task.run(free_bytes)
        if is_fresh:
            _sync_tree(staging)
            staging.rename(target)
        else:
            _merge(task.missing, staging, target)
            shutil.rmtree(staging)
        _sync(target.parent)
    return PullResult(
        directory=target,
        manifest=digest,
        size_bytes=manifest.size_bytes,
        files=len(manifest.files),
        fetched_bytes=fetched,
    )


class _Pull:
    """One pull's work. Its chunks are fetched by several threads; the lock keeps the count and the
    reports in order.

    `missing`: the files that the target did not have; after `run` they are in the staging
    directory."""

    def __init__(
        self,
        blobs: BlobReader,
        manifest: Manifest,
        staging: Path,
        *,
        here: Path | None,
        progress: Progress | None,
    ) -> None:
        self._blobs = blobs
        self._manifest = manifest
        self._staging = staging
        self._here = here
        self.missing: list[ManifestFile] = []
        self._progress = progress
        self._done = 0
        self._fetched = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self, free_bytes: Callable[[Path], int]) -> int:
        """Bring every file to the staging directory, except those that the target has already;
        returns the bytes fetched."""
        files = self.missing = [file for file in self._manifest.files if not self._is_here(file)]
        self._check_room(files, free_bytes(self._staging))
        small = [file for file in files if file.size_bytes <= CHUNK_BYTES]
        with ThreadPoolExecutor(CHUNKS_AT_ONCE, "pull weights") as pool:
            try:
                self._all([pool.submit(self._file, file, None) for file in small])
                for file in files:
                    if file.size_bytes > CHUNK_BYTES:
                        self._file(file, pool)
            finally:
                self._stopped.set()
        return self._fetched

    def _is_here(self, file: ManifestFile) -> bool:
        """Whether the target's own file is the model's, chunk by chunk."""
        path = None if self._here is None else self._here / file.path
        if (
            path is None
            or path.is_symlink()
            or not path.is_file()
            or path.stat().st_size != file.size_bytes
        ):
            return False
        with path.open("rb") as stream:
            is_same = all(
                _sha256(stream.read(chunk.length_bytes)) == chunk.sha256 for chunk in file.chunks()
            )
        if is_same:
            self._count(file.size_bytes)
        return is_same

    def _check_room(self, files: list[ManifestFile], free: int) -> None:
        there = sum(_allocated(self._staging / file.path) for file in files)
        needed = sum(file.size_bytes for file in files) - there
        if needed > free:
            message = (
                f"{needed} bytes are missing here and {self._staging.parent} has room for {free}"
            )
            raise StorageFull(message, hint="Free some space, or name another disk.")

    def _file(self, file: ManifestFile, pool: ThreadPoolExecutor | None) -> None:
        """One file, whole and on disk; its chunks side by side where there is a pool for them."""
        if self._stopped.is_set():
            return
        path = self._staging / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            os.ftruncate(descriptor, file.size_bytes)
            if pool is None:
                for chunk in file.chunks():
                    self._chunk(descriptor, chunk, file)
            else:
                self._all(
                    [pool.submit(self._chunk, descriptor, chunk, file) for chunk in file.chunks()]
                )
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _all(self, jobs: Sequence[Future[None]]) -> None:
        """Wait for all; after the first failure none begins, and none is still writing when it is
        raised."""
        try:
            done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            if any(job.exception() for job in done):
                self._stopped.set()
        except BaseException:  # Ctrl-C comes to the thread that waits
            self._stopped.set()
            raise
        finally:
            wait(jobs)
        for job in jobs:
            job.result()

    def _chunk(self, descriptor: int, chunk: Chunk, file: ManifestFile) -> None:
        if self._stopped.is_set():
            return
        if _sha256(os.pread(descriptor, chunk.length_bytes, chunk.offset_bytes)) != chunk.sha256:
            _write(descriptor, self._fetch(file, chunk), chunk.offset_bytes)
            self._count(chunk.length_bytes, fetched=True)
        else:
            self._count(chunk.length_bytes)

    def _fetch(self, file: ManifestFile, chunk: Chunk) -> bytes:
        for _ in range(ATTEMPTS):
            data = self._blobs.read_blob(
                file.digest, offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes
            )
            if len(data) == chunk.length_bytes and _sha256(data) == chunk.sha256:
                return data
        raise PilotlightError(
            f"{file.path}: bytes {chunk.offset_bytes} to "
            f"{chunk.offset_bytes + chunk.length_bytes} came {ATTEMPTS} times with a wrong hash",
            hint=_DAMAGED,
        )

    def _count(self, size_bytes: int, *, fetched: bool = False) -> None:
        with self._lock:
            self._done += size_bytes
            self._fetched += size_bytes if fetched else 0
            if self._progress is not None:
                self._progress(self._done, self._manifest.size_bytes)


def _merge(files: Sequence[ManifestFile], staging: Path, target: Path) -> None:
    """Put the files that came into a directory that may hold other things, each whole or not at
    all."""
    folders = {target}
    for file in files:
        place = target / file.path
        if place.is_dir() and not place.is_symlink():
            raise Conflict(
                f"{place} is a directory, and the model has a file of that name",
                hint="Name another directory.",
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        (staging / file.path).rename(place)
        folders |= {folder for folder in place.parents if folder.is_relative_to(target)}
    for folder in folders:
        _sync(folder)


@contextlib.contextmanager
def _alone(staging: Path) -> Iterator[None]:
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _is_ours(descriptor, staging):
            raise Conflict(
                f"another pull is writing to {staging}",
                hint="Wait for it, or name another directory.",
            )
        yield
    finally:
        os.close(descriptor)


def _is_ours(descriptor: int, staging: Path) -> bool:
    """Take the lock; False when another has it, or had it and moved the directory to its place."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), staging.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    try:
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"the disk is full: {e.strerror}",
                hint="Free some space and pull again: what came stays.",
            ) from e
        raise


def _allocated(path: Path) -> int:
    """Bytes that a file takes on disk: a sparse one less than its size."""
    return path.stat().st_blocks * 512 if path.is_file() else 0


def _sync_tree(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        _sync(Path(folder))


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
