"""The devices of a slot: those of its grant, and no others, tried by opening them from inside.

ENXIO: allowed (no driver has these numbers). EPERM: refused by the control group. ENOENT: not
shown."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapshotter.criu.errors import CriuFailed
from snapshotter.errors import Unsupported
from snapshotter.linux.cgroups import Cgroups
from snapshotter.linux.device_control import DeviceRule
from snapshotter.slots.slot_devices import DeviceLayout, SlotDevices
from snapshotter.types import GpuDevice, GpuGrant
from tests.conftest import RequireOrSkip
from tests.fakes.agent_home import AgentHome
from tests.fakes.allocated_slots import AllocatedSlots, allocated_slots, find_groups, plant
from tests.fakes.gpu_nodes import GpuNodes, make_gpu_nodes
from tests.fakes.slot_workshop import Workshop

pytestmark = pytest.mark.root

SHARED = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
STANDARD = [
    "fd",
    "full",
    "null",
    "ptmx",
    "pts",
    "random",
    "shm",
    "stderr",
    "stdin",
    "stdout",
    "tty",
    "urandom",
    "zero",
]


@pytest.fixture
def nodes(tmp_path: Path) -> GpuNodes:
    """Three GPUs, the third of which is partitioned in two."""
    return make_gpu_nodes(tmp_path / "machine", gpus=3, mig={2: 2})


@pytest.fixture
async def slots(
    short_tmp: Path, nodes: GpuNodes, require_or_skip: RequireOrSkip
) -> AsyncIterator[AllocatedSlots]:
    """On this machine's control groups."""
    home = AgentHome(short_tmp)
    cgroups = Cgroups.find(home.paths.run)
    if not cgroups.controls_devices:
        require_or_skip(str(cgroups.why_no_devices))
    async with allocated_slots(home, cgroups, nodes.layout) as slots:
        yield slots


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
async def slots_of_either(
    request: pytest.FixtureRequest,
    short_tmp: Path,
    tmp_path: Path,
    nodes: GpuNodes,
    require_or_skip: RequireOrSkip,
) -> AsyncIterator[AllocatedSlots]:
    """On control groups of either version, in turn."""
    home = AgentHome(short_tmp)
    cgroups = find_groups(home.paths.run, tmp_path, version=request.param)
    if not cgroups.controls_devices or cgroups.version != request.param:
        require_or_skip(f"cgroup v{request.param}: {cgroups.why_no_devices}")
    async with allocated_slots(home, cgroups, nodes.layout) as slots:
        yield slots


async def test_a_slot_without_a_grant_has_no_gpu(slots: AllocatedSlots, nodes: GpuNodes) -> None:
    slot = await slots.start()
    assert await slot.ask("/list/dev") == STANDARD
    names = [f"/dev/{name}" for name in nodes.names]
    assert set((await slot.open(*names)).values()) == {"ENOENT"}
    assert await slot.ask("/list/proc/driver") == []
    assert await slot.ask("/env/CUDA_VISIBLE_DEVICES") == ""


async def test_a_slot_opens_its_gpu_and_no_other(slots: AllocatedSlots, nodes: GpuNodes) -> None:
    slot = await slots.start(nodes.grant(nodes.gpu(1)))
    assert await slot.open(*SHARED, "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2") == {
        **dict.fromkeys(SHARED, "ENXIO"),
        "/dev/nvidia0": "ENOENT",
        "/dev/nvidia1": "ENXIO",
        "/dev/nvidia2": "ENOENT",
    }
    listed = await slot.ask("/list/dev")
    assert sorted(set(listed) - set(STANDARD)) == [
        "nvidia-uvm",
        "nvidia-uvm-tools",
        "nvidia1",
        "nvidiactl",
    ]
    assert await slot.ask("/env/CUDA_VISIBLE_DEVICES") == nodes.gpu(1).uuid


async def test_a_node_that_got_into_a_slot_does_not_open_another_gpu(
    slots_of_either: AllocatedSlots, nodes: GpuNodes
) -> None:
    """World-writable, on a file system with devices: only the control group is in the way."""
    slot = await slots_of_either.start(nodes.grant(nodes.gpu(1)))
    names = list(nodes.names)
    at = plant(slot, nodes.layout.dev, names)
    answers = {name: await slot.ask(f"/open{at}/{name.replace('/', '-')}") for name in names}
    allowed = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia1"}
    assert answers == {name: "ENXIO" if name in allowed else "EPERM" for name in names}


async def test_a_node_that_got_into_a_slot_without_a_grant_opens_nothing(
    slots_of_either: AllocatedSlots, nodes: GpuNodes
) -> None:
    slot = await slots_of_either.start()
    names = list(nodes.names)
    at = plant(slot, nodes.layout.dev, names)
    answers = {await slot.ask(f"/open{at}/{name.replace('/', '-')}") for name in names}
    assert answers == {"EPERM"}


