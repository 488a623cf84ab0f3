"""Which GPUs a launch gets: a pure decision over the inventory and the devices that are granted.

A request is a list of acceptable kinds, best first, and a count; all its devices have one model.
It gets all or none. Among devices of one kind: whole GPUs as `topology` chooses; MIG instances of
the GPU that has the fewest others free, so that whole GPUs become free of instances. Of several
models that satisfy a kind (`any`) the one with the least memory, so that large ones stay free."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from snapshotter.gpus.inventory import GpuInventory
from snapshotter.gpus.kinds import ANY, satisfies
from snapshotter.gpus.topology import Topology
from snapshotter.types import GpuDevice, GpuGrant

_KINDS = 256
"""Kinds of which the devices are remembered; users write any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindUse:
    """Devices of a kind: how many there are, how many are free, and the most of them that one
    request may still get, which are of one model."""

    total: int
    free: int
    largest: int


class GpuAllocator:
    """Decides for one node. Immutable; `granted` is always an argument."""

    def __init__(self, inventory: GpuInventory) -> None:
        self.inventory = inventory
        models: dict[tuple[str, str], list[GpuDevice]] = {}
        for device in inventory.devices:
            models.setdefault((device.model, device.kind), []).append(device)
        self._models = sorted(
            (tuple(devices) for devices in models.values()),
            key=lambda devices: (devices[0].memory_bytes, devices[0].model),
        )
        self._topologies = [
            Topology([inventory.gpu_of(device) for device in devices]) for devices in self._models
        ]
        self._of_kind = functools.lru_cache(maxsize=_KINDS)(self._models_of_kind)

    def __repr__(self) -> str:
        return f"<GpuAllocator of {len(self.inventory.devices)} devices>"

    def allocate(
        self, kinds: Sequence[str], count: int, granted: Collection[str]
    ) -> GpuGrant | None:
        """The devices for a request, in the order of their numbers; None if no acceptable kind has
        `count` free. `granted`: UUIDs that others have."""
        for kind in kinds:
            for devices, topology in self._of_kind(kind):
                free = _mask(devices, granted)
                if free.bit_count() < count:
                    continue
                if devices[0].is_mig:
                    chosen = self._fullest(devices, free, count)
                else:
                    chosen = topology.choose(free, count)
                found = tuple(d for n, d in enumerate(devices) if chosen >> n & 1)
                return GpuGrant(kind=found[0].kind if kind.lower() == ANY else kind, devices=found)
        return None

    def use(self, kinds: Sequence[str], granted: Collection[str]) -> dict[str, KindUse]:
        """Figures of each kind, in this order."""
        return {kind: self._use(kind, granted) for kind in kinds}

    def most(self, kinds: Sequence[str]) -> int:
        """The largest count that this node could ever grant of one of these kinds."""
        return max((use.largest for use in self.use(kinds, ()).values()), default=0)

    def fragmentation(self, granted: Collection[str]) -> Mapping[str, float | None]:
        """For each kind of whole GPU: the largest request that would still get a connected group
        (`topology`) ÷ free GPUs; None while none is free."""
        largest: dict[str, int] = {}
        total: dict[str, int] = {}
        for devices, topology in zip(self._models, self._topologies, strict=True):
            kind, free = devices[0].kind, _mask(devices, granted)
            if not devices[0].is_mig:
                largest[kind] = max(largest.get(kind, 0), topology.largest_group(free))
                total[kind] = total.get(kind, 0) + free.bit_count()
        return {kind: largest[kind] / free if free else None for kind, free in total.items()}

    def _use(self, kind: str, granted: Collection[str]) -> KindUse:
        free = [_mask(devices, granted).bit_count() for devices, _ in self._of_kind(kind)]
        return KindUse(
            total=sum(len(devices) for devices, _ in self._of_kind(kind)),
            free=sum(free),
            largest=max(free, default=0),
        )

    def _models_of_kind(self, kind: str) -> list[tuple[tuple[GpuDevice, ...], Topology]]:
        return [
            (devices, topology)
            for devices, topology in zip(self._models, self._topologies, strict=True)
            if satisfies(devices[0], kind)
        ]

    def _fullest(self, devices: Sequence[GpuDevice], free: int, count: int) -> int:
        """`count` free MIG instances, of the GPUs with the fewest free ones first."""
        places = [n for n in range(len(devices)) if free >> n & 1]
        left = dict.fromkeys(places, 0)
        for n in places:
            mine = self.inventory.gpu_of(devices[n])
            left[n] = sum(1 for m in places if self.inventory.gpu_of(devices[m]) is mine)
        places.sort(key=lambda n: (left[n], devices[n].minor, n))
        return sum(1 << n for n in places[:count])


def _mask(devices: Sequence[GpuDevice], granted: Collection[str]) -> int:
    """The devices that are not granted."""
    mask = 0
    for n, device in enumerate(devices):
        if device.uuid not in granted:
            mask |= 1 << n
    return mask
