"""GPU allocation, simulated: the node agent's allocator beside first fit and best fit.

A node of 8 H100 (NVLink pairs, two NUMA nodes), 4 L4 and an A100 that MIG splits. Starts arrive
at random, ask for whole GPUs, MIG instances, several kinds in order or `any`, and end at random; a
start that does not fit is dropped. No machine is measured: the same seeds give the same table
anywhere. Every arrival checks that a request got all its GPUs or none, and that no GPU is granted
twice.

*First fit* takes the lowest numbers. *Best fit* takes the NUMA node with the fewest free GPUs that
are enough, else the lowest numbers. Of the models that satisfy a kind they take the one with the
least memory, as the allocator does, so that all three grant the same requests; *in order* takes the
first one."""

from __future__ import annotations

import heapq
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from benchmarks.harness import Options, Report, Row, options, phase
from snapshotter.gpus.allocator import GpuAllocator
from snapshotter.gpus.inventory import GpuInventory
from snapshotter.gpus.kinds import ANY, satisfies
from snapshotter.types import GpuDevice, GpuGrant
from tests.fakes.fake_nvml import inventory_of, mixed_node

SEEDS, ARRIVALS = range(1, 21), 10_000
QUICK_SEEDS = range(1, 4)
MEAN_LIFE = 6.0
"""In arrivals; with this mix a little more than the node has is asked for."""
MIX: Sequence[tuple[tuple[str, ...], int, int]] = (
    (("H100",), 1, 20),
    (("H100",), 2, 14),
    (("H100",), 4, 8),
    (("H100",), 8, 1),
    (("L4",), 1, 14),
    (("L4",), 2, 4),
    (("H100", "L4"), 1, 10),
    (("L4", "H100"), 2, 5),
    ((ANY,), 1, 8),
    (("A100-MIG-3g.20gb",), 1, 4),
    (("A100-MIG-1g.5gb", "A100-MIG-2g.10gb"), 1, 8),
    (("A100",), 1, 1),
)
"""Acceptable kinds, count, weight. No whole A100 is there."""


class Policy(Protocol):
    """What the simulation asks for each arrival."""

    def allocate(
        self, kinds: Sequence[str], count: int, granted: Collection[str]
    ) -> GpuGrant | None: ...


class FirstFit:
    """The lowest numbers that are free. `in_order`: of the first model that has enough."""

    def __init__(self, inventory: GpuInventory, *, in_order: bool = False) -> None:
        self.inventory = inventory
        models: dict[tuple[str, str], list[GpuDevice]] = {}
        for device in inventory.devices:
            models.setdefault((device.model, device.kind), []).append(device)
        self.models = list(models.values())
        if not in_order:
            self.models.sort(key=lambda devices: devices[0].memory_bytes)

    def allocate(
        self, kinds: Sequence[str], count: int, granted: Collection[str]
    ) -> GpuGrant | None:
        """As `GpuAllocator.allocate`."""
        for kind in kinds:
            for devices in self.models:
                free = [device for device in devices if device.uuid not in granted]
                if satisfies(devices[0], kind) and len(free) >= count:
                    return GpuGrant(kind=kind, devices=tuple(self.pick(free, count)))
        return None

    def pick(self, free: Sequence[GpuDevice], count: int) -> Sequence[GpuDevice]:
        """`count` of the free devices."""
        return free[:count]


class BestFit(FirstFit):
    """Of the NUMA node with the fewest free ones that are enough."""

    def pick(self, free: Sequence[GpuDevice], count: int) -> Sequence[GpuDevice]:
        """`count` of the free devices."""
        nodes: dict[int, list[GpuDevice]] = {}
        for device in free:
            nodes.setdefault(self.inventory.gpu_of(device).numa_node, []).append(device)
        enough = [devices for devices in nodes.values() if len(devices) >= count]
        return min(enough, key=len, default=free)[:count]


@dataclass(kw_only=True)
class Outcome:
    """What became of the arrivals of one seed.

    Attributes:
        granted, refused: number of requests by count of whole GPUs; MIG instances are not counted.
        pairs, linked: requests for two H100, and those of them that got a pair.
        groups, near: requests for two to four whole GPUs, and those of them that got GPUs of one
            NUMA node.
        fragmentation: of the H100, after each arrival that left some free.
        most_used: the most devices that were granted at once.
    """

    granted: Counter[int] = field(default_factory=Counter)
    refused: Counter[int] = field(default_factory=Counter)
    pairs: int = 0
    linked: int = 0
    groups: int = 0
    near: int = 0
    fragmentation: list[float] = field(default_factory=list)
    most_used: int = 0


class NotWhole(AssertionError):
    """Raised when a grant has the wrong number of devices, or one that is not free or not of an
    acceptable kind."""


