"""Proofs of section `weight_cache` of platform.yaml: each node of either fleet runs this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pilotlight.core.disk_floor import no_floor
from pilotlight.core.metrics_server import MetricsAddress, MetricsServer
from pilotlight.core.object_store import DirectoryStore
from pilotlight.core.settings import Paths, PlatformSettings, load_section
from tests.options.contract import proves
from weight_cache.__main__ import open_origin, open_peer_service, open_store
from weight_cache.dram.read_ahead import ReadAhead
from weight_cache.errors import WeightCacheError
from weight_cache.fetch.origin import ObjectOrigin
from weight_cache.fetch.read_scheduler import ReadScheduler
from weight_cache.leases import bandwidth
from weight_cache.settings import WeightCacheSettings
from weight_cache.store.scrubber import ScrubRate
from weight_cache.types import ReadPriority


def read(directory: Path, text: str) -> WeightCacheSettings:
    file = directory / "platform.yaml"
    file.write_text(f"weight_cache: {{{text}}}\n")
    return load_section(WeightCacheSettings, "weight_cache", file)


@proves("WeightCacheSettings.metrics_listen")
async def test_metrics_are_served_there(fleet: str, short_tmp: Path) -> None:
    settings = read(short_tmp, "metrics_listen: '127.0.0.1:0'")
    address = MetricsAddress(
        socket_path=short_tmp / "m.sock",
        listen=settings.metrics_listen,
        token_file=short_tmp / "t",
        setting="weight_cache.metrics_listen",
    )
    servers = await MetricsServer(registry=CollectorRegistry()).serve(address)
    assert len(servers) == 2
    for server in servers:
        server.close()


@proves("WeightCacheSettings.max_bytes", "WeightCacheSettings.scrub_bytes_per_s")
async def test_the_store_has_its_size_and_pace(fleet: str, short_tmp: Path) -> None:
    settings = read(short_tmp, f"max_bytes: {64 << 20}, scrub_bytes_per_s: 12345")
    paths = Paths(home=short_tmp, run=short_tmp)
    async with open_origin(paths, PlatformSettings(), settings) as origin:
        speeds = bandwidth.load_bandwidths(short_tmp / "b.json", origin=repr(origin))
        store = open_store(
            short_tmp / "weights", origin, speeds, settings, peer_source=None, floor=no_floor()
        )
        assert f"/{settings.max_bytes} bytes" in repr(store)
        assert "12345 bytes/s" in repr(store.scrubber(ScrubRate(settings.scrub_bytes_per_s)))
        store.close()


@proves("WeightCacheSettings.dram_max_bytes")
async def test_models_are_read_ahead_within_the_budget(fleet: str, short_tmp: Path) -> None:
    settings = read(short_tmp, "dram_max_bytes: 4096")
    speeds = bandwidth.load_bandwidths(short_tmp / "b.json", origin="o")
    ahead = ReadAhead(max_bytes=settings.dram_bytes(), observe=speeds.observe)
    assert "/4096 bytes" in repr(ahead)
    await ahead.aclose()


@proves("WeightCacheSettings.reads_at_once", "WeightCacheSettings.prefetch_share")
async def test_reads_are_bounded_and_prefetches_have_a_share(fleet: str, short_tmp: Path) -> None:
    settings = read(short_tmp, "reads_at_once: 4, prefetch_share: 0.5")
    lanes = ReadScheduler(settings.reads_at_once, settings.prefetch_share)
    release = asyncio.Event()

    async def hold(lane: ReadPriority) -> None:
        async with lanes.turn(lambda: lane):
            await release.wait()

    first = next(iter(ReadPriority))
    starts = [asyncio.create_task(hold(first)) for _ in range(5)]
    await asyncio.sleep(0)
    assert (lanes.running(first), lanes.waiting(first)) == (4, 1)
    release.set()
    await asyncio.gather(*starts)
    release.clear()
    start = asyncio.create_task(hold(first))
    await asyncio.sleep(0)
    ahead = [asyncio.create_task(hold(ReadPriority.PREFETCH)) for _ in range(4)]
    await asyncio.sleep(0)
    share = int(settings.reads_at_once * settings.prefetch_share)
    assert (lanes.running(first), lanes.running(ReadPriority.PREFETCH)) == (1, share)
    release.set()
    await asyncio.gather(start, *ahead)


@proves("WeightCacheSettings.origin_attempts", "WeightCacheSettings.origin_timeout_s")
async def test_the_origin_is_asked_so_often(fleet: str, short_tmp: Path) -> None:
    settings = read(short_tmp, "origin_attempts: 3, origin_timeout_s: 0.1")
    asked: list[str] = []

    class Silent(DirectoryStore):
        async def info(self, key: str) -> Any:
            asked.append(key)
            await asyncio.sleep(60)

    origin = ObjectOrigin(
        Silent(short_tmp),
        attempts=settings.origin_attempts,
        timeout_s=settings.origin_timeout_s,
        pause=lambda _: asyncio.sleep(0),
    )
    with pytest.raises(WeightCacheError, match="3 attempts"):
        await origin.size("a" * 64)
    assert len(asked) == settings.origin_attempts


@proves(
    "WeightCacheSettings.peers",
    "WeightCacheSettings.peer_listen",
    "WeightCacheSettings.peer_timeout_s",
    "WeightCacheSettings.peer_uploads_at_once",
    "WeightCacheSettings.peer_upload_bytes_per_s",
    "WeightCacheSettings.peer_distrust_s",
)
def test_other_nodes_are_asked_and_served_as_it_says(fleet: str, short_tmp: Path) -> None:
    paths = Paths(home=short_tmp, run=short_tmp)
    from pilotlight.core.crypto import PlatformKey

    PlatformKey.load_or_create(short_tmp / "platform.key")
    assert open_peer_service(paths, PlatformSettings(), WeightCacheSettings(), None) is None
    settings = read(
        short_tmp,
        "peers: ['127.0.0.1:1'], peer_listen: '127.0.0.1:0', peer_timeout_s: 2, "
        "peer_uploads_at_once: 3, peer_upload_bytes_per_s: 777, peer_distrust_s: 55",
    )
    service = open_peer_service(paths, PlatformSettings(), settings, None)
    assert service is not None
    terms = service.terms
    assert (tuple(terms.peers), terms.listen, terms.answer_s) == (
        tuple(settings.peers),
        settings.peer_listen,
        settings.peer_timeout_s,
    )
    assert (terms.uploads_at_once, terms.upload_bytes_per_s, terms.distrust_s) == (
        settings.peer_uploads_at_once,
        settings.peer_upload_bytes_per_s,
        settings.peer_distrust_s,
    )
