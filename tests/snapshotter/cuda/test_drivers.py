"""What a CudaDriver promises: the fake, both real clients (over stand-ins of NVIDIA's side), and a
real GPU where there is one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from snapshotter.cuda.binary import BinaryDriver
from snapshotter.cuda.checkpoint_sequence import CudaDevices
from snapshotter.cuda.core import CoreDriver
from snapshotter.cuda.driver import CudaDriver, Deadlines
from snapshotter.cuda.errors import CudaFailed, DriverFailed
from snapshotter.cuda.gpu_usage import GpuUsage
from snapshotter.cuda.transitions import CudaState
from tests.fakes.fake_cuda import FakeCuda, FakeProcess, Fault
from tests.snapshotter.cuda.gpu_process import gpu_process
from tests.snapshotter.cuda.standins import write_package, write_program

PID = 4242
MAPPING = {"GPU-aaaaaaaa-0000-0000-0000-000000000000": "GPU-bbbbbbbb-0000-0000-0000-000000000000"}
ENDS_AT_ONCE_S = 20.0
"""Far below the ten minutes that a stand-in hangs, far above what a loaded machine needs."""


@dataclass
class Subject:
    """A driver, a process of its that holds CUDA and one that does not, and a way to make the next
    call hang (None: cannot)."""

    driver: CudaDriver
    pid: int
    plain_pid: int
    hang: Callable[[bool], None] | None


def fake() -> Subject:
    cuda = FakeCuda(FakeProcess(pid=PID), FakeProcess(pid=7, cuda=False))

    def hang(on: bool) -> None:
        done = cuda.calls("lock")
        cuda.faults["lock"] = [None] * done + [Fault.HANG] if on else []

    return Subject(driver=cuda, pid=PID, plain_pid=7, hang=hang)


def stand_in(folder: Path, driver: CudaDriver) -> Subject:
    (folder / str(PID)).write_text("running")

    def hang(on: bool) -> None:
        marker = folder / f"{PID}.hang"
        marker.touch() if on else marker.unlink()

    return Subject(driver=driver, pid=PID, plain_pid=7, hang=hang)


def environ(folder: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "STANDIN_CUDA": str(folder),
        "PYTHONPATH": str(folder / "lib"),
    }


def binary(folder: Path) -> BinaryDriver:
    return BinaryDriver(write_program(folder), version="570.86.10", environ=environ(folder))


def core(folder: Path) -> CoreDriver:
    write_package(folder / "lib")
    return CoreDriver(environ=environ(folder))


@pytest.fixture(
    params=["fake", "cuda-checkpoint", "cuda.core", pytest.param("gpu", marks=pytest.mark.gpu)]
)
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    if request.param == "gpu":
        async with gpu_process() as (driver, child):
            plain = await asyncio.create_subprocess_exec("sleep", "300")
            yield Subject(driver=driver, pid=child.pid, plain_pid=plain.pid, hang=None)
            plain.kill()
            await plain.wait()
        return
    if request.param == "fake":
        made = fake()
    else:
        made = stand_in(
            tmp_path, binary(tmp_path) if request.param == "cuda-checkpoint" else core(tmp_path)
        )
    yield made
    await made.driver.aclose()


async def test_four_actions_go_round(subject: Subject) -> None:
    driver, pid = subject.driver, subject.pid
    states = [await driver.state(pid)]
    await driver.lock(pid, timeout_s=10)
    states.append(await driver.state(pid))
    await driver.checkpoint(pid)
    states.append(await driver.state(pid))
    await driver.restore(pid, gpu_mapping={})
    states.append(await driver.state(pid))
    await driver.unlock(pid)
    states.append(await driver.state(pid))
    assert states == [
        CudaState.RUNNING,
        CudaState.LOCKED,
        CudaState.CHECKPOINTED,
        CudaState.LOCKED,
        CudaState.RUNNING,
    ]


async def test_an_action_out_of_turn_is_refused_and_changes_nothing(subject: Subject) -> None:
    with pytest.raises(DriverFailed, match=f"CUDA checkpoint of process {subject.pid}"):
        await subject.driver.checkpoint(subject.pid)
    assert await subject.driver.state(subject.pid) is CudaState.RUNNING


async def test_a_process_without_cuda_is_told_apart(subject: Subject) -> None:
    assert await subject.driver.restore_thread(subject.pid) is not None
    assert await subject.driver.restore_thread(subject.plain_pid) is None
    with pytest.raises(DriverFailed):
        await subject.driver.lock(subject.plain_pid, timeout_s=1)


async def test_a_call_that_hangs_ends_with_its_deadline_and_the_next_one_is_answered(
    subject: Subject,
) -> None:
    if subject.hang is None:
        pytest.skip("a real driver does not hang to order")
    await subject.driver.state(subject.pid)
    subject.hang(True)
    async with asyncio.timeout(ENDS_AT_ONCE_S):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await subject.driver.lock(subject.pid, timeout_s=60)
        subject.hang(False)
        assert await subject.driver.state(subject.pid) is CudaState.RUNNING


async def test_the_driver_says_what_it_is_and_needs(subject: Subject) -> None:
    await subject.driver.state(subject.pid)
    assert subject.driver.name
    assert subject.driver.minimum_release in {555, 570}


# -- what only one of them does --------------------------------------------------------------------


async def round_trip(driver: CudaDriver) -> None:
    await driver.lock(PID, timeout_s=1.5)
    await driver.checkpoint(PID)
    await driver.restore(PID, gpu_mapping=MAPPING)
    await driver.unlock(PID)


async def test_the_program_gets_milliseconds_and_a_device_map(tmp_path: Path) -> None:
    subject = stand_in(tmp_path, binary(tmp_path))
    await round_trip(subject.driver)
    ((old, new),) = MAPPING.items()
    assert (tmp_path / "calls").read_text().splitlines() == [
        "lock 1500",
        "checkpoint ",
        f"restore {old}={new}",
        "unlock ",
    ]


async def test_cuda_core_gets_milliseconds_and_bare_uuids(tmp_path: Path) -> None:
    subject = stand_in(tmp_path, core(tmp_path))
    try:
        await round_trip(subject.driver)
    finally:
        await subject.driver.aclose()
    ((old, new),) = ((a.removeprefix("GPU-"), b.removeprefix("GPU-")) for a, b in MAPPING.items())
    assert (tmp_path / "calls").read_text().splitlines() == [
        "lock 1500",
        "checkpoint ",
        f"restore {old}={new}",
        "unlock ",
    ]


async def test_one_helper_serves_many_calls_and_is_replaced_when_it_dies(tmp_path: Path) -> None:
    driver = core(tmp_path)
    subject = stand_in(tmp_path, driver)
    try:
        for _ in range(3):
            await driver.state(subject.pid)
        assert driver.starts == 1
        (tmp_path / f"{PID}.die").touch()
        with pytest.raises(
            DriverFailed,
            match=rf"the CUDA helper died \(status -{signal.SIGKILL.value}\): Segmentation fault",
        ):
            await driver.state(subject.pid)
        (tmp_path / f"{PID}.die").unlink()
        assert await driver.state(subject.pid) is CudaState.RUNNING
        assert driver.starts == 2
    finally:
        await driver.aclose()


async def test_calls_at_once_take_turns_on_the_helper(tmp_path: Path) -> None:
    driver = core(tmp_path)
    stand_in(tmp_path, driver)
    (tmp_path / "4243").write_text("locked")
    try:
        assert await asyncio.gather(*(driver.state(pid) for pid in (PID, 4243, PID))) == [
            "running",
            "locked",
            "running",
        ]
        assert driver.starts == 1
    finally:
        await driver.aclose()


async def test_a_program_that_is_killed_or_not_there_is_said(tmp_path: Path) -> None:
    subject = stand_in(tmp_path, binary(tmp_path))
    (tmp_path / f"{PID}.die").touch()
    with pytest.raises(DriverFailed, match="killed by signal 9"):
        await subject.driver.unlock(PID)
    gone = BinaryDriver(tmp_path / "not-there")
    with pytest.raises(DriverFailed, match="cannot be run: No such file"):
        await gone.state(PID)


class StandInMachine(FakeCuda):
    """The machine beside a stand-in: what its process holds follows from the file with its
    state."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FakeProcess(pid=PID))
        self._file = folder / str(PID)

    def holdings(self, pid: int) -> GpuUsage:
        self.processes[pid].state = CudaState(self._file.read_text().strip())
        return super().holdings(pid)


