"""The sequence lock → checkpoint → (dump), and (restore) → restore → unlock, for a process tree,
with the rollbacks of `transitions`.

Invariants, for any failure or cancellation: a modified tree ends suspended (and is returned),
running, or killed with a reported reason; no call exceeds its deadline; a suspension is rolled back
at most once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

from snapshotter.cuda.devices import Suspension
from snapshotter.cuda.driver import CudaDriver, Deadlines
from snapshotter.cuda.errors import CudaFailed, CudaLost, CudaRefused, DriverFailed, Refusal
from snapshotter.cuda.gpu_blockers import (
    gpus_in_use,
    left_over,
    managed_memory,
    not_granted,
    refusals,
    unlisted,
    without_context,
)
from snapshotter.cuda.gpu_mapping import DeviceRecord, gpu_mapping, record_of
from snapshotter.cuda.host import Machine, ProcessHandle
from snapshotter.cuda.transitions import CudaState, Step, rollback_path

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_LOCK_SHARE = 0.8
"""Share of a lock's deadline passed to the driver as its own timeout, so that the driver times out
cleanly before the call is abandoned."""


class _Stumble(Exception):
    """Raised within this module when a step failed; converted to CudaFailed or CudaLost when the
    outcome of the rollback is known."""

    def __init__(self, step: Step, pid: int, message: str) -> None:
        super().__init__(message)
        self.step = step
        self.pid = pid


class CudaDevices:
    """Devices over a CudaDriver. Stateless; a Suspension contains what a rollback needs."""

    def __init__(
        self, driver: CudaDriver, machine: Machine, *, deadlines: Deadlines | None = None
    ) -> None:
        self._driver = driver
        self._machine = machine
        self._deadlines = deadlines or Deadlines()

    def __repr__(self) -> str:
        return f"<CudaDevices through {self._driver.name}>"

    async def before_dump(self, pids: Sequence[int], *, granted: Sequence[str] = ()) -> Suspension:
        """Move the tree off its GPUs; rolls back if cancelled. A tree without a device gives an
        empty suspension (`record.processes == 0`)."""
        watch = _Watch()
        suspension = await self._examined(pids, granted)
        try:
            for pid in suspension.cuda_pids:
                await self._lock(pid)
            suspension.phases_ms["cuda_lock"] = watch.lap_ms()
            for pid in suspension.cuda_pids:
                await self._bounded(
                    Step.CHECKPOINT, pid, self._driver.checkpoint(pid), self._deadlines.checkpoint_s
                )
            for pid in suspension.cuda_pids:
                await self._require(Step.CHECKPOINT, pid, CudaState.CHECKPOINTED)
            self._require_released(suspension)
            suspension.phases_ms["cuda_checkpoint"] = watch.lap_ms()
        except _Stumble as e:
            edges = await self._lead_back(suspension, e)
            if managed := self._managed(suspension, e):
                raise CudaRefused(managed) from e
            raise _failed(e, edges) from e
        except CudaRefused:
            await self._lead_back(
                suspension, _Stumble(Step.RELEASE, suspension.first_pid, "a device is still held")
            )
            raise
        except BaseException as e:
            # mainly CancelledError; the process must not stay locked in any case
            await self._lead_back(
                suspension,
                _Stumble(Step.CHECKPOINT, suspension.first_pid, f"cancelled ({type(e).__name__})"),
            )
            raise
        return suspension

    async def rollback(self, suspension: Suspension, reason: str) -> None:
        """Roll back after a failed dump, once. Raises CudaLost if that fails."""
        await self._lead_back(suspension, _Stumble(Step.DUMP, suspension.first_pid, reason))

    def check_restore(self, record: DeviceRecord, *, target: Sequence[str] = ()) -> None:
        """Raises CudaRefused if this node cannot restore `record`."""
        if record.processes:
            gpu_mapping(record, self._machine.node(), target=target)

    async def after_restore(
        self, pids: Sequence[int], record: DeviceRecord, *, target: Sequence[str] = ()
    ) -> Mapping[str, float]:
        """Move the tree back to a GPU. A snapshot without GPU state is left alone. Raises
        CudaLost."""
        if not record.processes:
            return {}
        victims, gone = self._victims(pids)
        try:
            if gone:
                raise _Stumble(
                    Step.RESTORE,
                    gone[0],
                    f"process {gone[0]} is gone before its GPU state was restored",
                )
            return await self._resume(pids, record, target)
        except CudaRefused as e:
            self._kill(victims, str(e))
            raise _lost(_Stumble(Step.RESTORE, 0, str(e)), {}) from e
        except _Stumble as e:
            self._kill(victims, str(e))
            raise _lost(e, {e.pid: "kill"}) from e
        except BaseException as e:
            # mainly CancelledError; a partially restored device is useless in any case
            self._kill(victims, f"the restore was cancelled ({type(e).__name__})")
            raise

    # -- suspend -----------------------------------------------------------------------------------

    async def _examined(self, pids: Sequence[int], granted: Sequence[str]) -> Suspension:
        """Examine the processes without modifying them: identity, obstacles, use of CUDA."""
        victims, gone = self._victims(pids)
        try:
            held = [h for h in (self._machine.holdings(pid) for pid in pids) if h.devices]
        except OSError as e:
            raise _failed(
                _Stumble(Step.LOCK, 0, f"a process ended before the checkpoint: {e}"), {}
            ) from e
        if gone:
            raise _failed(
                _Stumble(Step.LOCK, gone[0], f"process {gone[0]} ended before the checkpoint"), {}
            )
        if not held:
            return Suspension(victims=victims)
        node = self._machine.node()
        if found := refusals(node=node, held=held, minimum_release=self._driver.minimum_release):
            raise CudaRefused(found)
        try:
            contexts = [h for h in held if await self._has_cuda(Step.LOCK, h.pid)]
        except _Stumble as e:
            raise _failed(e, {}) from e
        if bare := [without_context(h.pid, h.devices) for h in held if h not in contexts]:
            raise CudaRefused(bare)
        used = [gpu.uuid for gpu in gpus_in_use(node, held)]
        if not used:
            raise CudaRefused([unlisted(held)])
        if granted and (others := [uuid for uuid in used if uuid not in granted]):
            raise CudaRefused([not_granted(others)])
        record = record_of(node, used, len(contexts), granted=granted)
        return Suspension(victims=victims, cuda_pids=[h.pid for h in contexts], record=record)

    def _managed(self, suspension: Suspension, stumble: _Stumble) -> list[Refusal]:
        """The reason for a failed checkpoint if managed memory is visible: the driver only reports
        that it failed."""
        if stumble.step is not Step.CHECKPOINT or not isinstance(stumble.__cause__, DriverFailed):
            return []
        try:
            held = [self._machine.holdings(pid) for pid in suspension.cuda_pids]
        except OSError:
            return []
        return [managed_memory(h) for h in held if h.managed_bytes]

    async def _lock(self, pid: int) -> None:
        limit = self._deadlines.lock_s
        await self._bounded(
            Step.LOCK, pid, self._driver.lock(pid, timeout_s=limit * _LOCK_SHARE), limit
        )

    def _require_released(self, suspension: Suspension) -> None:
        """Verify that no process of the tree still has a device open: CRIU would fail, or make a
        snapshot without its GPU."""
        try:
            held = [self._machine.holdings(victim.pid) for victim in suspension.victims]
        except OSError as e:
            raise _Stumble(Step.RELEASE, suspension.first_pid, f"a process ended: {e}") from e
        if left := [left_over(h.pid, h.leftovers) for h in held if h.leftovers]:
            raise CudaRefused(left)

    # -- roll back ---------------------------------------------------------------------------------

    async def _lead_back(self, suspension: Suspension, stumble: _Stumble) -> dict[int, str]:
        """Roll back each process; returns the names of the rollbacks. Raises CudaLost if one is
        impossible, after killing the tree."""
        if not suspension.end():
            return {}
        edges: dict[int, str] = {}
        try:
            for pid in suspension.cuda_pids:
                await self._run_edge(pid, stumble.step, edges)
        except _Stumble as second:
            reason = f"{stumble}; then: {second}"
            self._kill(suspension.victims, reason)
            raise _lost(_Stumble(stumble.step, second.pid, reason), edges) from second
        except BaseException as e:  # such as a second CancelledError
            self._kill(
                suspension.victims,
                f"{stumble}; then the rollback was cancelled ({type(e).__name__})",
            )
            raise
        _log.warning("cuda_rolled_back step=%s pid=%d edges=%s", stumble.step, stumble.pid, edges)
        return edges

    async def _run_edge(self, pid: int, step: Step, edges: dict[int, str]) -> None:
        state: CudaState | None = None
        silence = ""
        try:
            state = await self._state(step, pid)
        except _Stumble as e:
            silence = f" ({e})"
        edge = rollback_path(step, state)
        edges[pid] = edge.name
        if edge.kill:
            raise _Stumble(
                step,
                pid,
                f"process {pid} is {state or 'in an unknown state'}{silence} and cannot be "
                f"rolled back",
            )
        for action in edge.actions:
            await self._act_back(Step(action), pid)
        if edge.actions:
            await self._require(Step.UNLOCK, pid, CudaState.RUNNING)

    async def _act_back(self, step: Step, pid: int) -> None:
        if step is Step.RESTORE:
            await self._bounded(
                step, pid, self._driver.restore(pid, gpu_mapping={}), self._deadlines.restore_s
            )
        else:
            await self._bounded(step, pid, self._driver.unlock(pid), self._deadlines.unlock_s)

    async def _resume(
        self, pids: Sequence[int], record: DeviceRecord, target: Sequence[str]
    ) -> dict[str, float]:
        watch = _Watch()
        mapping = gpu_mapping(record, self._machine.node(), target=target)
        found = [pid for pid in pids if await self._has_cuda(Step.RESTORE, pid)]
        if len(found) != record.processes:
            raise _Stumble(
                Step.RESTORE,
                0,
                f"{len(found)} restored processes have GPU state, but the snapshot has "
                f"{record.processes}",
            )
        for pid in found:
            await self._require(Step.RESTORE, pid, CudaState.CHECKPOINTED)
        for pid in found:
            await self._bounded(
                Step.RESTORE,
                pid,
                self._driver.restore(pid, gpu_mapping=mapping),
                self._deadlines.restore_s,
            )
        restore_ms = watch.lap_ms()
        for pid in found:
            await self._bounded(
                Step.UNLOCK, pid, self._driver.unlock(pid), self._deadlines.unlock_s
            )
        for pid in found:
            await self._require(Step.UNLOCK, pid, CudaState.RUNNING)
        return {"cuda_restore": restore_ms, "cuda_unlock": watch.lap_ms()}

    # -- shared ------------------------------------------------------------------------------------

    async def _has_cuda(self, step: Step, pid: int) -> bool:
        return (
            await self._bounded(
                step, pid, self._driver.restore_thread(pid), self._deadlines.ask_s, "restore thread"
            )
            is not None
        )

    async def _state(self, step: Step, pid: int) -> CudaState:
        return await self._bounded(
            step, pid, self._driver.state(pid), self._deadlines.ask_s, "state"
        )

    async def _require(self, step: Step, pid: int, wanted: CudaState) -> None:
        state = await self._state(step, pid)
        if state is not wanted:
            raise _Stumble(
                step, pid, f"process {pid} is {state} after {step}, but should be {wanted}"
            )

    async def _bounded(
        self, step: Step, pid: int, call: Awaitable[_T], limit_s: float, asked: str | None = None
    ) -> _T:
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except TimeoutError as e:
            raise _Stumble(
                step, pid, f"CUDA {asked or step} of process {pid} did not end within {limit_s:g} s"
            ) from e
        except DriverFailed as e:
            raise _Stumble(step, pid, str(e)) from e

    def _victims(self, pids: Sequence[int]) -> tuple[list[ProcessHandle], list[int]]:
        """Handles of the processes, and pids of those that have exited."""
        victims, gone = [], []
        for pid in pids:
            try:
                victims.append(self._machine.victim(pid))
            except OSError:
                gone.append(pid)
        return victims, gone

    def _kill(self, victims: Sequence[ProcessHandle], reason: str) -> None:
        _log.error("cuda_killed pids=%s reason=%s", [v.pid for v in victims], reason)
        for victim in victims:
            self._machine.kill(victim)


class _Watch:
    """A lap timer in milliseconds, on the event loop's clock."""

    def __init__(self) -> None:
        self._at = asyncio.get_running_loop().time()

    def lap_ms(self) -> float:
        since, self._at = self._at, asyncio.get_running_loop().time()
        return (self._at - since) * 1000


def _detail(stumble: _Stumble, edges: Mapping[int, str]) -> dict[str, object]:
    return {
        "step": stumble.step.value,
        "pid": stumble.pid,
        "edges": {str(pid): name for pid, name in edges.items()},
    }


def _failed(stumble: _Stumble, edges: Mapping[int, str]) -> CudaFailed:
    way = f" (rolled back by: {', '.join(sorted(set(edges.values())))})" if edges else ""
    return CudaFailed(
        f"{stumble.step} failed, and the process continues{way}: {stumble}",
        _detail(stumble, edges),
    )


def _lost(stumble: _Stumble, edges: Mapping[int, str]) -> CudaLost:
    return CudaLost(
        f"{stumble.step} failed, and the process was killed: {stumble}", _detail(stumble, edges)
    )
