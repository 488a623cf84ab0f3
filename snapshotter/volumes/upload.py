"""Uploads chunks of files that are open already."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from functools import partial

from pilotlight.core.object_store import ObjectStore
from pilotlight.core.object_store.errors import ObjectStoreError
from pilotlight.core.threads import run_concurrently
from pilotlight.core.volumes.entries import chunk_key
from snapshotter.volumes import tree
from snapshotter.volumes.tree import StoreFailed, TreeRefused

AT_ONCE = 4
"""Chunks in memory: four of 16 MiB, and a copy of each in the client."""


async def put_all(
    store: ObjectStore,
    tenant: str,
    places: Mapping[str, tuple[str, int]],
    opened: Mapping[str, int],
) -> None:
    """Store chunks under their digests. `places`: digest → path and offset; `opened`: path →
    descriptor. Raises TreeRefused for content that does not match, StoreFailed."""

    async def put(digest: str, path: str, offset: int) -> None:
        data = bytes(await asyncio.to_thread(tree.read_chunk, opened[path], offset))
        found = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        if found != digest:
            raise TreeRefused(f"{path} was written to while it was committed: commit again")
        await store.put(chunk_key(tenant, digest), data)

    jobs = (partial(put, digest, path, offset) for digest, (path, offset) in places.items())
    try:
        await run_concurrently(jobs, at_once=AT_ONCE)
    except ObjectStoreError as e:
        raise StoreFailed(str(e)) from e
    finally:
        await store.aclose()
