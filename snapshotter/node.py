"""The agent's parts put together, opened and closed in the one order that works."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotter.adoption import adopt, sweep_groups
from snapshotter.agent import Agent, describe
from snapshotter.boots import Boots
from snapshotter.cgroups import Cgroups
from snapshotter.ends import Ends
from snapshotter.errands import Errands
from snapshotter.events import Events
from snapshotter.exposition import expose
from snapshotter.housing import Housekeeper
from snapshotter.instances import Instances
from snapshotter.ladder import Ladder
from snapshotter.launch import RUNTIME_PACKAGES, BundleStore, ImageStore, WeightSource
from snapshotter.logs import Logs
from snapshotter.metrics import Metrics
from snapshotter.nursery import Nursery
from snapshotter.parking import Parking
from snapshotter.settings import SnapshotterSettings
from snapshotter.templates import Templates
from weight_cache.protocol import serve
from weight_cache.settings import Paths

_log = logging.getLogger(__name__)
STOP_GRACE_S = 10.0
"""What instances get to finish their calls when the agent is asked to end."""
_PRUNE_INTERVAL_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the agent is made of that others write.

    Attributes:
        runtime: package name → directory, for the slots' `runtime/`.
        probe: body of `capabilities`, given the cgroups that were found.
        namespaces: False forces plain slots, as for an agent without root.
    """

    bundles: BundleStore
    images: ImageStore
    weights: WeightSource
    runtime: Mapping[str, Path]
    probe: Callable[[Cgroups], Awaitable[Mapping[str, Any]]]
    namespaces: bool


def own_runtime() -> dict[str, Path]:
    """Where our own packages lie, found without importing them (`pilotlight` is above us). Raises ModuleNotFoundError."""
    found = {}
    for name in RUNTIME_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"package {name} is not installed beside the agent: workers cannot be started without it")
        found[name] = Path(spec.submodule_search_locations[0]).resolve()
    return found


@contextlib.asynccontextmanager
async def opened(paths: Paths, settings: SnapshotterSettings, parts: Parts) -> AsyncIterator[Agent]:
    """A serving agent. On a regular way out everything that it started is stopped; when it is killed everything stays.

    Order: the spawner before any thread; what an earlier agent left before new work; the socket last. The reverse at the end.
    """
    cgroups = await asyncio.to_thread(Cgroups.find, paths.run)
    if cgroups.why_not is not None:
        _log.warning("cgroups.off reason=%s fallback=RLIMIT_DATA", cgroups.why_not)
    logs = Logs(paths.home / "node" / "logs")
    (paths.run / "slots").mkdir(exist_ok=True, mode=0o700)
    nursery = Nursery(paths.run / "slots", logs.directory, log_max_bytes=settings.log_max_bytes, namespaced=parts.namespaces)
    instances, templates, events, metrics, errands = Instances(), Templates(), Events(), Metrics(), Errands()
    housekeeper = Housekeeper(
        nursery=nursery,
        bundles=parts.bundles,
        images=parts.images,
        weights=parts.weights,
        cgroups=cgroups,
        logs=logs,
        runtime=parts.runtime,
    )
    parking = Parking(
        cgroups=cgroups,
        templates=templates,
        errands=errands,
        per_template=settings.parked_per_template,
        idle_s=settings.parked_idle_s,
        budget_bytes=settings.template_memory_bytes,
    )
    ends = Ends(
        housekeeper=housekeeper,
        instances=instances,
        templates=templates,
        parking=parking,
        logs=logs,
        events=events,
        metrics=metrics,
        errands=errands,
    )
    boots = Boots(
        housekeeper=housekeeper,
        templates=templates,
        ends=ends,
        logs=logs,
        events=events,
        errands=errands,
        budget_bytes=settings.template_memory_bytes,
    )
    ladder = Ladder(
        housekeeper=housekeeper,
        boots=boots,
        ends=ends,
        instances=instances,
        templates=templates,
        parking=parking,
        cgroups=cgroups,
        logs=logs,
        metrics=metrics,
        memory_bytes=settings.node_memory_bytes(),
    )
    agent = Agent(
        ladder=ladder,
        instances=instances,
        templates=templates,
        images=parts.images,
        logs=logs,
        events=events,
        probe=lambda: parts.probe(cgroups),
    )

    def scrape() -> bytes:
        metrics.observe(
            by_state=instances.by_state(),
            templates=len(list(templates)),
            template_pss_bytes=templates.pss_bytes(),
            parked=templates.parked(),
        )
        return metrics.text()

    await adopt(nursery=nursery, housekeeper=housekeeper, boots=boots, ends=ends, instances=instances)
    await sweep_groups(cgroups, paths.run, [h.slot for h in housekeeper.housings.values()], instances)
    await nursery.open()
    exposed = await expose(scrape, socket_path=paths.run / "metrics-snapshotter.sock", listen=settings.metrics_listen)
    pruning = asyncio.create_task(_prune_for_ever(logs, settings, housekeeper, instances), name="prune logs")
    server = await serve(paths.socket("snapshotter"), agent.operations(), describe)
    try:
        yield agent
    finally:
        server.close()
        paths.socket("snapshotter").unlink(missing_ok=True)
        pruning.cancel()
        await asyncio.wait([pruning])
        await ladder.aclose(STOP_GRACE_S)
        await errands.aclose()
        await nursery.aclose()
        cgroups.remove_empty()
        for listening in exposed:
            listening.close()
        (paths.run / "metrics-snapshotter.sock").unlink(missing_ok=True)


async def _prune_for_ever(logs: Logs, settings: SnapshotterSettings, housekeeper: Housekeeper, instances: Instances) -> None:
    while True:
        alive = {*housekeeper.housings, *(i.info.id for i in instances)}
        now = time.time()
        await asyncio.to_thread(logs.prune, alive=alive, keep_s=settings.log_keep_s, total_bytes=settings.log_total_bytes, now=now)
        await asyncio.sleep(_PRUNE_INTERVAL_S)


def is_root() -> bool:
    """Whether slots can have namespaces and uids of their own; the nursery finds out whether the machine really lets us."""
    return os.geteuid() == 0
