"""The weight cache process: `python -m weight_cache --config platform.yaml --ready-fd N`."""

from __future__ import annotations

from pilotlight.core.startup import import_gc

# isort: split
import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pilotlight.core import logging_config
from pilotlight.core.background_tasks import cancel_all
from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.metrics_server import (
    MetricsAddress,
    MetricsServer,
    metrics_socket,
    metrics_token_file,
)
from pilotlight.core.object_store import blob_store
from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid, load_section
from pilotlight.core.transport.endpoint import CertificateInvalid, TlsCredentials
from weight_cache import process_tuning
from weight_cache.dram.read_ahead import ReadAhead
from weight_cache.errors import StoreOwned
from weight_cache.fetch.origin import ObjectOrigin, Origin
from weight_cache.fetch.peer_source import PeerSource
from weight_cache.fetch.read_scheduler import ReadScheduler
from weight_cache.leases import bandwidth
from weight_cache.leases.bandwidth import TierBandwidths
from weight_cache.leases.manager import LeaseManager
from weight_cache.metrics import PredictionMetrics, StoreCollector, TierCollector
from weight_cache.peers.service import PeerService, PeerSettings
from weight_cache.server import serve_controller, serve_store
from weight_cache.settings import WeightCacheSettings
from weight_cache.store.scrubber import ScrubRate
from weight_cache.store.store import Store
from weight_cache.types import Tier

import_gc.imported()

_log = logging.getLogger("weight_cache")


_SAVE_BANDWIDTHS_INTERVAL_S = 60.0
"""Interval between two writes of the measured bandwidths: a kill loses at most this much."""


