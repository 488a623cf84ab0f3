"""Builds a manifest from a source: reads every byte once and hashes chunks in parallel.

Each worker reads and hashes one chunk, so `workers` chunks are in memory at a time. Safetensors
files get an index of their tensors, parsed from the first chunk; a longer header is read once
more."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from weight_cache.errors import ManifestInvalid, SourceInvalid, TensorsInvalid
from weight_cache.manifest import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestFile,
    Progress,
    check_paths,
    check_tensors,
)
from weight_cache.sources import Source, SourceFile
from weight_cache.sources.directory import DirectorySource
from weight_cache.tensors.header import header_bytes, parse_header
from weight_cache.types import Tensor

_SAFETENSORS = ".safetensors"
_MAX_CHUNKS = MAX_MANIFEST_BYTES // len('"",' + "0" * 64)
"""Limit of hashes in a manifest, checked before work is planned for a size that a server may have
invented."""
_POINTER = b"version https://git-lfs.github.com/spec/"
"""Begin of a Git LFS pointer file. Source: the specification of Git LFS."""


@dataclass(frozen=True, slots=True)
class _HashedChunk:
    """Consecutive chunks of a file: their hashes and, at the begin of a safetensors file, its
    tensors."""

    length_bytes: int
    sha256s: tuple[str, ...]
    tensors: tuple[Tensor, ...] = ()


def build_manifest(
    source: Path | Source,
    *,
    files: Sequence[SourceFile] | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Manifest:
    """Read and hash every file of `source` (a directory, or a source from `open_source`).

    `files`: the result of `source.files()`, if already known. `workers`: chunks read concurrently;
    default: as the source recommends. `progress` is called in the calling thread. Raises
    ManifestInvalid for paths not allowed in a manifest, SourceInvalid (ManifestInvalid for a
    directory given as a path) if the source cannot be read or changes, TensorsInvalid for an
    invalid safetensors file."""
    if isinstance(source, Path):
        try:
            return build_manifest(DirectorySource(source), progress=progress, workers=workers)
        except SourceInvalid as e:
            raise ManifestInvalid(str(e)) from e
    files = source.files() if files is None else files
    check_paths([file.path for file in files])
    if sum(-(-file.size_bytes // CHUNK_BYTES) for file in files) > _MAX_CHUNKS:
        total = sum(file.size_bytes for file in files)
        raise ManifestInvalid(
            f"{source.name}: {total} bytes are more than a manifest can describe "
            f"({_MAX_CHUNKS * CHUNK_BYTES}): split the model"
        )
    manifest = Manifest(
        files=tuple(_hash(source, files, workers or source.reads_at_once, progress))
    )
    check_tensors(manifest.files)
    if (length := len(manifest.to_bytes())) > MAX_MANIFEST_BYTES:
        raise ManifestInvalid(
            f"{source.name}: its manifest has {length} bytes, at most {MAX_MANIFEST_BYTES} are "
            f"allowed: split the model"
        )
    return manifest


def _hash(
    source: Source, files: Sequence[SourceFile], workers: int, progress: Progress | None
) -> Iterator[ManifestFile]:
    total, done = sum(file.size_bytes for file in files), 0
    steps = [(file, begin, end) for file in files for begin, end in _steps(file)]
    pieces: dict[str, list[_HashedChunk]] = {file.path: [] for file in files}
    with ThreadPoolExecutor(workers, "hash weights") as pool:
        try:
            for (file, _, _), piece in _ahead(pool, source, steps, window=2 * workers):
                pieces[file.path].append(piece)
                done += piece.length_bytes
                if progress is not None:
                    progress(done, total)
        finally:
            pool.shutdown(cancel_futures=True)
    return (_manifest_file(source, file, pieces[file.path]) for file in files)


_Step = tuple[SourceFile, int, int]


def _ahead(
    pool: ThreadPoolExecutor, source: Source, steps: Sequence[_Step], *, window: int
) -> Iterator[tuple[_Step, _HashedChunk]]:
    """Yield the pieces in order while later ones are read; at most `window` are in progress."""
    waiting: deque[tuple[_Step, Future[_HashedChunk]]] = deque()
    remaining = iter(steps)
    while True:
        for step in itertools.islice(remaining, window - len(waiting)):
            waiting.append((step, pool.submit(_read_piece, source, *step)))
        if not waiting:
            return
        step, job = waiting.popleft()
        yield step, job.result()


def _steps(file: SourceFile) -> Iterator[tuple[int, int]]:
    """Ranges of chunk numbers [begin, end): single chunks, or all at once if they must be read
    sequentially."""
    count = -(-file.size_bytes // CHUNK_BYTES)
    return (
        ((i, i + 1) for i in range(count))
        if file.is_ranged
        else iter([(0, count)] if count else [])
    )


def _read_piece(source: Source, file: SourceFile, begin: int, end: int) -> _HashedChunk:
    digests, length = [], 0
    tensors: tuple[Tensor, ...] = ()
    for index in range(begin, end):
        offset = index * CHUNK_BYTES
        data = source.read(file, offset, min(CHUNK_BYTES, file.size_bytes - offset))
        digests.append(hashlib.sha256(data).hexdigest())
        length += len(data)
        if index == 0 and file.path.endswith(_SAFETENSORS):
            tensors = _index(source, file, data)
    return _HashedChunk(length, tuple(digests), tensors)


def _index(source: Source, file: SourceFile, head: bytes) -> tuple[Tensor, ...]:
    """The file's tensors in byte order. Raises TensorsInvalid with the file's name."""
    if head.startswith(_POINTER):
        raise TensorsInvalid(
            f"{file.path} is a Git LFS pointer instead of the file: run `git lfs pull` first"
        )
    try:
        if len(head) < (wanted := header_bytes(head, file_bytes=file.size_bytes)):
            head = source.read(file, 0, wanted)
        return parse_header(head, file_bytes=file.size_bytes)
    except TensorsInvalid as e:
        raise TensorsInvalid(
            f"{file.path}: {e}. Repair the file, or exclude it from the model's directory"
        ) from e


def _manifest_file(
    source: Source, file: SourceFile, pieces: Sequence[_HashedChunk]
) -> ManifestFile:
    is_empty = not pieces and file.path.endswith(_SAFETENSORS)
    return ManifestFile(
        path=file.path,
        size_bytes=file.size_bytes,
        chunk_sha256s=tuple(digest for piece in pieces for digest in piece.sha256s),
        tensors=_index(source, file, b"") if is_empty else pieces[0].tensors if pieces else (),
    )
