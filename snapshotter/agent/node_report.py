"""Reports the state of a node to the controller: weights and snapshots on it, free memory, GPUs.
The controller converts it to labels, and answers with orders about snapshots.

Sent every `EVERY_S`, and soon after weights or snapshots change. A failed report needs no retry:
each report is complete.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pilotlight.core.settings import SettingsInvalid
from pilotlight.core.transport.controller_client import controller_client
from pilotlight.core.transport.endpoint import Endpoint
from snapshotter.cuda.memory import GpuMemory, GpuMemoryUnknown, MemoryReader
from snapshotter.gpus.view import GpuUse, Models
from snapshotter.node_reports import NODES_PATH, NodeGpu, NodeReport, NodeSnapshot, SnapshotOrders
from weight_cache.errors import WeightCacheError

_log = logging.getLogger(__name__)
EVERY_S = 10.0
LOOK_S = 2.0
"""Interval of checks for changed weights and snapshots."""
MOST = 200
"""Maximum number of reported weights, and of images, most recently used first; the controller makes
at most 50 labels of weights and snapshots."""
_POST_TIMEOUT_S = 5.0
_TOKEN_LABEL = b"pilotlight platform token"
_MEMINFO = Path("/proc/meminfo")


class ReportedSnapshots(Protocol):
    """The methods of `checkpointing.controller_orders.ControllerOrders` that are used."""

    @property
    def kind(self) -> str: ...
    @property
    def version(self) -> str: ...

    def reported(self) -> tuple[NodeSnapshot, ...]: ...

    def forgotten(self) -> tuple[str, ...]: ...

    def apply(self, orders: SnapshotOrders) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePods:
    """The function pods that the agent serves, the tenants that have a directory there, and what it
    can show to pods (`NodeReport.images`, `engines`)."""

    count: int = 0
    tenants: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()


def platform_token(key_file: Path) -> str:
    """Token that node agents send to the controller, derived as in
    `pilotlight.core.crypto.PlatformKey.node_token`. Raises SettingsInvalid."""
    return hmac.new(raw_key(key_file), _TOKEN_LABEL, hashlib.sha256).hexdigest()


def raw_key(key_file: Path) -> bytes:
    """The decoded platform key. Raises SettingsInvalid."""
    try:
        return base64.urlsafe_b64decode(key_file.read_bytes().strip())
    except (OSError, binascii.Error, ValueError) as e:
        raise SettingsInvalid(
            f"{key_file} is not a valid platform key ({e}): reports of this node need it; mount it "
            f"and set platform.key_file"
        ) from e


def node_name(environ: Mapping[str, str]) -> str:
    """Name of this node in the cluster: NODE_NAME (the downward API's spec.nodeName), otherwise the
    host name."""
    return environ.get("NODE_NAME") or socket.gethostname()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReaders:
    """How the node's GPUs are read: their memory (None: it has none), and their use (nothing where
    NVML does not know it)."""

    memory: MemoryReader | None = None
    uses: Callable[[], Sequence[GpuUse]] = tuple


class Reporter:
    """Sends the reports of one node. Owner: its task."""

    def __init__(
        self,
        controller: Endpoint,
        token: str,
        *,
        node: str,
        version: str,
        weights: Models,
        snapshots: ReportedSnapshots,
        pods: Callable[[], NodePods],
        gpus: GpuReaders,
    ) -> None:
        self._client = controller_client(controller, token=token, timeout_s=_POST_TIMEOUT_S)
        self._node = node
        self._version = version
        self._weights = weights
        self._snapshots = snapshots
        self._pods = pods
        self._gpus = gpus
        self._failure = ""
        self._known_weights: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Reporter of {self._node}{': ' + self._failure if self._failure else ''}>"

    async def run(self) -> None:
        """Report until cancelled."""
        reported: object = None
        due = 0.0
        while True:
            weights, snapshots = await self._hot_weights(), self._snapshots.reported()
            hot = (
                weights,
                sorted(self._pods().images),
                [_essence(snapshot) for snapshot in snapshots],
            )
            now = time.monotonic()
            if hot != reported or now >= due:
                if await self._post(await self._report(weights, snapshots)):
                    reported = hot
                due = now + EVERY_S
            await asyncio.sleep(LOOK_S)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _report(
        self, weights: tuple[str, ...], snapshots: tuple[NodeSnapshot, ...]
    ) -> NodeReport:
        total, free = memory_of_node()
        gpus: tuple[GpuMemory, ...] = ()
        if self._gpus.memory is not None:
            with contextlib.suppress(GpuMemoryUnknown):
                gpus = await self._gpus.memory.read()
        pods = self._pods()
        return NodeReport(
            node=self._node,
            version=self._version,
            weights=weights,
            images=pods.images[:MOST],
            engines=pods.engines,
            snapshots=tuple(s for s in snapshots if s.is_ready),
            others=tuple(s for s in snapshots if not s.is_ready),
            memory_bytes=total,
            memory_free_bytes=free,
            gpus=self._node_gpus(gpus),
            pods=pods.count,
            tenants=pods.tenants,
            kind=self._snapshots.kind,
            orders=self._snapshots.version,
            forgotten=self._snapshots.forgotten(),
        )

    def _node_gpus(self, gpus: Sequence[GpuMemory]) -> tuple[NodeGpu, ...]:
        uses = {use.device.uuid: use for use in self._gpus.uses()}
        return tuple(_node_gpu(gpu, uses.get(gpu.uuid)) for gpu in gpus)

    async def _hot_weights(self) -> tuple[str, ...]:
        try:
            models = await self._weights.models()
        except WeightCacheError:  # it is restarting: report the last known state
            return self._known_weights
        self._known_weights = tuple(m.manifest for m in reversed(models))[:MOST]
        return self._known_weights

    async def _post(self, report: NodeReport) -> bool:
        import httpx

        try:
            answer = await self._client.post(NODES_PATH, json=report.to_json())
            failure = (
                ""
                if answer.is_success
                else f"the controller responded {answer.status_code}: {answer.text[:200]}"
            )
            if answer.status_code == 200:
                self._snapshots.apply(SnapshotOrders.from_json(answer.json()))
        except (httpx.HTTPError, ValueError, TypeError, KeyError, AttributeError) as e:
            failure = f"{type(e).__name__}: {e}"
        if failure != self._failure:
            self._failure = failure
            if failure:
                _log.warning("report.not_taken node=%s error=%s", self._node, failure)
            else:
                _log.info("report.taken node=%s", self._node)
        return not failure


def _essence(snapshot: NodeSnapshot) -> tuple[object, ...]:
    """What is reported at once when it changes: not every use of a snapshot."""
    info = snapshot.info
    return (snapshot.revision, snapshot.copy, info and (info.id, info.state))


def _node_gpu(gpu: GpuMemory, use: GpuUse | None) -> NodeGpu:
    sample = use.sample if use is not None else None
    return NodeGpu(
        product=gpu.name,
        uuid=gpu.uuid,
        total_bytes=gpu.total_bytes,
        is_free=gpu.is_free,
        used_bytes=sample.used_bytes if sample is not None else None,
        sm_utilisation=sample.sm_utilisation if sample is not None else None,
        holder=dict(use.holder.labels) if use is not None and use.holder is not None else {},
    )


def memory_of_node() -> tuple[int, int]:
    """Total memory, and memory available to new processes, in bytes (proc(5), MemAvailable)."""
    lines = (line.partition(":") for line in _MEMINFO.read_text().splitlines())
    values = {
        key: int(value.split()[0]) * 1024
        for key, _, value in lines
        if value.split()[:1] and value.split()[0].isdigit()
    }
    return values.get(
        "MemTotal", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ), values.get("MemAvailable", 0)