async def run(
    paths: Paths, platform: PlatformSettings, settings: WeightCacheSettings, *, ready_fd: int | None
) -> None:
    """Serve until SIGTERM or SIGINT. Raises StoreOwned, SettingsInvalid, or OSError if an address
    is in use."""
    stop = _stop_on_signals()
    root, registry = paths.home / "weights", CollectorRegistry()
    async with open_origin(paths, platform, settings) as origin:
        bandwidths = bandwidth.load_bandwidths(root / "bandwidth.json", origin=repr(origin))
        credentials = TlsCredentials.of(platform)
        peer_service = open_peer_service(paths, platform, settings, credentials)
        floor = DiskFloor(root, platform.disk_floor_bytes)
        store = open_store(
            root,
            origin,
            bandwidths,
            settings,
            peer_source=None if peer_service is None else peer_service.exchange,
            floor=floor,
        )
        ahead = ReadAhead(max_bytes=settings.dram_bytes(), observe=bandwidths.observe)
        leases = LeaseManager(
            store,
            bandwidths=bandwidths,
            ahead=ahead,
            on_fetched=PredictionMetrics(registry).fetched,
        )
        await leases.adopt()
        registry.register(StoreCollector(store.statistics))
        registry.register(TierCollector(leases=leases, bandwidths=bandwidths, ahead=ahead))
        servers = await MetricsServer(registry=registry).serve(
            _metrics_address(paths, platform, settings)
        )
        servers += await _open_sockets(store, leases, paths)
        if peer_service is not None:
            await peer_service.open(
                store.verified_chunks,
                tls=None if credentials is None else credentials.server_context(),
            )
            registry.register(peer_service.collector())
        behind = [
            _run_in_background(
                store.scrubber(ScrubRate(settings.scrub_bytes_per_s)).run(), "scrub"
            ),
            _run_in_background(_save_bandwidths_forever(root, bandwidths), "keep speeds"),
        ]
        _log.info(
            "serving store=%r origin=%r speeds=%r peers=%r", store, origin, bandwidths, peer_service
        )
        _report_ready(ready_fd)
        await stop.wait()
        _log.info("stopping behind=%d", sum(not task.done() for task in behind))
        # the store's socket first, to stop new work; the metrics last
        for server in reversed(servers):
            server.close()
        if peer_service is not None:
            await peer_service.aclose()
        # finish writes in progress before releasing the directory
        await cancel_all(
            [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        )
        await leases.aclose()
        await ahead.aclose()
        bandwidth.save_bandwidths(root / "bandwidth.json", bandwidths)
        store.close()


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _metrics_address(
    paths: Paths, platform: PlatformSettings, settings: WeightCacheSettings
) -> MetricsAddress:
    return MetricsAddress(
        socket_path=metrics_socket(paths, "weight_cache"),
        listen=settings.metrics_listen,
        token_file=metrics_token_file(platform, paths),
        setting="weight_cache.metrics_listen",
    )


async def _open_sockets(store: Store, leases: LeaseManager, paths: Paths) -> list[asyncio.Server]:
    """Open the socket of root, and that of a controller with its own uid."""
    servers = [await serve_store(store, leases, paths.socket("weight_cache"))]
    if paths.controller_uid is not None:
        socket = paths.socket_for_controller("weight_cache")
        servers.append(await serve_controller(store, leases, socket, uid=paths.controller_uid))
    return servers


def _report_ready(ready_fd: int | None) -> None:
    if ready_fd is not None:
        os.write(ready_fd, b"\n")
        os.close(ready_fd)


def open_peer_service(
    paths: Paths,
    platform: PlatformSettings,
    settings: WeightCacheSettings,
    credentials: TlsCredentials | None,
) -> PeerService | None:
    """Create the peer service; None where this node has no peers. Raises SettingsInvalid."""
    terms = PeerSettings(
        peers=settings.peers,
        listen=settings.peer_listen,
        answer_s=settings.peer_timeout_s,
        uploads_at_once=settings.peer_uploads_at_once,
        upload_bytes_per_s=settings.peer_upload_bytes_per_s,
        distrust_s=settings.peer_distrust_s,
    )
    key_file = (
        Path(platform.key_file) if platform.key_file is not None else paths.home / "platform.key"
    )
    return PeerService.of(
        terms, key_file, client_tls=None if credentials is None else credentials.client_context()
    )


def open_store(
    root: Path,
    origin: Origin,
    bandwidths: TierBandwidths,
    settings: WeightCacheSettings,
    *,
    peer_source: PeerSource | None = None,
    floor: DiskFloor | None = None,
) -> Store:
    """Open the store, connected to the measured bandwidths. Raises StoreOwned. Blocking."""
    return Store.open(
        root,
        origin=origin,
        max_bytes=settings.max_bytes,
        clock=time.time,
        lanes=ReadScheduler(settings.reads_at_once, settings.prefetch_share),
        observe=lambda size_bytes, seconds: bandwidths.observe(Tier.ORIGIN, size_bytes, seconds),
        reload_s=bandwidths.reload_s,
        peer_source=peer_source,
        floor=floor,
    )


@contextlib.asynccontextmanager
async def open_origin(
    paths: Paths, platform: PlatformSettings, settings: WeightCacheSettings
) -> AsyncIterator[Origin]:
    """Open the platform's blob store for the duration of the context. Raises SettingsInvalid."""
    # the origin itself retries
    blobs = blob_store(platform, paths, attempts=1, timeout_s=settings.origin_timeout_s)
    async with contextlib.aclosing(
        ObjectOrigin(blobs, attempts=settings.origin_attempts, timeout_s=settings.origin_timeout_s)
    ) as origin:
        yield origin


def _run_in_background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run a task beside the servers; its failure is logged and does not stop them."""
    task = asyncio.create_task(work, name=name)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("ended task=%s error=%r", name, error)

    task.add_done_callback(ended)
    return task


async def _save_bandwidths_forever(root: Path, bandwidths: TierBandwidths) -> None:
    while True:
        await asyncio.sleep(_SAVE_BANDWIDTHS_INTERVAL_S)
        try:
            bandwidth.save_bandwidths(root / "bandwidth.json", bandwidths)
        except OSError as e:
            _log.warning("speeds.not_kept error=%s", e)


def main() -> int:
    """Parse the command line and run; returns the exit status."""
    process_tuning.tune_process()
    os.umask(0o077)  # files are private unless their mode is set explicitly
    parser = argparse.ArgumentParser(
        prog="python -m weight_cache", description="One node's weight cache."
    )
    parser.add_argument("--config", type=Path, help="platform.yaml; every key has a default")
    parser.add_argument(
        "--ready-fd", type=int, help="descriptor that receives one newline once the socket serves"
    )
    arguments = parser.parse_args()
    logging_config.configure_logging("%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = load_section(WeightCacheSettings, "weight_cache", arguments.config)
        platform = load_section(PlatformSettings, "platform", arguments.config)
        paths = Paths.of(platform, os.environ).make()
        asyncio.run(run(paths, platform, settings, ready_fd=arguments.ready_fd))
    except (SettingsInvalid, StoreOwned, CertificateInvalid) as e:
        _log.error("%s", e)
        return 2
    except OSError as e:
        _log.error("cannot serve: %s", e)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
