"""Who has which GPU of this node, and admission of launches to them.

A device is granted as long as anything has it in its record: an instance that starts, runs or ends,
a slot until it is cleared (a worker, a snapshot's dump or proof), or a reservation for what has
neither yet. The records end in `starts.teardown` and `slots.allocator.SlotAllocator.clear`. There
is no counter to decrement, so that nothing is freed twice or never; a restarted agent reads the
records of instances and slots again (`starts.recovery`)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from snapshotter.errors import NoCapacity, Unsupported
from snapshotter.gpus import hbm
from snapshotter.gpus.allocator import GpuAllocator
from snapshotter.gpus.inventory import GpuInventory
from snapshotter.gpus.kinds import satisfies, satisfies_any
from snapshotter.types import GpuGrant, LaunchSpec


class GpuGrants:
    """The GPUs of the node and their holders. Owner: the event loop; `allocate` does not await, so
    that its answer is valid until the caller's next await."""

    def __init__(
        self, inventory: GpuInventory, holders: Callable[[], Iterable[GpuGrant | None]]
    ) -> None:
        """`holders`: the grants of all instances and slots
        (`agent.node.gpu_grants`); the same one may occur several times."""
        self.inventory = inventory
        self._allocator = GpuAllocator(inventory)
        self._holders = holders
        self._reserved: list[GpuGrant] = []

    def __repr__(self) -> str:
        return f"<GpuGrants {len(self.granted())} of {len(self.inventory.devices)} granted>"

    def granted(self) -> frozenset[str]:
        """UUIDs of the granted devices."""
        held = (*self._reserved, *(grant for grant in self._holders() if grant is not None))
        return frozenset(uuid for grant in held for uuid in grant.uuids)

    def allocate(self, launch: LaunchSpec) -> GpuGrant | None:
        """GPUs for the launch, None if it needs none. The caller records them before its next
        await.

        Raises NoCapacity if they are not free, Unsupported if the node never has so many; both name
        the kinds with figures. `detail["hint"]` of Unsupported says what to request instead."""
        count = gpus_of(launch)
        if not count:
            return None
        if (most := self._allocator.most(launch.gpu)) < count:
            wanted = f"{count} {' or '.join(launch.gpu)} GPU{'s' if count > 1 else ''}"
            present = ", ".join(self.inventory.models) or "none"
            raise Unsupported(
                f"{wanted} wanted, but this node has {present}",
                {"resource": "gpu", "asked": count, "total": most, "hint": self._alternatives()},
            )
        unfit = self._too_small(launch, count)
        granted = self.granted()
        grant = self._allocator.allocate(launch.gpu, count, granted | unfit)
        if grant is None:
            raise self._refusal(launch, count, granted, unfit)
        return grant

    def _alternatives(self) -> str:
        """What to request instead of GPUs that this node never has."""
        counts = Counter(device.kind for device in self.inventory.devices)
        if not counts:
            return "This node has no GPU: remove `gpu=`, or run the function on a node with one."
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        return f"Set `gpu=` to what this node has ({kinds}), or remove `gpu=`."

    def _too_small(self, launch: LaunchSpec, count: int) -> frozenset[str]:
        """Devices whose memory the launch does not fit into. Raises Unsupported if it fits into no
        acceptable ones."""
        unfit = hbm.too_small(self.inventory.devices, launch, count)
        most = max(use.largest for use in self._allocator.use(launch.gpu, unfit).values())
        if unfit and most < count:
            suitable = [d for d in self.inventory.devices if satisfies_any(d, launch.gpu)]
            raise Unsupported(
                hbm.shortage(suitable, launch, count),
                {"resource": "gpu_memory", "asked": launch.gpu_memory_bytes, "total": most},
            )
        return unfit

    @contextlib.contextmanager
    def reserved(
        self, launch: LaunchSpec, grant: GpuGrant | None = None
    ) -> Iterator[GpuGrant | None]:
        """GPUs that stay granted during the context, also while no slot has them; allocated if
        `grant` is None. Raises as `allocate`."""
        grant = grant or self.allocate(launch)
        if grant is None:
            yield None
            return
        self._reserved.append(grant)
        try:
            yield grant
        finally:
            # by identity: equal grants may be reserved at once
            index = next(n for n, reserved in enumerate(self._reserved) if reserved is grant)
            del self._reserved[index]

    def count_by_kind(self) -> dict[str, tuple[int, int]]:
        """Kind → number of its devices, and of those that are granted."""
        granted = self.granted()
        out: dict[str, tuple[int, int]] = {}
        for device in self.inventory.devices:
            total, used = out.get(device.kind, (0, 0))
            out[device.kind] = total + 1, used + (device.uuid in granted)
        return out

    def fragmentation(self) -> Mapping[str, float | None]:
        """As `GpuAllocator.fragmentation`, now."""
        return self._allocator.fragmentation(self.granted())

    def _refusal(
        self, launch: LaunchSpec, count: int, granted: frozenset[str], unfit: frozenset[str]
    ) -> NoCapacity:
        """`claimed` and `total` count the devices of all acceptable kinds that the launch fits
        into, `free` is the largest count that one of them has; `kinds` has the figures of each, in
        order of preference."""
        suitable = [
            d
            for d in self.inventory.devices
            if satisfies_any(d, launch.gpu) and d.uuid not in unfit
        ]
        fitting = [kind for kind in launch.gpu if any(satisfies(d, kind) for d in suitable)]
        use = self._allocator.use(fitting, granted | unfit)
        kinds: dict[str, Any] = {
            kind: {"free": each.free, "claimed": each.total - each.free, "total": each.total}
            for kind, each in use.items()
        }
        figures = ", ".join(
            f"{each.free} of {each.total} {kind} free" for kind, each in use.items()
        )
        detail = {
            "resource": "gpu",
            "asked": count,
            "free": max(each.largest for each in use.values()),
            "claimed": sum(device.uuid in granted for device in suitable),
            "total": len(suitable),
            "kinds": kinds,
        }
        return NoCapacity(f"{count} GPUs wanted, {figures} on this node", detail)


def gpus_of(launch: LaunchSpec) -> int:
    """Number of GPUs of one instance."""
    return (launch.gpu_count or 1) if launch.gpu else 0
