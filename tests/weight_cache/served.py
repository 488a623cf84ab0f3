"""A whole weight cache on a socket, in this process: store, leases, reading ahead; the origin is in
memory."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.origins import MemoryOrigin
from tests.fakes.trees import remove_tree
from weight_cache.client import WeightCacheClient
from weight_cache.dram.read_ahead import ReadAhead
from weight_cache.leases.bandwidth import TierBandwidths
from weight_cache.leases.manager import LeaseManager
from weight_cache.server import serve_store
from weight_cache.store.store import Store
from weight_cache.types import Tier


@dataclass(kw_only=True)
class Cache:
    """One life of a cache process."""

    store: Store
    leases: LeaseManager
    bandwidths: TierBandwidths
    ahead: ReadAhead
    server: asyncio.Server

    async def aclose(self) -> None:
        """As at SIGTERM: connections are cut."""
        self.server.close()
        connections = [
            task
            for task in asyncio.all_tasks()
            if getattr(task.get_coro(), "__qualname__", "").endswith("on_connection")
        ]
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await asyncio.sleep(0)  # their sockets close in the loop's next turn
        await self.leases.aclose()
        await self.ahead.aclose()
        self.store.close()


class Node:
    """A directory with a cache in it that can be restarted. `home` is short: Unix sockets allow 107
    bytes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.socket = home / "s"
        self.origin = MemoryOrigin()
        self.forecasts: list[tuple[float, float]] = []

    async def start(self, *, max_bytes: int = 100_000) -> Cache:
        """A cache that serves; what an earlier one granted holds."""
        bandwidths = TierBandwidths(origin="memory")
        store = Store.open(
            self.home / "w",
            origin=self.origin,
            max_bytes=max_bytes,
            clock=lambda: 5.0,
            observe=lambda size, seconds: bandwidths.observe(Tier.ORIGIN, size, seconds),
            reload_s=bandwidths.reload_s,
        )
        ahead = ReadAhead(max_bytes=10**6, observe=bandwidths.observe)
        leases = LeaseManager(
            store,
            bandwidths=bandwidths,
            ahead=ahead,
            on_fetched=lambda *seconds: self.forecasts.append(seconds),
        )
        await leases.adopt()
        server = await serve_store(store, leases, self.socket)
        return Cache(store=store, leases=leases, bandwidths=bandwidths, ahead=ahead, server=server)


@contextlib.asynccontextmanager
async def node_with_client() -> AsyncIterator[tuple[Node, Cache, WeightCacheClient]]:
    """A node, its cache, and somebody who asks it."""
    home = Path(tempfile.mkdtemp(prefix="pl"))
    node = Node(home)
    cache = await node.start()
    client = WeightCacheClient(node.socket)
    try:
        yield node, cache, client
    finally:
        await client.aclose()
        await cache.aclose()
        remove_tree(home)
