"""What each GPU of the node holds: who it is granted to, which weights are in its memory (the tier
HBM), and how much of it is used.

There is no counter: everything is derived from the records of instances, the weight cache's sizes
and the latest NVML samples. The weights of an instance are counted in even parts on its GPUs, from
its readiness on (`delivered`), and never more than NVML says is used there: a sleeping engine has
given its weights up, a suspended process has not. What is not known is None."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pilotlight.core.json_record import JsonRecord
from snapshotter.gpus.inventory import GpuInventory
from snapshotter.gpus.sampler import GpuSampler
from snapshotter.gpus.sampling import GpuSample
from snapshotter.types import GpuDevice, GpuGrant, InstanceState
from weight_cache.errors import WeightCacheError
from weight_cache.types import ModelInfo

SIZES_S = 10.0
"""Interval of questions about models to the weight cache."""


class Models(Protocol):
    """The method of `weight_cache.client.WeightCacheClient` that is used."""

    async def models(self) -> list[ModelInfo]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHolder:
    """An instance with GPUs. `manifests`: of its weights."""

    instance: str
    labels: Mapping[str, str]
    state: InstanceState
    grant: GpuGrant
    manifests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInHbm(JsonRecord):
    """A model of the instance that a GPU is granted to.

    Attributes:
        state: `arriving` until the instance is ready, then `delivered`; `asleep`.
        bytes: its part on this GPU; None if its size is not known, and of a sleeping instance
            without a sample.
        is_pinned: it is pinned on this node.
    """

    manifest: str
    state: str
    bytes: int | None
    is_pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """One GPU or MIG instance of the node now. `holder`: None while it is not granted."""

    device: GpuDevice
    sample: GpuSample | None = None
    holder: GpuHolder | None = None
    weights: tuple[WeightsInHbm, ...] = ()

    @property
    def delivered_bytes(self) -> int:
        """Bytes of weights in its memory, as far as known."""
        return sum(one.bytes or 0 for one in self.weights if one.state != "arriving")

    @property
    def pinned_bytes(self) -> int:
        """Those of pinned models."""
        return sum(
            one.bytes or 0 for one in self.weights if one.is_pinned and one.state != "arriving"
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        sample, holder = self.sample, self.holder
        return {
            "uuid": self.device.uuid,
            "kind": self.device.kind,
            "model": self.device.model,
            "memory_bytes": self.device.memory_bytes or (sample.total_bytes if sample else 0),
            "used_bytes": sample.used_bytes if sample else None,
            "sm_utilisation": sample.sm_utilisation if sample else None,
            "delivered_bytes": self.delivered_bytes,
            "pinned_bytes": self.pinned_bytes,
            "instance": holder.instance if holder else None,
            "labels": dict(holder.labels) if holder else {},
            "weights": [one.to_json() for one in self.weights],
        }


def gpu_uses(
    inventory: GpuInventory,
    holders: Iterable[GpuHolder],
    samples: Mapping[str, GpuSample],
    models: Mapping[str, ModelInfo],
) -> list[GpuUse]:
    """Return the use of each device; one that several pods claim has no holder. Pure."""
    by_uuid: dict[str, GpuHolder | None] = {}
    for holder in holders:
        for uuid in holder.grant.uuids:
            by_uuid[uuid] = None if uuid in by_uuid else holder
    return [
        _use(device, by_uuid.get(device.uuid), samples.get(device.uuid), models)
        for device in inventory.devices
    ]


def _use(
    device: GpuDevice,
    holder: GpuHolder | None,
    sample: GpuSample | None,
    models: Mapping[str, ModelInfo],
) -> GpuUse:
    weights: list[WeightsInHbm] = []
    left = sample.used_bytes if sample is not None else None
    for manifest in holder.manifests if holder is not None else ():
        assert holder is not None
        model = models.get(manifest)
        part = None if model is None else model.size_bytes // len(holder.grant.devices)
        if part is not None and left is not None:
            part = min(part, left)
            left -= part
        elif holder.state is InstanceState.ASLEEP:
            part = None
        weights.append(
            WeightsInHbm(
                manifest=manifest,
                state=_STATES.get(holder.state, "delivered"),
                bytes=part,
                is_pinned=model is not None and model.is_pinned,
            )
        )
    return GpuUse(device=device, sample=sample, holder=holder, weights=tuple(weights))


_STATES = {InstanceState.STARTING: "arriving", InstanceState.ASLEEP: "asleep"}


@dataclass(kw_only=True, eq=False)
class GpuView:
    """The node's GPUs, for reports and metrics. Owner: the event loop; `run` it as a task where
    there are GPUs.

    Attributes:
        holders: of the agent's own instances.
        pods: of the pods that the agent serves. A pod says by itself which GPUs it has: that
            decides nothing, and is not used where two say the same.
    """

    inventory: GpuInventory
    holders: Callable[[], Iterable[GpuHolder]]
    models: Models
    pods: Callable[[], Iterable[GpuHolder]] = tuple
    sampler: GpuSampler = field(default_factory=GpuSampler)
    _sizes: dict[str, ModelInfo] = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        return f"<GpuView {len(self.inventory.devices)} devices, {self.sampler!r}>"

    def now(self) -> list[GpuUse]:
        """The use of each device, as last known; [] on a node without GPUs."""
        holders = [*self.holders(), *self.pods()]
        return gpu_uses(self.inventory, holders, self.sampler.latest(), self._sizes)

    def of_instance(self, instance_id: str) -> list[GpuUse]:
        """The use of an instance's devices."""
        return [use for use in self.now() if use.holder and use.holder.instance == instance_id]

    async def refresh(self) -> None:
        """Read the sizes of models; what is known stays while the weight cache does not answer."""
        if not self.inventory.devices:
            return
        with contextlib.suppress(WeightCacheError):
            self._sizes = {model.manifest: model for model in await self.models.models()}

    async def run(self) -> None:
        """Sample, and follow the weight cache, until cancelled. Returns on a node without GPUs."""
        if not self.inventory.devices:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.sampler.run(), name="GPU samples")
            while True:
                await self.refresh()
                await asyncio.sleep(SIZES_S)
