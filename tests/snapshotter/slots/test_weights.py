"""A slot's weights: opened early, waited for late, asked for again when the cache restarts, given
back or not."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from snapshotter.slots.replies import BootFailed
from snapshotter.slots.weights import Served, Weights, served_from
from snapshotter.types import LaunchSpec, RevisionKey, StartKind, WeightsMount
from tests.fakes.agent_home import FakeWeights
from tests.weight_cache.models import put_model
from tests.weight_cache.served import node_with_client
from weight_cache.errors import LeaseUnknown, OriginUnavailable, WeightCacheUnavailable
from weight_cache.types import Lease, Tier

MOUNTS = (WeightsMount(name="a", manifest="1" * 64), WeightsMount(name="b", manifest="2" * 64))
LAUNCH = LaunchSpec(
    revision=RevisionKey("f@v1"),
    trust_domain="t",
    uid=None,
    bundle="",
    image=None,
    entry={},
    weights=MOUNTS,
    memory_bytes=1,
    cpu=1.0,
    startup_timeout_s=1.0,
)


@pytest.fixture
def cache(tmp_path: Path) -> FakeWeights:
    return FakeWeights(tmp_path)


async def test_all_are_held_for_the_shim(cache: FakeWeights, tmp_path: Path) -> None:
    opening = Weights(cache).open(MOUNTS, holder="s-1", pid=77)
    assert opening.lease_ids == tuple(Lease.id_of(m.manifest, "s-1") for m in MOUNTS)
    assert await opening.ready() == {
        name: Served(path=tmp_path, tier=Tier.NVME) for name in ("a", "b")
    }
    assert cache.held == dict.fromkeys(opening.lease_ids, "s-1")
    assert set(cache.pids.values()) == {77}
    await Weights(cache).close(opening.lease_ids)
    assert cache.held == {}


async def test_nothing_to_hold_is_ready(cache: FakeWeights) -> None:
    opening = Weights(cache).open((), holder="s-1", pid=None)
    assert opening.is_done
    assert await opening.ready() == {}


async def test_what_is_on_its_way_is_waited_for(cache: FakeWeights) -> None:
    cache.tier = Tier.ORIGIN
    opening = Weights(cache).open(MOUNTS, holder="s-1", pid=1)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not opening.is_done
    assert len(cache.held) == 2
    cache.arrival.set()
    assert {served.tier for served in (await opening.ready()).values()} == {Tier.ORIGIN}


async def test_cache_that_restarts_is_asked_again(
    cache: FakeWeights, caplog: pytest.LogCaptureFixture
) -> None:
    cache.tier = Tier.ORIGIN
    cache.arrival.set()
    cache.failures = {
        "open": [WeightCacheUnavailable("nobody answers")],
        "wait": [LeaseUnknown("restarted"), WeightCacheUnavailable("lost")],
    }
    cache.arrival.clear()
    opening = Weights(cache).open(MOUNTS[:1], holder="s-1", pid=1)
    cache.arrival.set()
    assert len(await opening.ready()) == 1
    assert "weights.again slot=s-1 name=a error=nobody answers" in caplog.text


async def test_real_cache_that_restarts_while_bytes_are_on_their_way_delivers_all_the_same() -> (
    None
):
    async with node_with_client() as (node, cache, client):
        here, coming = put_model(node.origin, {"a": b"x"}), put_model(node.origin, {"b": b"y"})
        await client.prefetch(here)
        mounts = (
            WeightsMount(name="here", manifest=here),
            WeightsMount(name="coming", manifest=coming),
        )
        node.origin.gate, node.origin.asked = asyncio.Event(), asyncio.Event()
        opening = Weights(client).open(mounts, holder="s-1", pid=os.getpid())
        await node.origin.asked.wait()
        await cache.aclose()
        node.origin.gate.set()
        another = await node.start()
        served = await opening.ready()
        assert (served["here"].path / "a").read_bytes() == b"x"
        assert (served["coming"].path / "b").read_bytes() == b"y"
        assert {lease.id for lease in another.store.leases()} == set(opening.lease_ids)
        await Weights(client).close(opening.lease_ids)
        assert another.store.leases() == []
        await client.aclose()
        await another.aclose()


async def test_what_cannot_be_had_is_said_at_once(cache: FakeWeights) -> None:
    cache.tier = Tier.ORIGIN
    cache.failures["wait"] = [OriginUnavailable("no such blob")]
    cache.arrival.set()
    cache.failures["open"] = [OriginUnavailable("no such blob")]
    opening = Weights(cache).open(MOUNTS, holder="s-1", pid=1)
    with pytest.raises(OriginUnavailable):
        await opening.ready()
    await opening.cancel()


async def test_shim_that_is_gone_is_a_failed_boot(cache: FakeWeights) -> None:
    cache.failures["open"] = [LeaseUnknown("process 1 is gone")]
    opening = Weights(cache).open(MOUNTS[:1], holder="s-1", pid=1)
    with pytest.raises(BootFailed, match="the slot's shim has exited"):
        await opening.ready()


async def test_abandoned_ones_are_not_waited_for(cache: FakeWeights) -> None:
    cache.tier = Tier.ORIGIN
    opening = Weights(cache).open(MOUNTS, holder="s-1", pid=1)
    await asyncio.sleep(0)
    await opening.cancel()
    assert opening.is_done


async def test_cache_that_cannot_be_told_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent(FakeWeights):
        async def close(self, lease_id: str) -> bool:
            raise WeightCacheUnavailable("nobody answers")

    caplog.set_level(logging.WARNING)
    await Weights(Silent(tmp_path)).close(["l-1"])
    assert "weights.not_closed lease=l-1" in caplog.text


async def test_expected_wait_is_for_what_has_to_be_fetched(
    cache: FakeWeights, tmp_path: Path
) -> None:
    cache.expected_s = 2.0
    assert await Weights(cache).predict_wait_s(LAUNCH) == 0.0
    cache.tier = Tier.ORIGIN
    assert await Weights(cache).predict_wait_s(LAUNCH) == 4.0
    cache.expected_s = None
    assert await Weights(cache).predict_wait_s(LAUNCH) == 0.0


@pytest.mark.parametrize(
    "kind, tier",
    [
        (StartKind.COLD, "origin"),
        (StartKind.RESTORE, "origin"),
        (StartKind.FORK, "dram"),
        (StartKind.WAKE, "dram"),
    ],
)
def test_fork_is_served_from_memory(kind: StartKind, tier: str) -> None:
    found = {m.name: Served(path=Path("/"), tier=Tier.ORIGIN) for m in MOUNTS}
    assert served_from(kind, LAUNCH, found) == {"a": tier, "b": tier}
