"""Client of the weight cache: a typed API over its Unix socket.

One connection carries many calls (`pilotlight.core.rpc`). When the connection is lost, pending
calls raise WeightCacheUnavailable and the next call reconnects. Leases outlive the connection: they
end when they are closed, or when the process that holds them exits. Opening a lease that is already
held returns the same lease."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pilotlight.core.rpc import RpcRemoteError, RpcTransportError, SharedRpcConnection
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


class WeightCacheClient(SharedRpcConnection):
    """Calls the cache at `socket_path`. Owner: one event loop. Connects on first use."""

    async def open(self, manifest: str, *, holder: str, pid: int | None = None) -> OpenedLease:
        """Open a lease on a model and start fetching its missing parts; return at once. Idempotent
        per (manifest, holder).

        pid: the process whose exit ends the lease; None: the lease ends when it is closed. Raises
        LeaseUnknown if that process does not exist, and WeightCacheUnavailable. If the answer is
        `ready`, its path can be used; otherwise call `wait`, which also reports errors."""
        body = await self._call("open", {"manifest": manifest, "holder": holder, "pid": pid})
        path = None if body["path"] is None else Path(body["path"])
        return OpenedLease(**{**body, "tier": Tier(body["tier"]), "path": path})

    async def wait(
        self, lease_id: str, *, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> WeightsLease:
        """Wait until the model of an open lease is in the store; `on_progress` receives the
        progress of the fetch. Cancelling it does not close the lease.

        Raises LeaseUnknown (never opened, closed, or the cache restarted: open it again),
        ManifestInvalid, OriginUnavailable, ChunkCorrupt, StoreFull or WeightCacheUnavailable."""
        body = await self._load("wait", {"lease_id": lease_id}, on_progress or _ignore)
        return WeightsLease(
            lease_id=body["lease_id"],
            manifest=body["manifest"],
            path=Path(body["path"]),
            tier=Tier(body["tier"]),
        )

    async def close(self, lease_id: str) -> bool:
        """Release a lease and cancel its fetch unless others wait for it. False if there was no
        such lease; closing twice is harmless."""
        return bool((await self._call("close", {"lease_id": lease_id}))["closed"])

    async def predict(self, manifest: str) -> Prediction:
        """Predict how long a lease opened now would wait until the model can be read at memory
        speed."""
        body = await self._call("predict", {"manifest": manifest})
        missing = {Tier(tier): size for tier, size in body["missing"].items()}
        return Prediction(tier=Tier(body["tier"]), seconds=body["seconds"], missing=missing)

    async def prefetch(
        self, manifest: str, *, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> None:
        """Fetch a model without holding it, at lower priority than models with waiting callers.
        Same errors as `wait`."""
        await self._load("prefetch", {"manifest": manifest}, on_progress or _ignore)

    async def verify(self, manifest: str) -> list[str]:
        """Read and check a model's bytes; return the digests of corrupt files. These are
        quarantined and fetched again for the next lease."""
        return list((await self._call("verify", {"manifest": manifest}))["corrupt"])

    async def pin(
        self, manifest: str, *, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> None:
        """Fetch a model and exempt it from eviction until `unpin`. Idempotent. Same errors as
        `wait`."""
        await self._load("pin", {"manifest": manifest}, on_progress or _ignore)

    async def unpin(self, manifest: str) -> bool:
        """Make a model evictable again; False if it was not pinned."""
        return bool((await self._call("unpin", {"manifest": manifest}))["unpinned"])

    async def drop(self, manifest: str) -> bool:
        """Remove a model from this node; False if it is leased, pinned or not in the store."""
        return bool((await self._call("drop", {"manifest": manifest}))["dropped"])

    async def stat(self) -> StoreStatistics:
        """Return the store's current statistics."""
        return StoreStatistics.from_json(await self._call("stat", {}))

    async def models(self) -> list[ModelInfo]:
        """All models in the store, least recently used first."""
        return [ModelInfo(**m) for m in (await self._call("list", {}))["models"]]

    async def leases(self) -> list[Lease]:
        """All leases on models in the store, oldest first."""
        return [Lease.from_json(body) for body in (await self._call("list", {}))["leases"]]

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
    """Discard progress."""
