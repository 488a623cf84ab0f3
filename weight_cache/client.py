"""The weight cache's door: a typed client over its Unix socket.

One connection, many calls (`weight_cache.protocol`). A lost connection fails open calls with ProtocolError; the next call
connects again. Leases do not end with the connection: they name their holder, who releases them, or finds them again with
`leases` after its own restart; asking again for one that is held returns the same lease.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weight_cache import errors
from weight_cache.protocol import RemoteFailure, RpcClient
from weight_cache.types import Lease, LoadProgress, ModelInfo, StoreStatistics, WeightsLease

_BY_CODE: dict[str, type[errors.WeightCacheError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.WeightCacheError)
}


class WeightCacheClient:
    """Asks the cache at `socket_path`. Owner: one event loop; the connection is made when first needed."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._rpc: RpcClient | None = None

    def __repr__(self) -> str:
        state = "connected" if self._rpc is not None and not self._rpc.is_closed else "not connected"
        return f"<WeightCacheClient {self._path} {state}>"

    async def lease(self, manifest: str, *, holder: str) -> WeightsLease:
        """Hold a model, fetched first if need be; returns when it is there. Idempotent per (manifest, holder).

        Raises ManifestInvalid, OriginUnavailable, ChunkCorrupt, StoreFull or ProtocolError. Cancelling it ends the fetching
        unless others wait for it.
        """
        return await self.lease_with_progress(manifest, holder=holder, on_progress=_ignore)

    async def lease_with_progress(self, manifest: str, *, holder: str, on_progress: Callable[[LoadProgress], None]) -> WeightsLease:
        """As `lease`; `on_progress` is told how far the fetching is."""
        body = await self._load("lease", {"manifest": manifest, "holder": holder}, on_progress)
        return WeightsLease(lease_id=body["lease_id"], manifest=body["manifest"], path=Path(body["path"]))

    async def prefetch(self, manifest: str, *, on_progress: Callable[[LoadProgress], None] | None = None) -> None:
        """Bring a model here without holding it. Same errors as `lease`."""
        await self._load("prefetch", {"manifest": manifest}, on_progress or _ignore)

    async def release(self, lease_id: str) -> None:
        """Let go of a lease. Idempotent."""
        await self._call("release", {"lease_id": lease_id})

    async def verify(self, manifest: str) -> list[str]:
        """Read a model's bytes again; returns the digests of files found corrupt (quarantined; the next lease fetches them anew)."""
        return list((await self._call("verify", {"manifest": manifest}))["corrupt"])

    async def stat(self) -> StoreStatistics:
        """The store right now."""
        return StoreStatistics.from_json(await self._call("stat", {}))

    async def models(self) -> list[ModelInfo]:
        """Every model that is here, least recently used first."""
        return [ModelInfo(**m) for m in (await self._call("list", {}))["models"]]

    async def leases(self) -> list[Lease]:
        """Every lease, oldest first: what a holder compares with what it runs after its restart."""
        return [Lease.from_json(body) for body in (await self._call("list", {}))["leases"]]

    async def aclose(self) -> None:
        """Close the connection; leases stay."""
        if self._rpc is not None:
            await self._rpc.aclose()
            self._rpc = None

    async def _connection(self) -> RpcClient:
        if self._rpc is None or self._rpc.is_closed:
            self._rpc = await RpcClient.open(self._path)
        return self._rpc

    async def _call(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return await (await self._connection()).call(op, args)
        except RemoteFailure as e:
            raise _translate(e) from e

    async def _load(self, op: str, args: Mapping[str, Any], on_progress: Callable[[LoadProgress], None]) -> Mapping[str, Any]:
        last: Mapping[str, Any] = {}
        try:
            async with contextlib.aclosing((await self._connection()).stream(op, args)) as bodies:
                async for body in bodies:
                    if "done_bytes" in body:
                        on_progress(LoadProgress(done_bytes=body["done_bytes"], total_bytes=body["total_bytes"]))
                    last = body
        except RemoteFailure as e:
            raise _translate(e) from e
        return last


def _translate(failure: RemoteFailure) -> errors.WeightCacheError:
    return _BY_CODE.get(failure.code, errors.WeightCacheError)(str(failure))


def _ignore(_: LoadProgress) -> None:
    """Nobody wants to know."""
