"""A CUDA driver and its machine in memory: the real state machine, with faults and latency that
tests plan.

A fault is planned for one call: `faults["lock"] = [None, Fault.HANG]` lets the first lock pass and
hangs the second."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from snapshotter.cuda.errors import DriverFailed
from snapshotter.cuda.gpu_usage import CudaNode, Gpu, GpuUsage
from snapshotter.cuda.host import ProcessHandle
from snapshotter.cuda.transitions import TRANSITIONS, Action, CudaState

GPU_A = Gpu(uuid="GPU-aaaaaaaa-0000-0000-0000-000000000000", name="Fake 80GB", minor=0)
GPU_B = Gpu(uuid="GPU-bbbbbbbb-0000-0000-0000-000000000000", name="Fake 80GB", minor=1)
NODE = CudaNode(release=580, version="580.65.06", gpus=(GPU_A,), mps=False)


CONTEXT_DEVICES = (
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia0",
    "/dev/nvidia-caps/nvidia-cap1",
    "/dev/nvidia-caps/nvidia-cap2",
)
CONTEXT_MAPPINGS = (("/dev/nvidia0", 2**21), ("/dev/nvidiactl", 2**21), ("/dev/nvidia-uvm", 2**21))
"""What every process with CUDA holds, as driver 580 was seen to make it on an H200."""


class Fault(enum.Enum):
    """What goes wrong with one call."""

    FAIL = "the driver says no, and nothing has happened"
    HANG = "no answer, and nothing has happened"
    LATE = "no answer, but it has happened"
    IGNORED = "the driver says yes, and nothing has happened"
    BROKEN = "the driver says no, and the process is in state failed"
    DIE = "the process dies"


@dataclass
class FakeProcess:
    """One process: devices it holds while running, extra ones that a checkpoint does not take away,
    and what happened to it."""

    pid: int
    cuda: bool = True
    state: CudaState = CudaState.RUNNING
    devices: tuple[str, ...] = CONTEXT_DEVICES
    clings_to: tuple[str, ...] = ()
    mapped: tuple[tuple[str, int], ...] = CONTEXT_MAPPINGS
    alive: bool = True
    killed: bool = False
    history: list[str] = field(default_factory=list)


class FakeCuda:
    """CudaDriver and Machine at once. Owned by one test."""

    def __init__(
        self, *processes: FakeProcess, node: CudaNode = NODE, minimum_release: int = 570
    ) -> None:
        self.processes = {p.pid: p for p in processes}
        self.faults: dict[str, Sequence[Fault | None]] = {}
        self.latency_s: dict[str, float] = {}
        self.mappings: list[Mapping[str, str]] = []
        self.longest_s: dict[str, float] = {}
        """The longest that a call of each kind took, cancelled ones included, on the event loop's
        clock."""
        self.closed = False
        self._node = node
        self._minimum_release = minimum_release
        self._calls: dict[str, int] = {}

    # -- CudaDriver --------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """For people."""
        return "fake"

    @property
    def minimum_release(self) -> int:
        """As given."""
        return self._minimum_release

    async def restore_thread(self, pid: int) -> int | None:
        """The pid itself, for a process with CUDA."""
        process = await self._asked("restore_thread", pid)
        return pid if process.cuda else None

    async def state(self, pid: int) -> CudaState:
        """As the process stands."""
        process = await self._asked("state", pid)
        if not process.cuda:
            raise DriverFailed("state", pid, "no CUDA")
        return process.state

    async def lock(self, pid: int, *, timeout_s: float) -> None:
        """running → locked."""
        await self._act(Action.LOCK, pid)

    async def checkpoint(self, pid: int) -> None:
        """locked → checkpointed."""
        await self._act(Action.CHECKPOINT, pid)

    async def restore(self, pid: int, *, gpu_mapping: Mapping[str, str]) -> None:
        """checkpointed → locked."""
        self.mappings.append(dict(gpu_mapping))
        await self._act(Action.RESTORE, pid)

    async def unlock(self, pid: int) -> None:
        """locked → running."""
        await self._act(Action.UNLOCK, pid)

    async def aclose(self) -> None:
        """Nothing is kept."""
        self.closed = True

    # -- Machine -----------------------------------------------------------------------------------

    def node(self) -> CudaNode:
        """As given."""
        return self._node

    def holdings(self, pid: int) -> GpuUsage:
        """Devices vanish while the process is checkpointed."""
        process = self._living(pid)
        checkpointed = process.state is CudaState.CHECKPOINTED
        open_ones = process.clings_to if checkpointed else process.devices + process.clings_to
        mapped = () if checkpointed else process.mapped
        return GpuUsage(pid=pid, descriptors=tuple(enumerate(open_ones, start=3)), mapped=mapped)

    def victim(self, pid: int) -> ProcessHandle:
        """Pids are never reused here."""
        return ProcessHandle(pid=self._living(pid).pid, started_ticks=0)

    def kill(self, victim: ProcessHandle) -> None:
        """The process is gone."""
        process = self.processes[victim.pid]
        process.alive = False
        process.killed = True

    # -- inside ------------------------------------------------------------------------------------

    def calls(self, op: str) -> int:
        """How often `op` was asked."""
        return self._calls.get(op, 0)

    async def _act(self, action: Action, pid: int) -> None:
        process = await self._asked(action, pid)
        fault = self._fault(action)
        if fault is Fault.IGNORED:
            return
        wanted = TRANSITIONS.get((process.state, action)) if process.cuda else None
        if wanted is None:
            raise DriverFailed(action, pid, f"not in state {process.state}")
        if action is Action.CHECKPOINT and self.holdings(pid).managed_bytes:
            raise DriverFailed(
                action, pid, "CUDA checkpointing is not supported by the installed NVIDIA driver"
            )
        process.state = wanted
        process.history.append(action.value)

    async def _asked(self, op: str, pid: int) -> FakeProcess:
        self._calls[op] = self._calls.get(op, 0) + 1
        clock = asyncio.get_running_loop().time
        since = clock()
        try:
            return await self._answer(op, pid)
        finally:
            self.longest_s[op] = max(self.longest_s.get(op, 0.0), clock() - since)

    async def _answer(self, op: str, pid: int) -> FakeProcess:
        if op in self.latency_s:
            await asyncio.sleep(self.latency_s[op])
        fault = self._fault(op)
        process = self.processes.get(pid)
        if process is None or not process.alive:
            raise DriverFailed(op, pid, "no such process")
        if fault is Fault.DIE:
            process.alive = False
        elif fault is Fault.BROKEN:
            process.state = CudaState.FAILED
        elif fault is Fault.LATE and op in {a.value for a in Action}:
            process.state = TRANSITIONS.get((process.state, Action(op)), process.state)
        if fault in (Fault.HANG, Fault.LATE):
            await asyncio.get_running_loop().create_future()
        if fault in (Fault.FAIL, Fault.BROKEN, Fault.DIE):
            raise DriverFailed(op, pid, fault.value)
        return process

    def _fault(self, op: str) -> Fault | None:
        """Of the call that is going on."""
        plan = self.faults.get(op, ())
        number = self._calls[op] - 1
        return plan[number] if number < len(plan) else None

    def _living(self, pid: int) -> FakeProcess:
        process = self.processes.get(pid)
        if process is None or not process.alive:
            raise ProcessLookupError(f"no process {pid}")
        return process