async def test_forks_open_no_more_than_their_template(
    slots_of_either: AllocatedSlots, nodes: GpuNodes
) -> None:
    """A fork has a control group of its own."""
    slot = await slots_of_either.start(in_place=False)
    at = plant(slot, nodes.layout.dev, ["nvidia0"])
    assert await slot.ask(f"/open{at}/nvidia0") == "EPERM"
    assert await slot.open("/dev/null", "/dev/urandom", "/dev/ptmx") == {
        "/dev/null": "",
        "/dev/urandom": "",
        "/dev/ptmx": "",
    }


async def test_two_slots_have_different_gpus(slots: AllocatedSlots, nodes: GpuNodes) -> None:
    first = await slots.start(nodes.grant(nodes.gpu(0)))
    second = await slots.start(nodes.grant(nodes.gpu(1)), revision="f-2@v1-abc")
    both = ("/dev/nvidia0", "/dev/nvidia1")
    assert list((await first.open(*both)).values()) == ["ENXIO", "ENOENT"]
    assert list((await second.open(*both)).values()) == ["ENOENT", "ENXIO"]
    for slot, other in ((first, "nvidia1"), (second, "nvidia0")):
        at = plant(slot, nodes.layout.dev, [other])
        assert await slot.ask(f"/open{at}/{other}") == "EPERM"


async def test_several_gpus_keep_their_order(slots: AllocatedSlots, nodes: GpuNodes) -> None:
    slot = await slots.start(nodes.grant(nodes.gpu(2), nodes.gpu(0)))
    assert await slot.ask("/env/CUDA_VISIBLE_DEVICES") == (
        f"{nodes.gpu(2).uuid},{nodes.gpu(0).uuid}"
    )
    answers = await slot.open("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2")
    assert list(answers.values()) == ["ENXIO", "ENOENT", "ENXIO"]


async def test_a_mig_instance_opens_by_its_own_capabilities_only(
    slots: AllocatedSlots, nodes: GpuNodes
) -> None:
    slot = await slots.start(nodes.grant(nodes.mig("gpu2/gi1")))
    own, other = nodes.capabilities["gpu2/gi1"], nodes.capabilities["gpu2/gi2"]
    assert await slot.ask("/list/dev/nvidia-caps") == [f"nvidia-cap{number}" for number in own]
    assert (await slot.open("/dev/nvidia2"))["/dev/nvidia2"] == "ENXIO"
    for number in own:
        assert await slot.ask(f"/open/dev/nvidia-caps/nvidia-cap{number}") == "ENXIO"
    names = [f"nvidia-caps/nvidia-cap{number}" for number in (*other, 1, 2)]
    at = plant(slot, nodes.layout.dev, names)
    answers = {await slot.ask(f"/open{at}/{name.replace('/', '-')}") for name in names}
    assert answers == {"EPERM"}
    assert await slot.ask("/env/CUDA_VISIBLE_DEVICES") == nodes.mig("gpu2/gi1").uuid


async def test_files_of_the_driver_are_those_of_the_grant(
    slots: AllocatedSlots, nodes: GpuNodes
) -> None:
    whole = await slots.start(nodes.grant(nodes.gpu(1)))
    assert await whole.ask("/list/proc/driver") == ["nvidia"]
    assert await whole.ask("/list/proc/driver/nvidia") == ["gpus", "params", "version"]
    assert await whole.ask("/list/proc/driver/nvidia/gpus") == ["0000:02:00.0"]
    about = await whole.ask("/read/proc/driver/nvidia/gpus/0000:02:00.0/information")
    assert nodes.gpu(1).uuid in about
    parameters = await whole.ask("/read/proc/driver/nvidia/params")
    assert "ModifyDeviceFiles: 0" in parameters
    assert "DeviceFileMode: 438" in parameters

    part = await slots.start(nodes.grant(nodes.mig("gpu2/gi2")), revision="f-2@v1-abc")
    assert await part.ask("/list/proc/driver/nvidia/capabilities") == ["gpu2"]
    assert await part.ask("/list/proc/driver/nvidia/capabilities/gpu2/mig") == ["gi2"]
    assert await part.ask("/list/proc/driver/nvidia/capabilities/gpu2/mig/gi2") == ["access", "ci0"]
    assert await part.ask("/list/proc/driver/nvidia/gpus") == ["0000:03:00.0"]


