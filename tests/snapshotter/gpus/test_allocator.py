"""Which GPUs a request gets: all or none, connected ones first, and so that large groups stay
free."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.gpus.allocator import GpuAllocator
from snapshotter.gpus.kinds import satisfies
from snapshotter.gpus.topology import Topology
from snapshotter.types import GpuGrant
from tests.fakes.fake_nvml import A100, H100, L4, gpus, inventory_of, mixed_node, partitioned

PAIRS = GpuAllocator(inventory_of(*gpus(*(H100,) * 8, pairs=True)))
MIXED = GpuAllocator(inventory_of(*mixed_node()))


def minors(grant: GpuGrant | None) -> list[int]:
    assert grant is not None
    return [device.minor for device in grant.devices]


def uuids(allocator: GpuAllocator, *taken: int) -> set[str]:
    return {d.uuid for d in allocator.inventory.devices if d.minor in taken}


# -- topology --------------------------------------------------------------------------------------


def test_two_gpus_are_a_pair() -> None:
    assert minors(PAIRS.allocate(["H100"], 2, uuids(PAIRS, 0))) == [2, 3]
    assert minors(PAIRS.allocate(["H100"], 2, uuids(PAIRS, 0, 2, 4))) == [6, 7]


def test_one_gpu_breaks_no_pair() -> None:
    assert minors(PAIRS.allocate(["H100"], 1, uuids(PAIRS, 0, 1, 2))) == [3]
    assert minors(PAIRS.allocate(["H100"], 1, uuids(PAIRS, 6))) == [7]


def test_a_pair_leaves_the_other_numa_node_whole() -> None:
    assert minors(PAIRS.allocate(["H100"], 2, uuids(PAIRS, 4, 5))) == [6, 7]


def test_four_gpus_are_of_one_numa_node() -> None:
    assert minors(PAIRS.allocate(["H100"], 4, ())) == [0, 1, 2, 3]
    assert minors(PAIRS.allocate(["H100"], 4, uuids(PAIRS, 1))) == [4, 5, 6, 7]


def test_without_a_pair_one_numa_node_is_next_best() -> None:
    assert minors(PAIRS.allocate(["H100"], 2, uuids(PAIRS, 0, 2, 4, 5, 6))) == [1, 3]
    assert minors(PAIRS.allocate(["H100"], 2, uuids(PAIRS, 0, 1, 2, 4, 5, 6))) == [3, 7]


def test_more_gpus_than_are_compared_one_by_one_are_still_close_together() -> None:
    sixteen = GpuAllocator(inventory_of(*gpus(*(H100,) * 16, pairs=True, per_numa_node=8)))
    assert minors(sixteen.allocate(["H100"], 8, uuids(sixteen, 0))) == list(range(8, 16))


def test_gpus_of_unknown_place_are_granted_as_well() -> None:
    topology = Topology([gpu for gpu in inventory_of(*gpus(L4, L4)).gpus if not gpu.links])
    assert topology.choose(0b11, 2) == 0b11
    assert topology.largest_group(0b11) == 2


# -- kinds -----------------------------------------------------------------------------------------


def test_the_first_kind_that_has_enough_is_taken() -> None:
    h100s = uuids(MIXED, *range(7))
    assert MIXED.allocate(["H100", "L4"], 1, h100s) == GpuGrant(
        kind="H100", devices=(MIXED.inventory.devices[7],)
    )
    two = MIXED.allocate(["H100", "L4"], 2, h100s)
    assert two is not None
    assert (two.kind, [d.kind for d in two.devices]) == ("L4", ["L4", "L4"])
    assert MIXED.allocate(["H100"], 2, h100s) is None, "an L4 is no H100"
    assert MIXED.allocate(["L4", "H100"], 5, h100s) is None, "all are of one model"


def test_any_is_the_smallest_whole_gpu_and_is_priced_by_its_kind() -> None:
    grant = MIXED.allocate(["any"], 1, ())
    assert grant is not None
    assert (grant.kind, grant.devices[0].kind) == ("L4", "L4")
    large = MIXED.allocate(["any"], 5, ())
    assert large is not None
    assert large.kind == "H100"


def test_a_narrower_name_is_the_kind_of_the_grant() -> None:
    grant = MIXED.allocate(["H100-80GB"], 1, ())
    assert grant is not None
    assert (grant.kind, grant.devices[0].kind) == ("H100-80GB", "H100")


def test_mig_instances_are_had_by_profile() -> None:
    small = MIXED.allocate(["A100-MIG-1g.5gb"], 1, ())
    assert small is not None
    assert small.devices[0].is_mig
    assert MIXED.allocate(["A100-MIG-1g.5gb"], 1, MIXED_SMALL) is None
    assert MIXED.allocate(["A100"], 1, ()) is None, "a partitioned GPU is not whole"


MIXED_SMALL = {d.uuid for d in MIXED.inventory.devices if d.kind == "A100-MIG-1g.5gb"}


def test_mig_instances_of_one_gpu_are_used_up_first() -> None:
    two = GpuAllocator(
        inventory_of(*(partitioned(A100, n, "1g.5gb", "1g.5gb", "1g.5gb") for n in (0, 1)))
    )
    taken = {two.inventory.devices[4].uuid}
    grant = two.allocate(["A100-MIG-1g.5gb"], 1, taken)
    assert minors(grant) == [1]


# -- figures ---------------------------------------------------------------------------------------


def test_figures_are_by_kind() -> None:
    use = MIXED.use(["H100", "L4", "A100-MIG-1g.5gb"], uuids(MIXED, 0, 1, 8))
    assert {kind: (u.free, u.total) for kind, u in use.items()} == {
        "H100": (6, 8),
        "L4": (3, 4),
        "A100-MIG-1g.5gb": (2, 2),
    }
    assert (MIXED.most(["H100", "L4"]), MIXED.most(["any"]), MIXED.most(["T4"])) == (8, 8, 0)


@pytest.mark.parametrize(
    "taken, share",
    [
        ((), 4 / 8),  # of two NUMA nodes, one
        ((0, 1, 2, 3), 1.0),
        ((0, 1, 4, 5), 2 / 4),
        ((0, 2, 4, 6), 2 / 4),
        ((0, 2, 3, 4, 6, 7), 1 / 2),
        (tuple(range(8)), None),
    ],
)
def test_fragmentation_is_the_largest_connected_request_of_what_is_free(
    taken: tuple[int, ...], share: float | None
) -> None:
    assert PAIRS.fragmentation(uuids(PAIRS, *taken)) == {"H100": share}


# -- always ----------------------------------------------------------------------------------------

requests = st.tuples(
    st.lists(
        st.sampled_from(["H100", "L4", "any", "A100-MIG-1g.5gb", "A100-MIG-3g.20gb", "T4"]),
        min_size=1,
        max_size=3,
        unique=True,
    ),
    st.integers(1, 8),
)


@given(request=requests, taken=st.sets(st.sampled_from(MIXED.inventory.devices)))
def test_a_grant_is_whole_free_of_one_model_and_of_the_best_kind(
    request: tuple[list[str], int], taken: set[object]
) -> None:
    kinds, count = request
    granted = {device.uuid for device in MIXED.inventory.devices if device in taken}
    free = [d for d in MIXED.inventory.devices if d.uuid not in granted]
    possible = [
        kind
        for kind in kinds
        if any(
            sum(d.model == model and satisfies(d, kind) for d in free) >= count
            for model in (H100, L4, A100)
        )
    ]
    grant = MIXED.allocate(kinds, count, granted)
    if grant is None:
        assert not possible
        return
    assert len(grant.uuids) == len(set(grant.uuids)) == count
    assert set(grant.devices) <= set(free)
    assert len({(d.model, d.kind) for d in grant.devices}) == 1
    assert all(satisfies(d, possible[0]) for d in grant.devices)
    assert minors(grant) == sorted(minors(grant))


@given(
    free=st.integers(1, 2**8 - 1),
    count=st.integers(1, 8),
    pairs=st.booleans(),
    per_node=st.integers(1, 8),
)
def test_no_choice_is_better_connected(free: int, count: int, pairs: bool, per_node: int) -> None:
    nodes = inventory_of(*gpus(*(H100,) * 8, pairs=pairs, per_numa_node=per_node)).gpus
    if free.bit_count() < count:
        return
    chosen = Topology(nodes).choose(free, count)
    assert chosen.bit_count() == count
    assert chosen & ~free == 0

    def unconnected(places: tuple[int, ...]) -> tuple[int, int]:
        apart = sum(nodes[b].uuid not in nodes[a].links for a, b in combinations(places, 2))
        return apart, len({nodes[n].numa_node for n in places})

    ours = tuple(n for n in range(8) if chosen >> n & 1)
    every = combinations([n for n in range(8) if free >> n & 1], count)
    assert unconnected(ours) == min(map(unconnected, every))


@given(data=st.data(), per_node=st.sampled_from([4, 8]))
def test_a_grown_choice_is_within_what_is_free(data: st.DataObject, per_node: int) -> None:
    topology = Topology(inventory_of(*gpus(*(H100,) * 16, pairs=True, per_numa_node=per_node)).gpus)
    free = data.draw(st.integers(2**15, 2**16 - 1))
    count = data.draw(st.integers(1, free.bit_count()))
    chosen = topology.choose(free, count)
    assert (chosen.bit_count(), chosen & ~free) == (count, 0)
