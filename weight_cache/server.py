"""The store on its Unix socket: operations of `weight_cache/client.py`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from weight_cache.errors import WeightCacheError
from weight_cache.protocol import Operation, Part, serve
from weight_cache.store import OnProgress, Store
from weight_cache.types import LoadProgress

T = TypeVar("T")


async def serve_store(store: Store, socket_path: Path) -> asyncio.Server:
    """Answer on `socket_path` until the returned server is closed."""
    return await serve(socket_path, operations(store), _describe)


def operations(store: Store) -> dict[str, Operation]:
    """What can be asked of a store, by name."""

    async def lease(args: Mapping[str, Any], part: Part) -> Mapping[str, Any]:
        manifest, holder = _text(args, "manifest"), _text(args, "holder")
        held, path = await _reporting(part, lambda tell: store.lease(manifest, holder=holder, on_progress=tell))
        return {"lease_id": held.id, "manifest": held.manifest, "path": str(path)}

    async def prefetch(args: Mapping[str, Any], part: Part) -> Mapping[str, Any]:
        manifest = _text(args, "manifest")
        await _reporting(part, lambda tell: store.prefetch(manifest, on_progress=tell))
        return {}

    async def release(args: Mapping[str, Any], _: Part) -> Mapping[str, Any]:
        return {"released": await store.release(_text(args, "lease_id"))}

    async def verify(args: Mapping[str, Any], _: Part) -> Mapping[str, Any]:
        return {"corrupt": await store.verify(_text(args, "manifest"))}

    async def stat(_args: Mapping[str, Any], _: Part) -> Mapping[str, Any]:
        return store.statistics().to_json()

    async def list_all(_args: Mapping[str, Any], _: Part) -> Mapping[str, Any]:
        return {"models": [dataclasses.asdict(m) for m in store.models()], "leases": [held.to_json() for held in store.leases()]}

    return {"lease": lease, "prefetch": prefetch, "release": release, "verify": verify, "stat": stat, "list": list_all}


async def _reporting(part: Part, work: Callable[[OnProgress], Coroutine[Any, Any, T]]) -> T:
    """Run `work`; the peer is sent the newest progress as fast as it reads, never a backlog of old figures."""
    newest: LoadProgress | None = None
    changed = asyncio.Event()

    def tell(progress: LoadProgress) -> None:
        nonlocal newest
        newest = progress
        changed.set()

    async def send() -> None:
        while True:
            await changed.wait()
            changed.clear()
            if newest is not None:
                await part({"done_bytes": newest.done_bytes, "total_bytes": newest.total_bytes})

    sender = asyncio.create_task(send(), name="progress")
    try:
        return await work(tell)
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


def _describe(error: Exception) -> tuple[str, str, Mapping[str, Any]] | None:
    return (error.code, str(error), {}) if isinstance(error, WeightCacheError) else None


def _text(args: Mapping[str, Any], key: str) -> str:
    value = args.get(key)
    if not isinstance(value, str) or not value:
        raise WeightCacheError(f"{key} = {value!r}: expected a text")
    return value
