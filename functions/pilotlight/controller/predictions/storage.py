"""The objects of prediction logs: storing, sending as an archive, deleting."""

from __future__ import annotations

import tarfile
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final

from pilotlight.controller.context import Context
from pilotlight.controller.database.transactions import in_read, in_write
from pilotlight.controller.predictions import files
from pilotlight.controller.predictions.files import MAX_FILE_BYTES, PredictionFile, StoredFile
from pilotlight.controller.weights.blob_upload import store_errors
from pilotlight.core.object_store.errors import ObjectNotFound

EXPIRE_BATCH: Final = 500
_BLOCK: Final = tarfile.BLOCKSIZE


async def store(context: Context, name: str, data: bytes) -> bool:
    """Store a file under the name that an activator gave it; again changes nothing. Returns False
    if it is not to be stored (`files.register`).

    Raises InvalidInput, StorageQuotaExceeded, Unavailable."""
    file = PredictionFile.parse(name)
    register = partial(files.register, file=file, size_bytes=len(data), plans=context.config.plans)
    if not await in_write(context.store, register):
        return False
    with store_errors():
        await context.files.objects.put(file.key, data)
    return True


async def archive(
    context: Context, tenant: str, found: Sequence[StoredFile]
) -> AsyncIterator[bytes]:
    """Yield a tar archive (POSIX.1-1988) of the files, without those whose objects have not arrived
    or are deleted. One file is in memory at a time, of few archives of a tenant. Raises
    ObjectStoreError."""
    async with context.downloads.share(tenant):
        for one in found:
            try:
                data = await context.files.objects.get(one.key, max_bytes=MAX_FILE_BYTES)
            except ObjectNotFound:
                continue
            head = tarfile.TarInfo(one.name)
            head.size, head.mode = len(data), 0o644
            yield head.tobuf(tarfile.USTAR_FORMAT)
            yield data
            yield bytes(-len(data) % _BLOCK)
        yield bytes(2 * _BLOCK)


async def delete_expired(context: Context) -> int:
    """Delete the files whose window is over; returns their number. Raises ObjectStoreError."""
    deleted, batch = 0, EXPIRE_BATCH
    while batch == EXPIRE_BATCH:
        expired = partial(files.expired, now=context.clock(), limit=EXPIRE_BATCH)
        found = await in_read(context.store, expired)
        for _, key in found:
            await context.files.objects.delete(key)
        if found:
            ids = [file for file, _ in found]
            await in_write(context.store, partial(files.forget, ids=ids))
        batch = len(found)
        deleted += batch
    return deleted
