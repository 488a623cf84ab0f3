"""The door: what holders and operators ask, over a real socket, of a real store."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.weight_cache.models import put_model
from tests.weight_cache.served import Cache, Node
from weight_cache.client import WeightCacheClient
from weight_cache.errors import (
    ChunkCorrupt,
    LeaseUnknown,
    OriginUnavailable,
    StoreFull,
    WeightCacheUnavailable,
)
from weight_cache.types import LoadProgress, Tier


async def test_model_from_the_origin_comes_with_progress_and_is_in_memory_for_the_next(
    node: Node, client: WeightCacheClient
) -> None:
    name = put_model(node.origin, {"a": b"x" * 1000})
    first = await client.open(name, holder="slot-1")
    assert (first.ready, first.path, first.tier) == (False, None, Tier.ORIGIN)
    seen: list[LoadProgress] = []
    lease = await client.wait(first.lease_id, on_progress=seen.append)
    assert (lease.path / "a").stat().st_size == 1000
    assert lease.tier is Tier.ORIGIN
    assert all(p.total_bytes == 1000 for p in seen)
    second = await client.open(name, holder="slot-2")
    assert (second.ready, second.path, second.tier) == (True, lease.path, Tier.DRAM)
    assert [held.holder for held in await client.leases()] == ["slot-1", "slot-2"]
    assert [(m.manifest, m.leases) for m in await client.models()] == [(name, 2)]
    assert len(node.forecasts) == 1


async def test_closing_twice_is_harmless(node: Node, client: WeightCacheClient) -> None:
    opened = await client.open(put_model(node.origin, {"a": b"x"}), holder="slot-1")
    await client.wait(opened.lease_id)
    assert await client.close(opened.lease_id)
    assert not await client.close(opened.lease_id)
    assert (await client.stat()).leases == 0


async def test_many_who_open_at_once_share_one_connection_and_one_fetch(
    node: Node, client: WeightCacheClient
) -> None:
    name = put_model(node.origin, {"a": b"x" * 1000})
    opened = await asyncio.gather(*(client.open(name, holder=f"slot-{n}") for n in range(8)))
    await asyncio.gather(*(client.wait(lease.lease_id) for lease in opened))
    assert node.origin.reads == 2  # the manifest, the file
    assert (await client.stat()).leases == 8


async def test_errors_keep_their_class(node: Node, client: WeightCacheClient) -> None:
    nowhere = await client.open("0" * 64, holder="s")
    with pytest.raises(OriginUnavailable, match="no blob"):
        await client.wait(nowhere.lease_id)
    with pytest.raises(StoreFull):
        await client.prefetch(put_model(node.origin, {"a": b"x" * 200_000}))
    name = put_model(node.origin, {"a": b"x"})
    node.origin.damaged[name] = 100
    damaged = await client.open(name, holder="s")
    with pytest.raises(ChunkCorrupt):
        await client.wait(damaged.lease_id)
    with pytest.raises(LeaseUnknown, match="Open it again"):
        await client.wait("l-nobody")


async def test_fetch_ends_when_the_lease_is_closed(node: Node, client: WeightCacheClient) -> None:
    node.origin.gate = asyncio.Event()
    opened = await client.open(put_model(node.origin, {"a": b"x"}), holder="s")
    await node.origin.asked.wait()
    waiting = asyncio.create_task(client.wait(opened.lease_id))
    assert (await client.stat()).leases == 0
    assert await client.close(opened.lease_id)
    with pytest.raises(LeaseUnknown):
        await waiting
    assert (await client.stat()).arriving == 0


async def test_who_stops_waiting_keeps_the_lease(node: Node, client: WeightCacheClient) -> None:
    node.origin.gate = asyncio.Event()
    opened = await client.open(put_model(node.origin, {"a": b"x"}), holder="s")
    waiting = asyncio.create_task(client.wait(opened.lease_id))
    await node.origin.asked.wait()
    waiting.cancel()
    await asyncio.wait([waiting])
    node.origin.gate.set()
    assert (await client.wait(opened.lease_id)).tier is Tier.ORIGIN


async def test_lease_ends_with_its_process(node: Node, client: WeightCacheClient) -> None:
    name = put_model(node.origin, {"a": b"x"})
    process = await asyncio.create_subprocess_exec("/bin/cat", stdin=asyncio.subprocess.PIPE)
    opened = await client.open(name, holder="s", pid=process.pid)
    await client.wait(opened.lease_id)
    assert [lease.pid for lease in await client.leases()] == [process.pid]
    await process.communicate(b"")
    async with asyncio.timeout(30):
        while await client.leases():
            await asyncio.sleep(0.001)
    with pytest.raises(LeaseUnknown, match="does not exist"):
        await client.open(name, holder="t", pid=process.pid)


async def test_prediction_follows_the_model_up(node: Node, client: WeightCacheClient) -> None:
    name = put_model(node.origin, {"a": b"x" * 5000})
    unknown = await client.predict(name)
    assert (unknown.tier, unknown.seconds, unknown.missing) == (Tier.ORIGIN, None, {})
    await client.prefetch(name)
    here = await client.predict(name)
    assert (here.tier, here.seconds, here.missing) == (Tier.DRAM, 0.0, {Tier.NVME: 0})


async def test_operator_pins_drops_and_verifies(node: Node, client: WeightCacheClient) -> None:
    name = put_model(node.origin, {"a": b"x" * 1000})
    seen: list[LoadProgress] = []
    await client.pin(name, on_progress=seen.append)
    assert [m.is_pinned for m in await client.models()] == [True]
    assert not await client.drop(name)
    assert await client.unpin(name)
    assert not await client.unpin(name)
    assert await client.verify(name) == []
    assert await client.drop(name)
    assert await client.models() == []


async def test_restart_keeps_granted_leases_and_forgets_those_on_their_way(
    served: tuple[Node, Cache, WeightCacheClient],
) -> None:
    node, cache, client = served
    here, coming = put_model(node.origin, {"a": b"x"}), put_model(node.origin, {"b": b"y"})
    kept = await client.open(here, holder="s", pid=os.getpid())
    path = (await client.wait(kept.lease_id)).path
    node.origin.gate = asyncio.Event()
    lost = await client.open(coming, holder="s")
    waiting = asyncio.create_task(client.wait(lost.lease_id))
    await asyncio.sleep(0)
    await cache.aclose()
    another = await node.start()
    try:
        with pytest.raises((LeaseUnknown, WeightCacheUnavailable)):
            await waiting
        fresh = WeightCacheClient(node.socket)
        assert (await fresh.wait(kept.lease_id)).path == path
        with pytest.raises(LeaseUnknown, match="restarted"):
            await fresh.wait(lost.lease_id)
        node.origin.gate = None
        await fresh.wait((await fresh.open(coming, holder="s")).lease_id)
        await fresh.aclose()
    finally:
        await another.aclose()


async def test_nobody_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(WeightCacheUnavailable, match="cannot connect to"):
        await WeightCacheClient(tmp_path / "none").stat()


async def test_says_whether_it_is_connected(client: WeightCacheClient) -> None:
    assert repr(client).endswith("not connected>")
    await client.stat()
    assert repr(client).endswith("s connected>")
