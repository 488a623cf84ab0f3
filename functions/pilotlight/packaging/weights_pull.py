"""Download of weights from the platform to a directory, with verification of every chunk.

Files are downloaded to a staging directory, several chunks in parallel. A chunk that is present
with the right hash is not fetched again, so an interrupted pull resumes. A new target is created by
one rename of the staging directory next to it, once all files are complete and on disk. An existing
target may be a mount point or a link: then the staging directory is inside it, and files are
renamed one by one."""

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

from pilotlight.core.durability import sync_directory
from pilotlight.errors import Conflict, InvalidInput, PilotlightError, StorageFull
from weight_cache.errors import ManifestInvalid
from weight_cache.manifest import CHUNK_BYTES, Manifest, ManifestFile, parse
from weight_cache.types import Chunk

CHUNKS_AT_ONCE = 8
"""Parallel chunks of 16 MiB each: 128 MiB of memory."""
ATTEMPTS = 3
"""Attempts to fetch a chunk with the right hash: corrupt responses are rare, a corrupt blob stays
corrupt."""

_DAMAGED = (
    "The copy on the platform is corrupt: ask its operator to delete the blob from the blob store, "
    "then push the weights again."
)
_STAGING = re.compile(r"\.(.*\.)?[0-9a-f]{12}\.part")
Progress = Callable[[int, int], None]
"""Callback (bytes present and verified, total bytes), one call at a time, from any thread."""


class BlobReader(Protocol):
    """A source of blobs, such as `pilotlight.client.client.Client`."""

    def read_blob(
        self, digest: str, *, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> bytes:
        """Return a blob or a range of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """The result of a pull. `fetched_bytes`: bytes downloaded; the rest was present."""

    directory: Path
    manifest: str
    size_bytes: int
    files: int
    fetched_bytes: int


def fetch_manifest(blobs: BlobReader, digest: str) -> Manifest:
    """Fetch a manifest by its digest. Raises NotFound, InvalidInput for an invalid manifest, or
    PilotlightError if its content does not match the digest."""
    raw = blobs.read_blob(digest)
    if hashlib.sha256(raw).hexdigest() != digest:
        raise PilotlightError(
            f"the content of manifest {digest[:12]} does not match its digest", hint=_DAMAGED
        )
    try:
        return parse(raw)
    except ManifestInvalid as e:
        raise InvalidInput(
            f"{digest[:12]} is not a valid manifest: {e}", parameter="manifest"
        ) from e


def is_pull_target_empty(directory: Path) -> bool:
    """Whether the target does not exist, or is a directory that is empty except for an interrupted
    pull. Raises InvalidInput if it is not a directory."""
    if not directory.exists():
        return True
    if not directory.is_dir():
        raise InvalidInput(
            f"{directory} is not a directory",
            hint="Specify a directory; it is created if it does not exist.",
        )
    return all(_STAGING.fullmatch(path.name) for path in directory.iterdir())


def free_disk_bytes(directory: Path) -> int:
    """Return the free disk space below `directory`."""
    return shutil.disk_usage(directory).free


def pull_weights(
    blobs: BlobReader,
    digest: str,
    directory: Path,
    *,
    progress: Progress | None = None,
    free_bytes: Callable[[Path], int] = free_disk_bytes,
) -> PullResult:
    """Download the model of manifest `digest` to `directory`. Existing files of the same names are
    replaced, others are kept.

    Raises NotFound, Conflict (another pull is running), StorageFull, PilotlightError (corrupt on
    the platform), OSError."""
    target = directory.absolute()
    manifest = fetch_manifest(blobs, digest)
    is_fresh = not os.path.lexists(target)
    part = f"{digest[:12]}.part"
    staging = target.with_name(f".{target.name}.{part}") if is_fresh else target / f".{part}"
    if not is_fresh:
        is_pull_target_empty(target)  # raises if it is not a directory
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
        sync_directory(target.parent)
    return PullResult(
        directory=target,
        manifest=digest,
        size_bytes=manifest.size_bytes,
        files=len(manifest.files),
        fetched_bytes=fetched,
    )


class _Pull:
    """One pull, with several threads that fetch chunks. The lock guards counts and the order of
    reports.

    `missing`: files that the target did not have; after `run` they are in the staging
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
        """Download all files that the target does not have to the staging directory, and return the
        bytes fetched."""
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
        """Whether the file in the target has the content of the model, chunk by chunk."""
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
                f"{needed} bytes must be downloaded, but {self._staging.parent} has only {free} "
                "bytes free"
            )
            raise StorageFull(message, hint="Free disk space, or choose another disk.")

    def _file(self, file: ManifestFile, pool: ThreadPoolExecutor | None) -> None:
        """Complete one file and sync it to disk; fetch its chunks in parallel if there is a
        `pool`."""
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
        """Wait for all jobs. After the first failure no other begins, and all have ended when it is
        raised."""
        try:
            done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            if any(job.exception() for job in done):
                self._stopped.set()
        except BaseException:  # Ctrl-C arrives in the waiting thread
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
            f"{chunk.offset_bytes + chunk.length_bytes} had a wrong hash in {ATTEMPTS} attempts",
            hint=_DAMAGED,
        )

    def _count(self, size_bytes: int, *, fetched: bool = False) -> None:
        with self._lock:
            self._done += size_bytes
            self._fetched += size_bytes if fetched else 0
            if self._progress is not None:
                self._progress(self._done, self._manifest.size_bytes)


def _merge(files: Sequence[ManifestFile], staging: Path, target: Path) -> None:
    """Move the downloaded files to an existing directory, each one atomically."""
    folders = {target}
    for file in files:
        place = target / file.path
        if place.is_dir() and not place.is_symlink():
            raise Conflict(
                f"{place} is a directory, but the model has a file of that name",
                hint="Choose another directory.",
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        (staging / file.path).rename(place)
        folders |= {folder for folder in place.parents if folder.is_relative_to(target)}
    for folder in folders:
        sync_directory(folder)


@contextlib.contextmanager
def _alone(staging: Path) -> Iterator[None]:
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _is_ours(descriptor, staging):
            raise Conflict(
                f"another pull is writing to {staging}",
                hint="Wait for it, or choose another directory.",
            )
        yield
    finally:
        os.close(descriptor)


def _is_ours(descriptor: int, staging: Path) -> bool:
    """Try to lock the directory; False if another pull has the lock, or had it and renamed the
    directory."""
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
                hint="Free disk space and pull again: the pull resumes.",
            ) from e
        raise


def _allocated(path: Path) -> int:
    """Return the allocated size of a file, less than its size if it is sparse."""
    return path.stat().st_blocks * 512 if path.is_file() else 0


def _sync_tree(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        sync_directory(Path(folder))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
