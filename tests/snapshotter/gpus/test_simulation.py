"""Ten thousand arrivals on a mixed node, twenty times: nothing is granted twice, and all or
nothing. The simulation that prints the table (`benchmarks/gpu_allocation.py`) checks that at every
arrival; here it also catches policies that break the rule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean

import pytest

from benchmarks.gpu_allocation import SEEDS, FirstFit, NotWhole, simulate
from snapshotter.gpus.allocator import GpuAllocator
from snapshotter.types import GpuGrant
from tests.fakes.fake_nvml import inventory_of, mixed_node

NODE = inventory_of(*mixed_node())
ALLOCATOR = GpuAllocator(NODE)


@pytest.mark.parametrize(
    "seed", [*SEEDS[:4], *(pytest.param(seed, marks=pytest.mark.soak) for seed in SEEDS[4:])]
)
def test_nothing_is_granted_twice_and_all_or_nothing(seed: int) -> None:
    outcome = simulate(ALLOCATOR, NODE, seed=seed)
    assert sum(outcome.granted.values()) > 5000
    assert sum(outcome.refused.values()) > 500, "the node was full at times"
    assert outcome.most_used > len(NODE.devices) * 0.8


def test_pairs_and_numa_nodes_are_kept_together_more_often_than_by_first_fit() -> None:
    ours = simulate(ALLOCATOR, NODE, seed=1)
    first = simulate(FirstFit(NODE), NODE, seed=1)
    assert ours.granted == first.granted, "they grant the same requests"
    assert ours.linked / ours.pairs > 0.9
    assert first.linked / first.pairs < 0.5
    assert ours.near / ours.groups > first.near / first.groups
    assert fmean(ours.fragmentation) > fmean(first.fragmentation)


class Broken:
    """The allocator, but for one of its promises."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.asked = 0

    def allocate(
        self, kinds: Sequence[str], count: int, granted: Collection[str]
    ) -> GpuGrant | None:
        """As `GpuAllocator.allocate`."""
        self.asked += 1
        if self.how == "forgets who has what":
            return ALLOCATOR.allocate(kinds, count, ())
        grant = ALLOCATOR.allocate(kinds, count, granted)
        if grant is None or self.asked < 100:
            return grant
        if self.how == "gives a part":
            return GpuGrant(kind=grant.kind, devices=grant.devices[:-1])
        if self.how == "refuses what is free":
            return None
        other = next((d for d in NODE.devices if d.uuid not in granted), None)
        return GpuGrant(kind=grant.kind, devices=(other,) * count if other else grant.devices)


@pytest.mark.parametrize(
    "how, found",
    [
        ("forgets who has what", "granted already"),
        ("gives a part", "wanted"),
        ("refuses what is free", "refused"),
        ("gives another kind", "acceptable kind|wanted"),
    ],
)
def test_the_simulation_notices_a_policy_that_breaks_the_rules(how: str, found: str) -> None:
    with pytest.raises(NotWhole, match=found):
        simulate(Broken(how), NODE, seed=1)