@pytest.mark.parametrize("make", [binary, core], ids=["cuda-checkpoint", "cuda.core"])
async def test_a_tree_whose_checkpoint_hangs_runs_again_through_the_real_client(
    make: Callable[[Path], CudaDriver], tmp_path: Path
) -> None:
    subject = stand_in(tmp_path, make(tmp_path))
    machine = StandInMachine(tmp_path)
    seam = CudaDevices(subject.driver, machine, deadlines=Deadlines(checkpoint_s=0.2))
    (tmp_path / f"{PID}.hang").write_text("checkpoint")
    try:
        with pytest.raises(CudaFailed, match=r"rolled back by: unlock\).*did not end within 0.2 s"):
            await seam.before_dump([PID])
        assert await subject.driver.state(PID) is CudaState.RUNNING
        (tmp_path / f"{PID}.hang").unlink()
        patient = CudaDevices(subject.driver, machine)
        suspension = await patient.before_dump([PID])
        await patient.after_restore([PID], suspension.record)
    finally:
        await subject.driver.aclose()
    names = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    assert names == ["lock", "unlock", "lock", "checkpoint", "restore", "unlock"]
    assert not machine.processes[PID].killed


@pytest.mark.parametrize("make", [binary, core], ids=["cuda-checkpoint", "cuda.core"])
async def test_a_state_that_is_not_known_is_an_error(
    make: Callable[[Path], CudaDriver], tmp_path: Path
) -> None:
    driver = make(tmp_path)
    (tmp_path / str(PID)).write_text("sideways")
    try:
        with pytest.raises(DriverFailed, match="an unknown state 'sideways'"):
            await driver.state(PID)
    finally:
        await driver.aclose()


async def test_the_agent_itself_never_loads_cuda(tmp_path: Path) -> None:
    before = set(sys.modules)  # other tests may have imported a torch that brings CUDA's bindings
    driver = core(tmp_path)
    stand_in(tmp_path, driver)
    try:
        await driver.state(PID)
    finally:
        await driver.aclose()
    assert "cuda" not in {name.partition(".")[0] for name in sys.modules.keys() - before}
