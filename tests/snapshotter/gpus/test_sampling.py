"""The use of GPUs: sampled through NVML in a process of its own, and told by whose they are."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from snapshotter.gpus.sampler import HELPER, STALE_S, GpuSampler
from snapshotter.gpus.sampling import GpuSample, NvmlUsage, parse, sample
from snapshotter.gpus.view import GpuHolder, GpuUse, GpuView, gpu_uses
from snapshotter.metrics import Metrics
from snapshotter.types import GpuGrant, InstanceState
from tests.fakes.clock import ManualClock
from tests.fakes.fake_nvml import A100, GIB, H100, FakeNvml, gpus, inventory_of, partitioned
from weight_cache.errors import WeightCacheUnavailable
from weight_cache.types import ModelInfo

REPOSITORY = Path(__file__).parents[3]
LABELS = {"tenant": "t-1", "app": "chat", "function": "Llama", "environment": "main"}
MODEL, OTHER = "a" * 64, "b" * 64


def node() -> FakeNvml:
    one, two = gpus(H100, H100)
    split = partitioned(A100, 2, "3g.20gb", "1g.5gb")
    assert split.mig is not None
    busy = replace(split.mig[0], used_bytes=7 * GIB)
    return FakeNvml(
        [
            replace(one, used_bytes=30 * GIB, sm_percent=42),
            replace(two, used_bytes=GIB, sm_percent=None),
            replace(split, mig=(busy, split.mig[1])),
        ]
    )


def samples_of(fake: FakeNvml) -> list[GpuSample]:
    fake.nvmlInit()
    return sample(cast(NvmlUsage, fake))


def helper(directory: Path, fake: FakeNvml) -> tuple[str, ...]:
    fake.save(directory / "node.json")
    path = f"{REPOSITORY / 'tests/fakes/nvml'}:{REPOSITORY}:{REPOSITORY / 'functions'}"
    settings = [f"FAKE_NVML={directory / 'node.json'}", f"PYTHONPATH={path}"]
    return ("/usr/bin/env", *settings, *HELPER)


def printing(text: str) -> tuple[str, ...]:
    """A helper that prints this and stays."""
    return (sys.executable, "-c", f"import time; print({text!r}, flush=True); time.sleep(60)")


@asynccontextmanager
async def running(sampler: GpuSampler) -> AsyncIterator[None]:
    task = asyncio.create_task(sampler.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.01)


# -- the library -----------------------------------------------------------------------------------


def test_whole_gpus_have_both_figures_and_mig_instances_their_memory() -> None:
    one, two, large, small = samples_of(node())
    assert (one.sm_utilisation, one.used_bytes, one.total_bytes) == (0.42, 30 * GIB, 80 * GIB)
    assert (two.sm_utilisation, two.used_bytes) == (None, GIB), "the driver does not tell"
    assert (large.uuid[:4], large.sm_utilisation, large.used_bytes) == ("MIG-", None, 7 * GIB)
    assert (small.used_bytes, small.total_bytes) == (0, 5 * GIB)


def test_a_lost_gpu_is_left_out() -> None:
    fake = node()
    fake.gpus = [replace(fake.gpus[0], is_lost=True), *fake.gpus[1:]]
    assert len(samples_of(fake)) == 3


@pytest.mark.parametrize("line", ["", "[]", '{"gpus": [{"uuid": "x"}]}', '{"gpus": 7}'])
def test_what_is_no_sample_is_refused(line: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        parse(line)


# -- the helper ------------------------------------------------------------------------------------


async def test_a_helper_samples_until_the_agent_ends(tmp_path: Path) -> None:
    fake, clock = node(), ManualClock()
    sampler = GpuSampler(helper=helper(tmp_path, fake), every_s=0.05, clock=clock)
    assert sampler.latest() == {}
    async with running(sampler):
        await until(sampler.latest)
        assert list(sampler.latest().values()) == samples_of(fake)
    clock.advance(STALE_S)
    assert sampler.latest() == {}, "old figures are no figures"


async def test_without_the_library_nothing_is_known(caplog: pytest.LogCaptureFixture) -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('No module named pynvml')")
    sampler = GpuSampler(helper=command)
    async with running(sampler):
        await until(lambda: "No module named pynvml" in repr(sampler))
    assert sampler.latest() == {}
    assert caplog.text.count("gpus.not_sampled") == 1


@pytest.mark.parametrize("text", ["no JSON", '{"gpus": [{}]}'])
async def test_a_helper_that_prints_nonsense_is_replaced(text: str) -> None:
    sampler = GpuSampler(helper=printing(text))
    async with running(sampler):
        await until(lambda: "no sample" in repr(sampler))
    assert sampler.latest() == {}


async def test_a_helper_that_hangs_is_killed() -> None:
    sampler = GpuSampler(helper=(sys.executable, "-c", "import time; time.sleep(60)"), silent_s=0.2)
    async with running(sampler):
        await until(lambda: "no answer" in repr(sampler))


# -- whose use it is -------------------------------------------------------------------------------


def holder(
    *uuids: str, state: InstanceState = InstanceState.READY, instance: str = "i-1"
) -> GpuHolder:
    known = {device.uuid: device for device in inventory_of(*node().gpus).devices}
    grant = GpuGrant(kind="H100", devices=tuple(known[uuid] for uuid in uuids))
    return GpuHolder(
        instance=instance, labels=LABELS, state=state, grant=grant, manifests=(MODEL, OTHER)
    )


MODELS = {
    MODEL: ModelInfo(
        manifest=MODEL, size_bytes=16 * GIB, files=3, leases=1, last_used_at=0.0, is_pinned=True
    ),
    OTHER: ModelInfo(manifest=OTHER, size_bytes=2 * GIB, files=1, leases=1, last_used_at=0.0),
}
INVENTORY = inventory_of(*node().gpus)
FIRST, SECOND = INVENTORY.devices[0].uuid, INVENTORY.devices[1].uuid


def uses(*holders: GpuHolder, is_sampled: bool = True) -> dict[str, GpuUse]:
    samples = {one.uuid: one for one in samples_of(node())} if is_sampled else {}
    return {use.device.uuid: use for use in gpu_uses(INVENTORY, holders, samples, MODELS)}


def test_a_ready_instance_has_its_weights_in_the_memory_of_its_gpu() -> None:
    use = uses(holder(FIRST))[FIRST]
    assert [(w.manifest, w.state, w.bytes) for w in use.weights] == [
        (MODEL, "delivered", 16 * GIB),
        (OTHER, "delivered", 2 * GIB),
    ]
    assert (use.delivered_bytes, use.pinned_bytes) == (18 * GIB, 16 * GIB)


def test_weights_on_two_gpus_are_counted_in_parts_and_never_beyond_what_is_used() -> None:
    found = uses(holder(FIRST, SECOND))
    assert found[FIRST].delivered_bytes == 9 * GIB
    assert found[SECOND].delivered_bytes == GIB, "NVML says that no more is used there"
    assert uses(holder(FIRST, SECOND), is_sampled=False)[SECOND].delivered_bytes == 9 * GIB


def test_arriving_weights_are_not_delivered_and_sleeping_ones_only_as_far_as_measured() -> None:
    arriving = uses(holder(FIRST, state=InstanceState.STARTING))[FIRST]
    assert [w.state for w in arriving.weights] == ["arriving", "arriving"]
    assert (arriving.delivered_bytes, arriving.pinned_bytes) == (0, 0)
    asleep = holder(SECOND, state=InstanceState.ASLEEP)
    assert uses(asleep)[SECOND].delivered_bytes == GIB
    unknown = uses(asleep, is_sampled=False)[SECOND]
    assert [w.bytes for w in unknown.weights] == [None, None]


def test_a_gpu_that_two_pods_claim_is_nobodys() -> None:
    found = uses(holder(FIRST), holder(FIRST, SECOND, instance="i-2"))
    assert found[FIRST].holder is None
    assert found[FIRST].weights == ()
    assert found[SECOND].holder is not None


class SmallModels:
    """A weight cache that may be away."""

    is_away = False

    async def models(self) -> list[ModelInfo]:
        if self.is_away:
            raise WeightCacheUnavailable("restarting")
        return list(MODELS.values())


async def test_sizes_stay_known_while_the_weight_cache_is_away() -> None:
    cache = SmallModels()
    view = GpuView(inventory=INVENTORY, holders=lambda: [holder(FIRST)], models=cache)
    await view.refresh()
    cache.is_away = True
    await view.refresh()
    [use] = view.of_instance("i-1")
    assert use.delivered_bytes == 18 * GIB
    body = use.to_json()
    assert (body["used_bytes"], body["sm_utilisation"]) == (None, None), "never zero"
    assert (body["kind"], body["memory_bytes"], body["labels"]) == ("H100", 80 * GIB, LABELS)


async def test_a_node_without_gpus_samples_nothing() -> None:
    cache = SmallModels()
    cache.is_away = True
    view = GpuView(inventory=inventory_of(), holders=list, models=cache)
    await asyncio.wait_for(view.run(), 1)
    assert view.now() == []


# -- metrics ---------------------------------------------------------------------------------------


def exported(found: dict[str, GpuUse]) -> dict[tuple[str, str, str], float]:
    metrics = Metrics()
    metrics.gpus.observe_use(found.values())
    return {
        (sample.name, sample.labels["device"], sample.labels.get("state", "")): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if "device" in sample.labels
    }


def test_granted_gpus_have_series_of_what_is_known() -> None:
    assert exported(uses(holder(FIRST), holder(SECOND, instance="i-2"))) == {
        ("pilotlight_gpu_sm_utilisation", FIRST, ""): 0.42,
        ("pilotlight_gpu_memory_used_bytes", FIRST, ""): 30 * GIB,
        ("pilotlight_gpu_memory_used_bytes", SECOND, ""): GIB,
        ("pilotlight_gpu_weights_bytes", FIRST, "delivered"): 18 * GIB,
        ("pilotlight_gpu_weights_bytes", FIRST, "pinned"): 16 * GIB,
        ("pilotlight_gpu_weights_bytes", SECOND, "delivered"): GIB,
        ("pilotlight_gpu_weights_bytes", SECOND, "pinned"): GIB,
    }
    assert exported(uses()) == {}, "a GPU that nobody has has no owner to tell of"


def test_a_series_ends_with_its_grant() -> None:
    metrics = Metrics()
    metrics.gpus.observe_use(uses(holder(FIRST)).values())
    metrics.gpus.observe_use(uses().values())
    assert not any("device" in s.labels for f in metrics.registry.collect() for s in f.samples)
