"""Admission of a model against the memory of GPUs: weights, KV cache and engine fit, or the start
is refused with the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.errors import NoCapacity, Unsupported
from snapshotter.gpus.grants import GpuGrants
from snapshotter.types import GpuGrant, LaunchSpec
from tests.fakes.fake_nvml import A100, GIB, H100, L4, gpus, inventory_of, mixed_node, partitioned
from tests.snapshotter.agent.test_launch_signature import LAUNCH


def launch(*kinds: str, count: int = 1, gib: float = 0.0) -> LaunchSpec:
    return replace(LAUNCH, gpu=kinds, gpu_count=count, gpu_memory_bytes=int(gib * GIB))


class Node:
    """Grants of a node; `held` are those that were made."""

    def __init__(self, *described: str) -> None:
        found = inventory_of(*gpus(*described))
        self.held: list[GpuGrant] = []
        self.grants = GpuGrants(found, lambda: self.held)

    def grant(self, wanted: LaunchSpec) -> str:
        grant = self.grants.allocate(wanted)
        assert grant is not None
        self.held.append(grant)
        return grant.kind


def test_the_first_kind_that_it_fits_into_is_granted() -> None:
    node = Node(L4, H100)
    assert node.grant(launch("L4", "H100", gib=30)) == "H100"
    assert node.grant(launch("L4", "H100", gib=20)) == "L4"


def test_several_gpus_share_a_model() -> None:
    assert Node(L4, L4).grant(launch("L4", count=2, gib=40)) == "L4"
    with pytest.raises(Unsupported, match=r"need 50\.0 GiB .* 2 L4 of this node has 46\.0 GiB"):
        Node(L4, L4).grant(launch("L4", count=2, gib=50))


@pytest.mark.parametrize(
    "node, words",
    [
        (Node(L4, L4, H100), "what this node has (2 L4, 1 H100), or remove `gpu=`"),
        (Node(), "no GPU: remove `gpu=`"),
    ],
)
def test_a_kind_that_the_node_never_has_is_refused_with_those_that_it_has(
    node: Node, words: str
) -> None:
    with pytest.raises(Unsupported, match="1 A100 GPU wanted") as refused:
        node.grant(launch("A100", gib=1))
    assert words in refused.value.detail["hint"]


def test_what_fits_into_no_gpu_is_refused_with_the_numbers_and_ways_out() -> None:
    with pytest.raises(Unsupported) as refused:
        Node(L4, H100).grant(launch("any", gib=100))
    assert refused.value.detail["resource"] == "gpu_memory"
    assert refused.value.detail["asked"] == 100 * GIB
    for words in ("need 100.0 GiB", "one H100 of this node has 80.0 GiB", "max_model_len"):
        assert words in str(refused.value)


def test_a_gpu_that_is_too_small_is_not_one_that_may_become_free() -> None:
    node = Node(L4, H100)
    node.grant(launch("H100"))
    node.grant(launch("L4"))
    with pytest.raises(NoCapacity) as refused:
        node.grant(launch("L4", "H100", gib=30))
    assert list(refused.value.detail["kinds"]) == ["H100"]
    assert (refused.value.detail["total"], refused.value.detail["claimed"]) == (1, 1)


def test_a_mig_instance_has_its_own_memory() -> None:
    found = inventory_of(partitioned(A100, 0, "3g.20gb", "1g.5gb"))
    grants = GpuGrants(found, list)
    wanted = launch("A100-MIG-1g.5gb", "A100-MIG-3g.20gb", gib=8)
    grant = grants.allocate(wanted)
    assert grant is not None
    assert grant.kind == "A100-MIG-3g.20gb"


def test_a_gpu_whose_memory_is_not_known_is_not_left_out() -> None:
    known = inventory_of(*gpus(L4))
    unknown = replace(
        known,
        gpus=tuple(
            replace(gpu, devices=tuple(replace(d, memory_bytes=0) for d in gpu.devices))
            for gpu in known.gpus
        ),
    )
    assert GpuGrants(unknown, list).allocate(launch("L4", gib=900)) is not None


@given(
    st.lists(
        st.tuples(
            st.sampled_from([("H100",), ("L4",), ("L4", "H100"), ("any",), ("H100", "L4")]),
            st.integers(1, 4),
            st.integers(0, 400),
        ),
        max_size=30,
    )
)
def test_whatever_is_granted_fits(arrivals: list[tuple[tuple[str, ...], int, int]]) -> None:
    held: list[GpuGrant] = []
    grants = GpuGrants(inventory_of(*mixed_node()), lambda: held)
    for kinds, count, gib in arrivals:
        try:
            grant = grants.allocate(launch(*kinds, count=count, gib=gib))
        except (NoCapacity, Unsupported):
            continue
        assert grant is not None
        assert sum(device.memory_bytes for device in grant.devices) >= gib * GIB
        held.append(grant)
    granted = [uuid for grant in held for uuid in grant.uuids]
    assert len(granted) == len(set(granted))