def simulate(
    policy: Policy, inventory: GpuInventory, *, seed: int, arrivals: int = ARRIVALS
) -> Outcome:
    """One seed. Raises NotWhole."""
    rng, out, allocator = random.Random(seed), Outcome(), GpuAllocator(inventory)
    weights = [weight for *_, weight in MIX]
    suitable = {
        kind: frozenset(device.uuid for device in inventory.devices if satisfies(device, kind))
        for kind in {kind for kinds, *_ in MIX for kind in kinds}
    }
    granted: set[str] = set()
    ends: list[tuple[float, int, GpuGrant]] = []
    for now in range(arrivals):
        while ends and ends[0][0] <= now:
            granted -= set(heapq.heappop(ends)[2].uuids)
        kinds, count, _ = rng.choices(MIX, weights)[0]
        life = rng.expovariate(1 / MEAN_LIFE)
        grant = policy.allocate(kinds, count, granted)
        if grant is not None:
            _check(grant.uuids, [suitable[kind] for kind in kinds], count, granted)
            granted |= set(grant.uuids)
            heapq.heappush(ends, (now + life, now, grant))
        elif allocator.allocate(kinds, count, granted) is not None:
            raise NotWhole(f"{count} {kinds} were free, and refused")
        _record(out, inventory, grant, kinds, count)
        out.most_used = max(out.most_used, len(granted))
        if (share := allocator.fragmentation(granted)["H100"]) is not None:
            out.fragmentation.append(share)
    while ends:
        granted -= set(heapq.heappop(ends)[2].uuids)
    if granted:
        raise NotWhole(f"not given back: {granted}")
    return out


def _check(
    uuids: Sequence[str], suitable: Sequence[frozenset[str]], count: int, granted: set[str]
) -> None:
    """`suitable`: the devices of each acceptable kind."""
    found = set(uuids)
    if len(uuids) != count or len(found) != count:
        raise NotWhole(f"{count} wanted, {uuids} granted")
    if found & granted:
        raise NotWhole(f"{found & granted} are granted already")
    if not any(found <= devices for devices in suitable):
        raise NotWhole(f"{uuids} are not of one acceptable kind")


def _record(
    out: Outcome,
    inventory: GpuInventory,
    grant: GpuGrant | None,
    kinds: Sequence[str],
    count: int,
) -> None:
    if "MIG" in kinds[0] or "A100" in kinds[0]:
        return
    if grant is None:
        out.refused[count] += 1
        return
    out.granted[count] += 1
    places = [inventory.gpu_of(device) for device in grant.devices]
    if 2 <= count <= 4:
        out.groups += 1
        out.near += len({place.numa_node for place in places}) == 1
    if count == 2 and grant.devices[0].kind == "H100":
        out.pairs += 1
        out.linked += places[1].uuid in places[0].links


def policies(inventory: GpuInventory) -> dict[str, Callable[[], Policy]]:
    """By name, as the table shows them."""
    return {
        "allocator": lambda: GpuAllocator(inventory),
        "best fit": lambda: BestFit(inventory),
        "first fit": lambda: FirstFit(inventory),
        "first fit, in order": lambda: FirstFit(inventory, in_order=True),
    }


def main(given: Options) -> None:
    """Run it; print the table."""
    seeds = QUICK_SEEDS if given.quick else SEEDS
    inventory = inventory_of(*mixed_node())
    report = Report(
        f"GPU allocation, simulated: {ARRIVALS} arrivals, {len(seeds)} seeds, on 8 H100, 4 L4 and an "
        f"A100 split by MIG"
    )
    shares: dict[str, float] = {}
    for name, make in policies(inventory).items():
        with phase(name):
            outcomes = [simulate(make(), inventory, seed=seed) for seed in seeds]
        each = [fmean(outcome.fragmentation) for outcome in outcomes]
        shares[name] = fmean(each)
        large = sum(o.granted[4] + o.granted[8] for o in outcomes)
        asked = large + sum(o.refused[4] + o.refused[8] for o in outcomes)
        pairs = sum(o.linked for o in outcomes) / sum(o.pairs for o in outcomes)
        near = sum(o.near for o in outcomes) / sum(o.groups for o in outcomes)
        note = (
            f"{pairs:.1%} of two H100 are a pair, {near:.1%} of 2 to 4 GPUs of one NUMA node; "
            f"{large / asked:.1%} of requests for 4 or 8 fit"
        )
        report.rows.append(Row.of(f"{name}: fragmentation of the H100", "share", each, note))
    report.ratio("fragmentation_vs_best_fit", shares["allocator"] / shares["best fit"])
    report.ratio("fragmentation_vs_first_fit", shares["allocator"] / shares["first fit"])
    report.finish(given)


if __name__ == "__main__":
    main(options(__doc__ or ""))
    sys.exit(0)
