"""The weight cache's door: a typed client over its Unix socket.

One connection, many calls (`pilotlight.core.rpc`). A lost connection fails open calls with
WeightCacheUnavailable; the next call connects again. Leases do not end with the connection: they
end when they are closed, or with the process that holds them; opening one again that is held
returns the same lease."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pilotlight.core.rpc import RpcClient, RpcRemoteError, RpcTransportError
from weight_cache import errors
from weight_cache.types import (
    Lease,
    LoadProgress,
    ModelInfo,
    OpenedLease,
    Prediction,
    StoreStatistics,
    Tier,
    WeightsLease,
)

_BY_CODE: dict[str, type[errors.WeightCacheError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.WeightCacheError)
}


class WeightCacheClient:
    """Asks the cache at `socket_path`. Owner: one event loop; the connection is made when first
    needed."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._rpc: RpcClient | None = None
        self._opening = asyncio.Lock()

    def __repr__(self) -> str:
        state = (
            "connected" if self._rpc is not None and not self._rpc.is_closed else "not connected"
        )
        return f"<WeightCacheClient {self._path} {state}>"

    async def open(self, manifest: str, *, holder: str, pid: int | None = None) -> OpenedLease:
        """Hold a model, and begin to fetch what of it is not here; returns at once. Idempotent per
        (manifest, holder).

        pid: the process whose end ends the lease; None: it ends when it is closed. Raises
        LeaseUnknown when that process is gone, and WeightCacheUnavailable. When the answer says
        `ready`, its path can be used; else `wait`, which also says what is wrong with the model."""
        body = await self._call("open", {"manifest": manifest, "holder": holder, "pid": pid})
        path = None if body["path"] is None else Path(body["path"])
        return OpenedLease(**{**body, "tier": Tier(body["tier"]), "path": path})

    async def wait(
        self, lease_id: str, *, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> WeightsLease:
        """Until the model of an opened lease is here; `on_progress` is told how far the fetching
        is. Cancelling it closes nothing.

        Raises LeaseUnknown (never opened, closed, or the cache restarted meanwhile: open it again),
        ManifestInvalid, OriginUnavailable, ChunkCorrupt, StoreFull or WeightCacheUnavailable."""
        body = await self._load("wait", {"lease_id": lease_id}, on_progress or _ignore)
        return WeightsLease(
            lease_id=body["lease_id"],
            manifest=body["manifest"],
            path=Path(body["path"]),
            tier=Tier(body["tier"]),
        )

    async def close(self, lease_id: str) -> bool:
        """Let go of a lease, and end its fetch unless others wait for it. False when there was
        none: closing twice is harmless."""
        return bool((await self._call("close", {"lease_id": lease_id}))["closed"])

    async def predict(self, manifest: str) -> Prediction:
        """How long a lease that is opened now would be waited for, until the model can be read at
        the speed of memory."""
        body = await self._call("predict", {"manifest": manifest})
        missing = {Tier(tier): size for tier, size in body["missing"].items()}
        return Prediction(tier=Tier(body["tier"]), seconds=body["seconds"], missing=missing)

    async def prefetch(
        self, manifest: str, *, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> None:
        """Bring a model here without holding it, after those that somebody waits for. Same errors
        as `wait`."""
        await self._load("prefetch", {"manifest": manifest}, on_progress or _ignore)

    async def verify(self, manifest: str) -> list[str]:
        """Read a model's bytes again; returns the digests of files found corrupt: quarantined, and
        fetched anew for the next lease."""
        return list((await self._call("verify", {"manifest": manifest}))["corrupt"])

    async def pin(
        self, manifest: str, *, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> None:
        """Bring a model here and keep it, whoever needs room, until `unpin`. Idempotent. Same
        errors as `wait`."""
        await self._load("pin", {"manifest": manifest}, on_progress or _ignore)

    async def unpin(self, manifest: str) -> bool:
        """It may go again when room is needed; False when it was not pinned."""
        return bool((await self._call("unpin", {"manifest": manifest}))["unpinned"])

    async def drop(self, manifest: str) -> bool:
        """Take a model off this node now; False when it is held or pinned, or not here."""
        return bool((await self._call("drop", {"manifest": manifest}))["dropped"])

    async def stat(self) -> StoreStatistics:
        """The store right now."""
        return StoreStatistics.from_json(await self._call("stat", {}))

    async def models(self) -> list[ModelInfo]:
        """Every model that is here, least recently used first."""
        return [ModelInfo(**m) for m in (await self._call("list", {}))["models"]]

    async def leases(self) -> list[Lease]:
        """Every lease on a model that is here, oldest first."""
        return [Lease.from_json(body) for body in (await self._call("list", {}))["leases"]]

    async def aclose(self) -> None:
        """Close the connection; leases stay."""
        if self._rpc is not None:
            await self._rpc.aclose()
            self._rpc = None

    async def _connection(self) -> RpcClient:
        async with self._opening:
            if self._rpc is None or self._rpc.is_closed:
                self._rpc = await RpcClient.open(self._path)
            return self._rpc

    async def _call(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return await (await self._connection()).call(op, args)
        except RpcRemoteError as e:
            raise _error_for(e) from e
        except RpcTransportError as e:
            raise errors.WeightCacheUnavailable(str(e)) from e

    async def _load(
        self, op: str, args: Mapping[str, Any], on_progress: Callable[[LoadProgress], None]
    ) -> Mapping[str, Any]:
        last: Mapping[str, Any] = {}
        try:
            async with contextlib.aclosing((await self._connection()).stream(op, args)) as bodies:
                async for body in bodies:
                    if "done_bytes" in body:
                        on_progress(
                            LoadProgress(
                                done_bytes=body["done_bytes"], total_bytes=body["total_bytes"]
                            )
                        )
                    last = body
        except RpcRemoteError as e:
            raise _error_for(e) from e
        except RpcTransportError as e:
            raise errors.WeightCacheUnavailable(str(e)) from e
        return last


def _error_for(failure: RpcRemoteError) -> errors.WeightCacheError:
    return _BY_CODE.get(failure.code, errors.WeightCacheError)(str(failure))


def _ignore(_: LoadProgress) -> None:
    """Nobody wants to know."""
