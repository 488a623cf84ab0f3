"""A manifest names a model's files and the hashes of their bytes; its own sha256 names the model.

Canonical JSON (sorted keys, no spaces), files in the order of their paths' bytes: the same directory gives the same
manifest everywhere. Files are cut into chunks of 16 MiB, each with its sha256, so that they can be fetched and verified in
parallel; the sha256 of the whole file names it in the origin and in the store, where equal files of two models are one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weight_cache.errors import ManifestInvalid
from weight_cache.types import Chunk

CHUNK_BYTES = 16 * 1024 * 1024
"""Large enough that a request to an object store pays for itself, small enough to verify and resume in pieces."""
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
"""A terabyte has 65,536 chunks, whose hashes take 4.4 MB; this leaves room for many small files beside them."""
MAX_FILES = 100_000
_MAX_PATH_BYTES = 1024
_MAX_NAME_BYTES = 255  # NAME_MAX of every file system that matters
_VERSION = 1
_HEX = re.compile(r"[0-9a-f]{64}\Z")

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all), from any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """One file: its path below the model's directory, its size, the sha256 (hex) of all of it and of each chunk."""

    path: str
    size_bytes: int
    sha256: str
    chunk_sha256s: tuple[str, ...]

    def chunks(self) -> Iterator[Chunk]:
        """The file's chunks in order; an empty file has none."""
        for index, digest in enumerate(self.chunk_sha256s):
            offset = index * CHUNK_BYTES
            yield Chunk(offset_bytes=offset, length_bytes=min(CHUNK_BYTES, self.size_bytes - offset), sha256=digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A model's files, in the order of their paths' bytes."""

    files: tuple[ManifestFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(f.size_bytes for f in self.files)

    @property
    def digest(self) -> str:
        """sha256 (hex) of `to_bytes()`: the model's name."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def blobs(self) -> dict[str, int]:
        """The distinct files as sha256 → size in bytes."""
        return {f.sha256: f.size_bytes for f in self.files}

    def to_bytes(self) -> bytes:
        """The canonical JSON."""
        files = [{"path": f.path, "size_bytes": f.size_bytes, "sha256": f.sha256, "chunks": list(f.chunk_sha256s)} for f in self.files]
        body = {"version": _VERSION, "chunk_bytes": CHUNK_BYTES, "files": files}
        return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def parse(raw: bytes) -> Manifest:
    """Read a manifest's canonical JSON. Raises ManifestInvalid naming what is wrong."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ManifestInvalid(f"a manifest of {len(raw)} bytes is longer than {MAX_MANIFEST_BYTES}")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise ManifestInvalid(f"not JSON: {e}") from e
    known = isinstance(body, dict) and set(body) == {"version", "chunk_bytes", "files"}
    if not known or body["version"] != _VERSION or body["chunk_bytes"] != CHUNK_BYTES or not isinstance(body["files"], list):
        raise ManifestInvalid(f"expected version {_VERSION}, chunk_bytes {CHUNK_BYTES} and a list of files")
    manifest = Manifest(files=tuple(_file(i, f) for i, f in enumerate(body["files"])))
    _check_paths([f.path for f in manifest.files])
    if manifest.to_bytes() != raw:
        raise ManifestInvalid("not canonical: keys and files must be sorted, and nothing may stand between them")
    return manifest


def build_manifest(directory: Path, *, progress: Progress | None = None, workers: int | None = None) -> Manifest:
    """Read every file below `directory` once, `workers` at a time (default: one per core), and hash it.

    Links are followed inside the directory only. Raises ManifestInvalid for an empty directory, a link that leads outside,
    something that is no file, and a file that changes while it is read.
    """
    found = list(_walk(directory))
    if not found:
        raise ManifestInvalid(f"{directory} holds no files: name the directory that holds the model itself")
    _check_paths([path for path, _ in found])
    sizes = [file.stat().st_size for _, file in found]
    count = _Count(sum(sizes), progress)
    threads = workers or os.cpu_count() or 1
    with ThreadPoolExecutor(threads, "hash file") as over_files, ThreadPoolExecutor(threads, "hash chunk") as over_chunks:
        jobs = [over_files.submit(_hash_file, path, file, over_chunks, count) for path, file in found]
        try:
            return Manifest(files=tuple(job.result() for job in jobs))
        finally:
            for job in jobs:
                job.cancel()


class _Count:
    """Bytes hashed so far, by any thread; the lock keeps reports in order."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)


def _hash_file(path: str, file: Path, pool: ThreadPoolExecutor, count: _Count) -> ManifestFile:
    """Hash `file` whole and in chunks at once: the two run side by side (hashlib lets go of the interpreter's lock)."""
    whole = hashlib.sha256()
    digests = []
    with file.open("rb", buffering=0) as stream:
        before = os.fstat(stream.fileno())
        while block := _read_chunk(stream.fileno()):
            job = pool.submit(_sha256, block)
            whole.update(block)
            digests.append(job.result())
            count.add(len(block))
        after = os.fstat(stream.fileno())
    size = after.st_size
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, size) or len(digests) != -(-size // CHUNK_BYTES):
        raise ManifestInvalid(f"{file} changed while it was read: wait until whoever writes it is done")
    return ManifestFile(path=path, size_bytes=size, sha256=whole.hexdigest(), chunk_sha256s=tuple(digests))


def _read_chunk(descriptor: int) -> bytes:
    """The next chunk; only the last one is shorter (a single read(2) may be)."""
    parts, missing = [], CHUNK_BYTES
    while missing and (part := os.read(descriptor, missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _sha256(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()


def _walk(directory: Path) -> Iterator[tuple[str, Path]]:
    """Every file as (path in the manifest, path on disk), sorted by the bytes of the former."""
    root = directory.resolve()
    if not root.is_dir():
        raise ManifestInvalid(f"{directory} is not a directory")
    found = []
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder, name)
            if path.is_symlink():
                _check_link(path, root)
            elif not path.is_dir() and not stat.S_ISREG(path.lstat().st_mode):
                raise ManifestInvalid(f"{path} is neither a file nor a directory")
        found += [Path(folder, name) for name in files]
    return iter(sorted(((f.relative_to(root).as_posix(), f) for f in found), key=lambda pair: os.fsencode(pair[0])))


def _check_link(link: Path, root: Path) -> None:
    target = link.resolve()
    if not target.is_file():
        raise ManifestInvalid(f"{link} links to {target}, which is not a file")
    if not target.is_relative_to(root):
        raise ManifestInvalid(f"{link} links out of {root}: copy the directory with links followed (cp -rL) and use that")


def _file(index: int, body: Any) -> ManifestFile:
    where = f"files[{index}]"
    if not isinstance(body, Mapping) or set(body) != {"path", "size_bytes", "sha256", "chunks"}:
        raise ManifestInvalid(f"{where}: expected path, size_bytes, sha256 and chunks")
    path, size, digest, chunks = body["path"], body["size_bytes"], body["sha256"], body["chunks"]
    if not isinstance(path, str) or not isinstance(chunks, list):
        raise ManifestInvalid(f"{where}: path must be a text, chunks a list")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ManifestInvalid(f"{where}.size_bytes = {size!r}: expected a whole number of at least 0")
    if not all(isinstance(d, str) and _HEX.match(d) for d in [digest, *chunks]):
        raise ManifestInvalid(f"{where}: hashes are 64 hex digits of a sha256")
    if len(chunks) != -(-size // CHUNK_BYTES):
        raise ManifestInvalid(f"{where}: {size} bytes have {-(-size // CHUNK_BYTES)} chunks, not {len(chunks)}")
    return ManifestFile(path=path, size_bytes=size, sha256=digest, chunk_sha256s=tuple(chunks))


def _check_paths(paths: list[str]) -> None:
    """Refuse what could leave the model's directory, exist twice, or be a file and a directory at once."""
    if not 0 < len(paths) <= MAX_FILES:
        raise ManifestInvalid(f"{len(paths)} files: a model has 1 to {MAX_FILES}")
    for path in paths:
        try:
            names = path.encode().split(b"/")
        except UnicodeEncodeError as e:
            raise ManifestInvalid(f"path {path!r} is not UTF-8: rename the file") from e
        if any(n in (b"", b".", b"..") or b"\0" in n or len(n) > _MAX_NAME_BYTES for n in names) or len(path.encode()) > _MAX_PATH_BYTES:
            raise ManifestInvalid(f"path {path!r} is not a plain relative path of at most {_MAX_PATH_BYTES} bytes")
    if any(b.encode() <= a.encode() for a, b in itertools.pairwise(paths)):
        raise ManifestInvalid("files must be sorted by path, each once")
    folders = {p[:i] for p in paths for i, letter in enumerate(p) if letter == "/"}
    if both := folders & set(paths):
        raise ManifestInvalid(f"path {min(both)!r} is a file and a directory at once")
