"""What a pod's GPUs are, and so what they cost: the product label of its node says it."""

from __future__ import annotations

import asyncio

import pytest

from activator.knative.node_gpus import NodeGpus, kind_of_product
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.function import Clocks, Resources
from snapshotter import errors
from snapshotter.types import GpuGrant
from tests.fakes.small_cluster import World

PRODUCT = "NVIDIA-A100-SXM4-80GB"
LABEL = "nvidia.com/gpu.product"
PRICES = {"L4": 1, "A100": 2}


def label_node(world: World, product: str | None, name: str = "node-a") -> None:
    labels = {} if product is None else {LABEL: product}
    world.server.put(
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
    )


def kinds_of(grant: GpuGrant | None) -> tuple[str, int]:
    assert grant is not None
    return grant.kind, len(grant.devices)


@pytest.mark.parametrize(
    "product, kind",
    [
        (PRODUCT, "A100"),
        ("NVIDIA-H100-80GB-HBM3", "H100"),
        ("NVIDIA-A10", "A10"),
        ("NVIDIA-L40S", "L40S"),
        ("NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "H100-MIG-3g.40gb"),
        ("NVIDIA-B200", "NVIDIA-B200"),
    ],
)
def test_a_product_is_the_kind_whose_words_it_has(product: str, kind: str) -> None:
    names = ("A10", "A100", "L4", "L40S", "H100", "H100-MIG-3g.40gb")
    assert kind_of_product(product, names) == kind
    assert kind_of_product(product, reversed(names)) == kind


async def test_the_second_choice_is_granted_by_the_node_it_runs_on(world: World) -> None:
    label_node(world, PRODUCT)
    target = world.target(
        resources=Resources(gpu=("L4", PRODUCT), gpu_count=2), prices={"L4": 1, PRODUCT: 2}
    )
    fleet = await world.fleet()
    await world.maker.up(target)
    info = await world.start(fleet, target)
    assert kinds_of(info.gpus) == (PRODUCT, 2)
    assert target.granted_footprint(info.gpus).gpu == PRODUCT
    [adopted] = await fleet.adopt()
    assert adopted.gpus == info.gpus


async def test_one_named_kind_needs_no_label_and_a_function_without_gpus_has_none(
    world: World,
) -> None:
    fleet = await world.fleet()
    one = world.target("one", resources=Resources(gpu=("L4",), gpu_count=1), prices={"L4": 1})
    none = world.target("none")
    for target, number in ((one, 1), (none, 2)):
        await world.maker.up(target)
        info = await world.start(fleet, target, number)
        assert (info.gpus and info.gpus.kind) == ("L4" if target is one else None)


async def test_a_pod_on_a_node_whose_gpus_are_not_known_is_not_used_and_the_caller_reads_why(
    world: World,
) -> None:
    target = world.target(
        resources=Resources(gpu=("L4", "A100"), gpu_count=1),
        prices=PRICES,
        clocks=Clocks(startup_s=1.0),
    )
    fleet = await world.fleet()
    await world.maker.up(target)
    with pytest.raises(errors.StartTimeout, match=f"node node-a has no label {LABEL}"):
        await world.start(fleet, target)
    starting = asyncio.create_task(world.start(fleet, target, 2))
    label_node(world, "A100")
    assert kinds_of((await starting).gpus) == ("A100", 1)


async def test_a_node_that_lost_its_label_or_has_another_product_is_named(world: World) -> None:
    target = world.target(resources=Resources(gpu=("L4", "A100"), gpu_count=1), prices=PRICES)
    fleet = await world.fleet()
    await world.maker.up(target)
    await world.until(lambda: fleet.pods.of(target.key))
    [pod] = fleet.pods.of(target.key)
    gpus = NodeGpus(ClusterSettings())
    watching = asyncio.create_task(gpus.follow(world.cluster))
    await gpus.synced.wait()
    assert gpus.describe(pod) == (
        f"node node-a has no label {LABEL}, so the kind of its GPU is unknown"
    )
    label_node(world, "B200")
    await world.until(lambda: "'B200'" in gpus.describe(pod))
    assert not gpus.is_known(target, pod)
    label_node(world, None)
    await world.until(lambda: "no label" in gpus.describe(pod))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
