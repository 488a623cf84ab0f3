"""What a process and a node hold of NVIDIA's devices, read from /proc."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from snapshotter.cuda.devices import NoDevices
from snapshotter.cuda.errors import CudaRefused
from snapshotter.cuda.gpu_mapping import DeviceRecord
from snapshotter.cuda.gpu_usage import CudaNode, Gpu, cuda_node, holdings_of, nvidia_leftovers
from snapshotter.cuda.host import ProcessHandle, ThisMachine

MAPS = """\
200400000-200600000 rw-s 00000000 00:14 20                               /dev/nvidia0
200600000-203e00000 rw-s 00000000 00:14 18                               /dev/nvidiactl
203e00000-205c00000 ---p 00000000 00:00 0
204a00000-204c00000 rw-s 204a00000 00:05 478                             /dev/nvidia-uvm
7ea03a000000-7ea03a400000 rw-s 7ea03a000000 00:05 478                    /dev/nvidia-uvm
7f0000000000-7f0000001000 rw-s 00000000 00:19 9                          /dev/shm/cuda.shm.0.1f4.1 (deleted)
7f1000000000-7f1000021000 rw-p 00000000 00:00 0                          [heap]
7f2000000000-7f2000021000 r-xp 00000000 fe:01 77                         /usr/lib/libnvidia-ml.so.1
"""


def process(proc: Path, pid: int, *, maps: str = "", fds: dict[int, str] | None = None) -> None:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "maps").write_text(maps)
    for number, target in (fds or {}).items():
        (folder / "fd" / str(number)).symlink_to(target)


def test_devices_mappings_and_descriptors_are_told_from_the_rest(tmp_path: Path) -> None:
    process(
        tmp_path,
        9,
        maps=MAPS,
        fds={0: "/dev/null", 12: "/dev/nvidiactl", 3: "/dev/nvidia1", 4: "socket:[77]"},
    )
    held = holdings_of(9, proc=tmp_path)
    assert held.devices == ("/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl")
    assert held.descriptors == ((3, "/dev/nvidia1"), (12, "/dev/nvidiactl"))
    assert held.minors == {0}  # mapped; the driver opens every GPU that it can see
    assert held.managed_bytes == 4 * 2**20
    assert held.has_ipc
    assert held.capabilities == frozenset()


def test_without_a_mapping_open_devices_count(tmp_path: Path) -> None:
    process(
        tmp_path,
        9,
        fds={3: "/dev/nvidia1", 4: "/dev/nvidia-caps/nvidia-cap30", 5: "/dev/nvidia-uvm"},
    )
    held = holdings_of(9, proc=tmp_path)
    assert held.minors == {1}
    assert held.capabilities == {30}
    assert held.managed_bytes == 0


def test_what_every_context_maps_is_not_managed_memory(tmp_path: Path) -> None:
    process(
        tmp_path,
        9,
        maps="204a00000-204c00000 rw-s 204a00000 00:05 478   /dev/nvidia-uvm\n",
        fds={3: "/dev/nvidia0"},
    )
    assert holdings_of(9, proc=tmp_path).managed_bytes == 0


def test_leftovers_name_descriptor_and_mapping(tmp_path: Path) -> None:
    process(tmp_path, 9, maps=MAPS.splitlines()[0] + "\n", fds={7: "/dev/nvidiactl (deleted)"})
    assert nvidia_leftovers(9, proc=tmp_path) == (
        "fd 7 → /dev/nvidiactl",
        "mapping of /dev/nvidia0 (2097152 bytes)",
    )
    process(tmp_path, 10, maps=MAPS.splitlines()[-1], fds={0: "/dev/null"})
    assert nvidia_leftovers(10, proc=tmp_path) == ()


def test_this_very_process_holds_nothing() -> None:
    assert nvidia_leftovers(os.getpid()) == ()


@pytest.mark.parametrize(
    "line",
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Wed Jan 15 05:33:37 UTC "
            "2025\nGCC version: gcc 12.3.0\n"
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  "
            "(dvs-builder@U16)\n"
        ),
    ],
)
def test_the_driver_and_its_gpus(tmp_path: Path, line: str) -> None:
    driver = tmp_path / "driver" / "nvidia"
    for slot, minor, uuid in (("0000:17:00.0", 1, "GPU-b"), ("0000:0a:00.0", 0, "GPU-a")):
        (driver / "gpus" / slot).mkdir(parents=True)
        text = (
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 202\nGPU UUID: \t {uuid}\nBus "
            f"Location: \t {slot}\nDevice Minor: \t {minor}\n"
        )
        (driver / "gpus" / slot / "information").write_text(text)
    for place, minor in (
        ("mig/config", 1),
        ("mig/monitor", 2),
        ("gpu1/mig/gi7/access", 66),
        ("gpu1/mig/gi7/ci0/access", 67),
    ):
        file = driver / "capabilities" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    (driver / "version").write_text(line)
    process(tmp_path, 50)
    (tmp_path / "50" / "comm").write_text("nvidia-cuda-mps\n")
    assert cuda_node(proc=tmp_path) == CudaNode(
        release=570,
        version="570.86.10",
        gpus=(
            Gpu(uuid="GPU-a", name="NVIDIA H100 80GB HBM3", minor=0),
            Gpu(uuid="GPU-b", name="NVIDIA H100 80GB HBM3", minor=1, mig=True),
        ),
        mps=True,
        mig_instances=frozenset({66, 67}),
    )


def test_a_machine_without_a_driver(tmp_path: Path) -> None:
    assert cuda_node(proc=tmp_path) == CudaNode(release=None, version="", gpus=(), mps=False)


# -- the end of a process --------------------------------------------------------------------------


async def test_a_lost_process_is_killed_and_one_with_its_pid_is_not() -> None:
    machine = ThisMachine()
    child = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        who = machine.victim(child.pid)
        machine.kill(ProcessHandle(pid=who.pid, started_ticks=who.started_ticks - 1))
        machine.holdings(child.pid)
        assert child.returncode is None
        machine.kill(who)
        assert await child.wait() == -signal.SIGKILL
        machine.kill(who)  # one that is gone is no error
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


# -- functions without a GPU -----------------------------------------------------------------------


async def test_a_function_without_a_gpu_passes_untouched() -> None:
    seam = NoDevices()
    suspension = await seam.before_dump([os.getpid(), 2**22 + 1])
    assert suspension.record == DeviceRecord()
    await seam.rollback(suspension, "why")
    assert await seam.after_restore([os.getpid()], suspension.record) == {}


async def test_a_function_without_a_gpu_that_holds_one_all_the_same_is_refused() -> None:
    seam = NoDevices(leftovers=lambda _: ("fd 7 → /dev/nvidiactl",))
    with pytest.raises(
        CudaRefused, match="process 3 holds fd 7 → /dev/nvidiactl at the snapshot: close it before"
    ):
        await seam.before_dump([3])


def test_a_snapshot_with_a_gpu_side_is_not_for_a_node_without() -> None:
    with pytest.raises(CudaRefused, match="GPU state of 2 processes"):
        NoDevices().check_restore(DeviceRecord(processes=2, used=("GPU-a",)))
