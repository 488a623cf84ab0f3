"""The weight cache process: `python -m weight_cache --config platform.yaml --ready-fd N`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from weight_cache.configuration import WeightCacheSettings
from weight_cache.errors import StoreOwned
from weight_cache.metrics import StoreCollector, serve_metrics
from weight_cache.origin import DirectoryOrigin
from weight_cache.server import serve_store
from weight_cache.settings import Paths, PlatformSettings, SettingsInvalid, load
from weight_cache.store import Store

_log = logging.getLogger("weight_cache")


async def run(paths: Paths, settings: WeightCacheSettings, *, ready_fd: int | None) -> None:
    """Serve until SIGTERM or SIGINT. Raises StoreOwned, OSError (an address in use)."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    store = Store.open(paths.home / "weights", origin=DirectoryOrigin(paths.home / "blobs"), max_bytes=settings.max_bytes, clock=time.time)
    registry = CollectorRegistry()
    registry.register(StoreCollector(store.statistics))
    servers = await serve_metrics(registry, socket_path=paths.run / "metrics-weight_cache.sock", listen=settings.metrics_listen)
    servers.append(await serve_store(store, paths.socket("weight_cache")))
    _log.info("serving store=%r", store)
    if ready_fd is not None:
        os.write(ready_fd, b"\n")
        os.close(ready_fd)
    await stop.wait()
    _log.info("stopping")
    for server in reversed(servers):  # the store's socket first: no new work, then the figures go
        server.close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)  # half-fetched files are removed before the directory is let go
    store.close()


def main() -> int:
    """Parse the command line and run; returns the exit status."""
    os.umask(0o077)  # what we write is nobody else's, unless its mode is set by hand
    parser = argparse.ArgumentParser(prog="python -m weight_cache", description="One node's weight cache.")
    parser.add_argument("--config", type=Path, help="platform.yaml; every key has a default")
    parser.add_argument("--ready-fd", type=int, help="descriptor that receives one newline once the socket serves")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = load(WeightCacheSettings, "weight_cache", arguments.config)
        paths = Paths.of(load(PlatformSettings, "platform", arguments.config), os.environ).make()
        asyncio.run(run(paths, settings, ready_fd=arguments.ready_fd))
    except (SettingsInvalid, StoreOwned) as e:
        _log.error("%s", e)
        return 2
    except OSError as e:
        _log.error("cannot serve: %s", e)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
