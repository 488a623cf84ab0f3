"""The node's GPUs as the agent reads them: through the driver's library in a process of its own, or
from /proc."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.gpus.inventory import HELPER, GpuInventory, NodeGpu, read_inventory
from snapshotter.types import GpuDevice, GpuGrant
from tests.fakes.fake_nvml import A100, GIB, H100, L4, FakeNvml, gpus, inventory_of, partitioned

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Of an agent on a machine with a driver: its tool is on the PATH."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}


def helper(described: FakeNvml, directory: Path) -> tuple[str, ...]:
    """The agent's helper, in whose environment `pynvml` is the fake."""
    described.save(directory / "node.json")
    path = f"{REPOSITORY / 'tests/fakes/nvml'}:{REPOSITORY}:{REPOSITORY / 'functions'}"
    settings = [f"FAKE_NVML={directory / 'node.json'}", f"PYTHONPATH={path}"]
    return ("/usr/bin/env", *settings, *HELPER)


async def test_the_library_says_what_there_is(tmp_path: Path, environ: dict[str, str]) -> None:
    node = FakeNvml([*gpus(H100, H100, pairs=True), partitioned(A100, 2, "3g.20gb", "1g.5gb")])
    node.write_proc(tmp_path / "proc")

    found = await read_inventory(environ, helper=helper(node, tmp_path), proc=tmp_path / "proc")
    one, other, split = found.gpus
    assert found.driver == "580.65.06"
    assert (one.devices[0].kind, one.devices[0].minor) == ("H100", 0)
    assert one.devices[0].memory_bytes == 80 * GIB
    assert (set(one.links), set(other.links)) == ({other.uuid}, {one.uuid})
    assert (one.numa_node, split.numa_node, split.links) == (0, 0, frozenset())
    assert [(d.kind, d.memory_bytes, d.is_mig) for d in split.devices] == [
        ("A100-MIG-3g.20gb", 20 * GIB, True),
        ("A100-MIG-1g.5gb", 5 * GIB, True),
    ]
    assert found.models == (H100, H100, "A100-MIG-3g.20gb", "A100-MIG-1g.5gb")


def test_a_mig_instance_has_the_capabilities_that_open_it(tmp_path: Path) -> None:
    node = FakeNvml([partitioned(A100, 2, "3g.20gb", "1g.5gb")])
    node.write_proc(tmp_path)
    found = inventory_of(*node.gpus, proc=tmp_path)
    assert [d.capabilities for d in found.devices] == [(300, 301), (310, 311)]
    assert [d.minor for d in found.devices] == [2, 2]


def test_a_partitioned_gpu_without_instances_has_nothing_to_grant() -> None:
    found = inventory_of(*gpus(L4), replace(partitioned(A100, 1), mig=()))
    assert [gpu.devices != () for gpu in found.gpus] == [True, False]


def test_gpus_are_in_the_order_of_their_device_numbers() -> None:
    first, second = gpus(H100, L4)
    found = inventory_of(second, first)
    assert [device.minor for device in found.devices] == [0, 1]


def test_what_the_driver_cannot_say_is_not_known() -> None:
    (gpu,) = inventory_of(*(replace(gpu, numa_node=-1) for gpu in gpus(L4))).gpus
    assert (gpu.numa_node, gpu.links) == (-1, frozenset())


def test_the_library_is_shut_down_also_after_an_error() -> None:
    from snapshotter.gpus import nvml

    node = FakeNvml([replace(gpu, is_lost=True) for gpu in gpus(L4)])
    with pytest.raises(FakeNvml.NVMLError, match="lost"):
        nvml.inventory(node)
    assert node.initialised == 0


async def test_without_a_driver_there_is_nothing_and_nothing_is_started(tmp_path: Path) -> None:
    found = await read_inventory({"PATH": ""}, helper=("/nonexistent",), proc=tmp_path)
    assert found == GpuInventory()


@pytest.mark.parametrize(
    "said",
    [
        "import sys; sys.exit('NVML: GPU is lost')",
        "print('not JSON')",
        "print('{}')",
        "import time; print('{', flush=True); time.sleep(60)",
        None,
    ],
)
async def test_where_the_library_fails_proc_is_read(
    said: str | None, tmp_path: Path, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    FakeNvml([*gpus(H100, L4), partitioned(A100, 2, "3g.20gb")]).write_proc(tmp_path / "proc")
    command = ("/nonexistent",) if said is None else (sys.executable, "-c", said)
    found = await read_inventory(environ, helper=command, proc=tmp_path / "proc", timeout_s=0.5)
    assert found.driver == "580.65.06"
    assert [(d.kind, d.minor, d.memory_bytes) for d in found.devices] == [
        ("H100", 0, 0),
        ("L4", 1, 0),
    ]
    assert "gpus.no_nvml" in caplog.text


def test_an_inventory_and_a_grant_survive_json() -> None:
    found = inventory_of(*gpus(H100, H100, pairs=True), partitioned(A100, 2, "3g.20gb"))
    assert GpuInventory.from_json(found.to_json()) == found
    grant = GpuGrant(kind="H100", devices=found.devices[:2])
    assert GpuGrant.from_json(grant.to_json()) == grant
    assert grant.visible_devices == ",".join(grant.uuids)
    assert found.gpu_of(found.devices[2]) == found.gpus[2]
    assert isinstance(found.gpus[0], NodeGpu)
    assert isinstance(found.devices[0], GpuDevice)