async def test_a_process_in_a_slot_makes_no_device_node(
    slots: AllocatedSlots, nodes: GpuNodes
) -> None:
    slot = await slots.start(nodes.grant(nodes.gpu(1)))
    major, minor = nodes.names["nvidia0"]
    for number in (major, 1):  # of another GPU, and of a memory device
        for place in ("/tmp", "/dev/shm", "/run/pilotlight/slot/work"):
            assert await slot.ask(f"/mknod/{number}/{minor}{place}/node") == "EPERM"
    assert (await slot.ask("/status"))["CapBnd"] == "0" * 16
    assert (await slot.ask("/status"))["CapEff"] == "0" * 16


async def test_a_slot_after_a_gpu_slot_opens_nothing_of_it(
    slots: AllocatedSlots, nodes: GpuNodes
) -> None:
    slot = await slots.start(nodes.grant(nodes.gpu(1)))
    name = slot.occupied.slot.id
    await slots.clear(slot)
    assert slots.cgroups.names() == set()
    slot = await slots.start()
    assert slot.occupied.slot.id != name
    at = plant(slot, nodes.layout.dev, ["nvidia1", "nvidiactl"])
    assert await slot.ask(f"/open{at}/nvidia1") == "EPERM"
    assert await slot.ask(f"/open{at}/nvidiactl") == "EPERM"


async def test_standard_devices_work_and_those_of_the_machine_do_not(
    slots: AllocatedSlots,
) -> None:
    slot = await slots.start()
    answers = await slot.open(*(f"/dev/{name}" for name in ("null", "zero", "full", "random")))
    assert set(answers.values()) == {""}
    assert set((await slot.open("/dev/ptmx", "/dev/pts/ptmx")).values()) == {""}
    machine = [name for name in ("kmsg", "mem", "kvm", "fuse") if Path("/dev", name).exists()]
    at = plant(slot, Path("/dev"), machine)
    assert {await slot.ask(f"/open{at}/{name}") for name in machine} <= {"EPERM"}


async def test_a_grant_whose_node_is_missing_is_refused_by_name(
    slots: AllocatedSlots, nodes: GpuNodes
) -> None:
    with pytest.raises(Unsupported, match=r"/dev/nvidia7 cannot be given to a slot"):
        await slots.start(nodes.grant(nodes.gpu(7)))
    assert slots.allocator.occupied_slots == {}
    assert slots.cgroups.names() == set()


async def test_a_snapshot_opens_no_device_that_the_slot_was_not_granted(
    shop: Workshop, tmp_path: Path
) -> None:
    """CRIU opens what was open in the process, as root, but in the slot's control group. The
    kernel's log is a device that it would open again."""
    log = tmp_path / "kmsg"
    os.mknod(log, 0o20666, os.makedev(1, 11))
    log.chmod(0o666)
    shown, rules = ((str(log), "kmsg"),), (DeviceRule.of_node(log),)
    shop.devices = SlotDevices(nodes=shown, rules=rules)
    image = await shop.dump(await shop.boot(boot=["open_to_write:/dev/kmsg"]))
    place = await shop.restore(image)
    assert await shop.ask(place, await shop.start(place), "/restored") is True

    shop.devices = SlotDevices(nodes=shown)
    with pytest.raises(CriuFailed):
        await shop.restore(image)
    log_of_criu = (shop.places[-1].slot.directory / "criu/restore.log").read_text()
    assert "Can't open file dev/kmsg" in log_of_criu
    assert "Operation not permitted" in log_of_criu


def test_a_node_of_another_gpu_is_refused(nodes: GpuNodes) -> None:
    (nodes.layout.dev / "nvidia0").unlink()
    (nodes.layout.dev / "nvidia1").rename(nodes.layout.dev / "nvidia0")
    with pytest.raises(Unsupported, match="not GPU GPU-00000000"):
        nodes.layout.devices_of(nodes.grant(nodes.gpu(0)))


@pytest.mark.parametrize(
    "device, why",
    [
        (GpuDevice(uuid="", kind="H100"), "does not say which H100"),
        (GpuDevice(uuid="MIG-1", kind="H100-MIG-3g.40gb", minor=2), "no capability devices"),
    ],
)
def test_an_incomplete_grant_is_refused(nodes: GpuNodes, device: GpuDevice, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        nodes.layout.devices_of(GpuGrant(kind=device.kind, devices=(device,)))


def test_what_is_no_device_node_is_not_given(tmp_path: Path, nodes: GpuNodes) -> None:
    (nodes.layout.dev / "nvidia0").unlink()
    (nodes.layout.dev / "nvidia0").write_text("")
    with pytest.raises(Unsupported, match="is not a device node"):
        nodes.layout.devices_of(nodes.grant(nodes.gpu(0)))
    with pytest.raises(Unsupported, match="No such file or directory"):
        DeviceLayout(dev=tmp_path, driver=tmp_path).devices_of(nodes.grant(nodes.gpu(0)))
