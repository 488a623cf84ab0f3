"""One file on its way from the origin to the disk: chunks in parallel, every byte hashed before it may be used."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from weight_cache.errors import ChunkCorrupt, OriginUnavailable, StoreFull
from weight_cache.manifest import CHUNK_BYTES, FileHash, ManifestFile
from weight_cache.origin import Origin
from weight_cache.types import Chunk

CHUNKS_IN_FLIGHT = 4
"""64 MiB in memory; enough to hide the origin's latency behind hashing, and hashing behind the disk."""
_ATTEMPTS = 2
"""A chunk that arrives wrong is asked for once more: a transfer may have failed. Wrong twice means wrong at the origin."""

P = ParamSpec("P")
T = TypeVar("T")
OnBytes = Callable[[int], None]


async def ingest_file(origin: Origin, file: ManifestFile, temp: Path, *, on_bytes: OnBytes) -> None:
    """Fetch `file` to the new file `temp`, verify every chunk and the whole, make it durable and read-only.

    Raises ChunkCorrupt, OriginUnavailable, StoreFull; `temp` may be left behind then and belongs to the caller.
    """
    descriptor = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if file.size_bytes:  # its room is reserved, so that a full disk says so before anything is fetched
            await finish_in_thread(os.posix_fallocate, descriptor, 0, file.size_bytes)
        await _fetch_all(origin, file, descriptor, on_bytes)
        await finish_in_thread(_seal, descriptor)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"the disk below {temp.parent} has no room for {file.size_bytes} bytes: {e.strerror}") from e
        raise
    finally:
        os.close(descriptor)


async def _fetch_all(origin: Origin, file: ManifestFile, descriptor: int, on_bytes: OnBytes) -> None:
    """Chunks in a sliding window. Their hashes are the file's: nothing else remains to be checked."""
    window: deque[asyncio.Task[bytes]] = deque()

    async def retire() -> None:
        block = await window[0]
        window.popleft()
        on_bytes(len(block))

    try:
        for chunk in file.chunks():
            if len(window) == CHUNKS_IN_FLIGHT:
                await retire()
            window.append(asyncio.create_task(_fetch(origin, file, chunk, descriptor), name=f"chunk {chunk.sha256[:12]}"))
        while window:
            await retire()
    finally:
        for task in window:
            task.cancel()
        await asyncio.gather(*window, return_exceptions=True)  # the descriptor is closed next: nobody may write to it any more


async def _fetch(origin: Origin, file: ManifestFile, chunk: Chunk, descriptor: int) -> bytes:
    for _ in range(_ATTEMPTS):
        block = await origin.read(file.digest, offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes)
        if await finish_in_thread(_verify_and_write, block, chunk, descriptor):
            return block
        if len(block) < chunk.length_bytes:
            raise OriginUnavailable(
                f"{file.path}: the origin's {file.digest[:12]} ends before byte {chunk.offset_bytes + chunk.length_bytes}"
            )
    raise ChunkCorrupt(
        f"{file.path}: bytes from {chunk.offset_bytes} of {file.digest[:12]} do not match their hash; the origin's copy is damaged"
    )


async def finish_in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run in a thread, to the end even when cancelled: a thread cannot be stopped, and it holds what its caller is about to close."""
    job = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        await asyncio.wait([job])
        raise


def _verify_and_write(block: bytes, chunk: Chunk, descriptor: int) -> bool:
    if len(block) != chunk.length_bytes or hashlib.sha256(block).hexdigest() != chunk.sha256:
        return False
    view, offset = memoryview(block), chunk.offset_bytes
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
    return True


def _seal(descriptor: int) -> None:
    os.fchmod(descriptor, 0o444)
    os.fsync(descriptor)


def hash_file(path: Path) -> str:
    """The digest of a file (`manifest.file_digest`). Raises OSError."""
    whole = FileHash()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(CHUNK_BYTES):
            whole.update(block)
    return whole.hexdigest()
