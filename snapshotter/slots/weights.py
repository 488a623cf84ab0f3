"""A slot's weights: leases are opened when the slot is acquired, and awaited when its worker needs
the files.

The slot's shim is the holder: a restore changes the worker's pid, and leases that are not closed
end with the shim. A cache that restarts loses pending leases: they are requested again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotlight.core.background_tasks import cancel_all
from snapshotter.slots.launch_plan import WeightSource
from snapshotter.slots.replies import BootFailed
from snapshotter.types import LaunchSpec, StartKind, WeightsMount
from weight_cache.errors import LeaseUnknown, WeightCacheError, WeightCacheUnavailable
from weight_cache.types import Lease, Tier

_log = logging.getLogger(__name__)
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Pauses between requests to a cache that does not answer: it is restarted within 0.1 s, and within
5 s after several crashes in a row."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """One of a launch's weights on this node: its directory, and its tier at the time of the
    request."""

    path: Path
    tier: Tier


class Opening:
    """The leases of one slot, created by `Weights.open`. Owner: the event loop.

    Attributes:
        lease_ids: ids of all leases, granted or not.
    """

    def __init__(
        self, source: WeightSource, mounts: Sequence[WeightsMount], *, holder: str, pid: int | None
    ) -> None:
        self._source = source
        self._holder = holder
        self._pid = pid
        self.lease_ids = tuple(Lease.id_of(mount.manifest, holder) for mount in mounts)
        self._tasks = {
            m.name: asyncio.create_task(
                self._open_with_retries(m), name=f"weights {m.name} of {holder}"
            )
            for m in mounts
        }

    @property
    def is_done(self) -> bool:
        """Whether all requests have completed."""
        return all(task.done() for task in self._tasks.values())

    async def ready(self) -> dict[str, Served]:
        """Wait for all weights; returns them by name. Raises WeightCacheError as
        `WeightCacheClient.wait` does, BootFailed when the slot's shim has exited."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        for task in self._tasks.values():
            if task.done():
                task.result()
        return {name: task.result() for name, task in self._tasks.items()}

    async def cancel(self) -> None:
        """Cancel the requests."""
        await cancel_all(self._tasks.values())

    async def _open_with_retries(self, mount: WeightsMount) -> Served:
        for pause_s in _PAUSES_S:
            try:
                return await self._open(mount)
            except (WeightCacheUnavailable, LeaseUnknown) as e:
                _log.warning("weights.again slot=%s name=%s error=%s", self._holder, mount.name, e)
                await asyncio.sleep(pause_s)
        return await self._open(mount)

    async def _open(self, mount: WeightsMount) -> Served:
        began = time.perf_counter()
        try:
            opened = await self._source.open(mount.manifest, holder=self._holder, pid=self._pid)
        except LeaseUnknown as e:
            raise BootFailed(f"the slot's shim has exited: {e}") from e
        path = opened.path
        if path is None:
            path = (await self._source.wait(opened.lease_id)).path
        expected_ms = -1 if opened.expected_s is None else opened.expected_s * 1000
        text = "weights.ready slot=%s name=%s manifest=%s tier=%s expected_ms=%.0f took_ms=%.1f"
        _log.info(
            text,
            self._holder,
            mount.name,
            mount.manifest[:12],
            opened.tier,
            expected_ms,
            (time.perf_counter() - began) * 1000,
        )
        return Served(path=Path(path), tier=opened.tier)


class Weights:
    """Weight leases of slots. Owner: the event loop."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def open(self, mounts: Sequence[WeightsMount], *, holder: str, pid: int | None) -> Opening:
        """Request leases of `mounts` for slot `holder`, whose shim is `pid`; returns
        immediately."""
        return Opening(self._source, mounts, holder=holder, pid=pid)

    async def predict_wait_s(self, launch: LaunchSpec) -> float:
        """Predicted wait of a start for its weights; weights without a prediction count as 0."""
        try:
            predictions = [await self._source.predict(mount.manifest) for mount in launch.weights]
        except WeightCacheError as e:
            _log.warning("weights.unpredicted revision=%s error=%s", launch.revision, e)
            return 0.0
        return sum((p.seconds or 0.0 for p in predictions if p.tier is Tier.ORIGIN), start=0.0)

    async def close(self, lease_ids: Sequence[str]) -> None:
        """Close the leases. A cache that is unavailable releases them when the shim exits."""
        for lease_id in lease_ids:
            try:
                await self._source.close(lease_id)
            except WeightCacheError as e:
                _log.warning("weights.not_closed lease=%s error=%s", lease_id, e)


def served_from(
    kind: StartKind, launch: LaunchSpec, weights: Mapping[str, Served]
) -> dict[str, str]:
    """Name → tier that a start of `kind` loaded the weights from, for people. `weights`: state when
    the slot's worker started.

    A fork, or a worker that waited at its snapshot point, uses memory that is already loaded.
    """
    if kind in (StartKind.COLD, StartKind.IMPORT, StartKind.RESTORE):
        return {name: served.tier.value for name, served in weights.items()}
    return {mount.name: Tier.DRAM.value for mount in launch.weights}
