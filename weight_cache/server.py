"""RPC server of the weight cache on its Unix socket, for `weight_cache/client.py`."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pilotlight.core.background_tasks import cancel_all
from pilotlight.core.rpc import RpcGuest, RpcOperation, SendPart, serve_rpc
from weight_cache.errors import ManifestInvalid, WeightCacheError
from weight_cache.leases.manager import LeaseManager, OnProgress
from weight_cache.store.store import Store
from weight_cache.types import LoadProgress

T = TypeVar("T")


CONTROLLER_OPERATIONS = ("predict", "prefetch", "verify", "pin", "unpin", "drop", "stat", "list")
"""Operations allowed to a controller with its own uid: it locates, fetches, keeps and drops models
but holds no leases."""
_MANIFEST = re.compile(r"[0-9a-f]{64}\Z")


async def serve_store(store: Store, leases: LeaseManager, socket_path: Path) -> asyncio.Server:
    """Serve on `socket_path` until the returned server is closed."""
    return await serve_rpc(
        socket_path, {**lease_operations(leases), **store_operations(store)}, _describe
    )


async def serve_controller(
    store: Store, leases: LeaseManager, socket_path: Path, *, uid: int
) -> asyncio.Server:
    """Serve on `socket_path` for root and for a controller with its own uid."""
    operations = {**lease_operations(leases), **store_operations(store)}
    return await serve_rpc(
        socket_path,
        operations,
        _describe,
        guest=RpcGuest(uid=uid, operations=controller_operations(operations)),
    )


def controller_operations(of_root: Mapping[str, RpcOperation]) -> Mapping[str, RpcOperation]:
    """The operations of `of_root` that a controller may call, with their manifest names checked."""
    return {name: _with_check(of_root[name]) for name in CONTROLLER_OPERATIONS}


def _with_check(operation: RpcOperation) -> RpcOperation:
    async def run(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        if "manifest" in args and not _MANIFEST.match(_text(args, "manifest")):
            raise ManifestInvalid(
                f"manifest {_text(args, 'manifest')[:80]!r}: expected the 64 hex digits of a sha256"
            )
        return await operation(args, part)

    return run


def lease_operations(leases: LeaseManager) -> dict[str, RpcOperation]:
    """Operations on leases, by name."""

    async def open_lease(args: Mapping[str, Any], _: SendPart) -> Mapping[str, Any]:
        opened = await leases.open(
            _text(args, "manifest"), holder=_text(args, "holder"), pid=_pid(args)
        )
        path = None if opened.path is None else str(opened.path)
        return {**dataclasses.asdict(opened), "path": path}

    async def wait(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        lease_id = _text(args, "lease_id")
        held = await _stream_progress(part, lambda tell: leases.wait(lease_id, on_progress=tell))
        return {**dataclasses.asdict(held), "path": str(held.path)}

    async def close(args: Mapping[str, Any], _: SendPart) -> Mapping[str, Any]:
        return {"closed": await leases.close(_text(args, "lease_id"))}

    async def predict(args: Mapping[str, Any], _: SendPart) -> Mapping[str, Any]:
        return dataclasses.asdict(await leases.predict(_text(args, "manifest")))

    return {"open": open_lease, "wait": wait, "close": close, "predict": predict}


def store_operations(store: Store) -> dict[str, RpcOperation]:
    """Operations on the store, by name."""

    async def prefetch(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        manifest = _text(args, "manifest")
        await _stream_progress(part, lambda tell: store.prefetch(manifest, on_progress=tell))
        return {}

    async def verify(args: Mapping[str, Any], _: SendPart) -> Mapping[str, Any]:
        return {"corrupt": await store.verify(_text(args, "manifest"))}

    async def pin(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        manifest = _text(args, "manifest")
        await _stream_progress(part, lambda tell: store.pin(manifest, on_progress=tell))
        return {}

    async def unpin(args: Mapping[str, Any], _: SendPart) -> Mapping[str, Any]:
        return {"unpinned": await store.unpin(_text(args, "manifest"))}

    async def drop(args: Mapping[str, Any], _: SendPart) -> Mapping[str, Any]:
        return {"dropped": await store.drop(_text(args, "manifest"))}

    async def stat(_args: Mapping[str, Any], _: SendPart) -> Mapping[str, Any]:
        return store.statistics().to_json()

    async def list_all(_args: Mapping[str, Any], _: SendPart) -> Mapping[str, Any]:
        return {
            "models": [dataclasses.asdict(m) for m in store.models()],
            "leases": [held.to_json() for held in store.leases()],
        }

    return {
        "prefetch": prefetch,
        "verify": verify,
        "pin": pin,
        "unpin": unpin,
        "drop": drop,
        "stat": stat,
        "list": list_all,
    }


async def _stream_progress(
    part: SendPart, work: Callable[[OnProgress], Coroutine[Any, Any, T]]
) -> T:
    """Run `work` and send its latest progress to the client as fast as the client reads, without
    queueing outdated values."""
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
        await cancel_all([sender])


def _describe(error: Exception) -> tuple[str, str, Mapping[str, Any]] | None:
    return (error.code, str(error), {}) if isinstance(error, WeightCacheError) else None


def _text(args: Mapping[str, Any], key: str) -> str:
    value = args.get(key)
    if not isinstance(value, str) or not value:
        raise WeightCacheError(f"{key} = {value!r}: expected a non-empty string")
    return value


def _pid(args: Mapping[str, Any]) -> int | None:
    value = args.get("pid")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise WeightCacheError(f"pid = {value!r}: expected a process id, or null")
    return value
