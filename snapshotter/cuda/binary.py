"""The driver over NVIDIA's `cuda-checkpoint` program: one process per call, which initialises the
CUDA driver each time (hence the slower option)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from snapshotter.cuda.errors import DriverFailed
from snapshotter.cuda.gpu_blockers import BINARY_RELEASE
from snapshotter.cuda.reaper import Reaper
from snapshotter.cuda.transitions import Action, CudaState

_OUTPUT_BYTES = 4096
"""Its output is a word, a number, or one error line."""


class BinaryDriver:
    """CudaDriver over the program at `path`. Owner: the agent's event loop; calls share no state,
    so there is no lock."""

    def __init__(
        self, path: Path, *, version: str = "", environ: Mapping[str, str] | None = None
    ) -> None:
        self._path = path
        self._version = version
        self._environ = dict(os.environ if environ is None else environ)
        self._reaper = Reaper()

    def __repr__(self) -> str:
        return f"<BinaryDriver {self._path}>"

    @property
    def name(self) -> str:
        """Program and version, such as `cuda-checkpoint 570.86.10`."""
        return f"cuda-checkpoint {self._version}".rstrip()

    @property
    def minimum_release(self) -> int:
        """The oldest supported release of the display driver."""
        return BINARY_RELEASE

    async def restore_thread(self, pid: int) -> int | None:
        """The restore thread's id; None if the program fails, as it does without CUDA."""
        status, out = await self._run("--get-restore-tid", "--pid", str(pid))
        return int(out) if status == 0 and out.isdigit() else None

    async def state(self, pid: int) -> CudaState:
        """The CUDA state of the process."""
        status, out = await self._run("--get-state", "--pid", str(pid))
        try:
            if status == 0:
                return CudaState(out)
        except ValueError as e:
            raise DriverFailed(
                "state", pid, f"{self._path.name} reports an unknown state {out!r}"
            ) from e
        raise DriverFailed("state", pid, _why(status, out))

    async def lock(self, pid: int, *, timeout_s: float) -> None:
        """Lock the process's CUDA calls."""
        # 0 would wait forever
        await self._act(Action.LOCK, pid, "--timeout", str(max(1, int(timeout_s * 1000))))

    async def checkpoint(self, pid: int) -> None:
        """Checkpoint the process's CUDA state."""
        await self._act(Action.CHECKPOINT, pid)

    async def restore(self, pid: int, *, gpu_mapping: Mapping[str, str]) -> None:
        """Restore the process's CUDA state."""
        pairs = ",".join(f"{old}={new}" for old, new in gpu_mapping.items())
        await self._act(Action.RESTORE, pid, *(("--device-map", pairs) if pairs else ()))

    async def unlock(self, pid: int) -> None:
        """Unlock the process's CUDA calls."""
        await self._act(Action.UNLOCK, pid)

    async def aclose(self) -> None:
        """Wait for killed processes."""
        await self._reaper.aclose()

    async def _act(self, action: Action, pid: int, *options: str) -> None:
        status, out = await self._run("--action", action.value, "--pid", str(pid), *options)
        if status != 0:
            raise DriverFailed(action, pid, _why(status, out))

    async def _run(self, *arguments: str) -> tuple[int, str]:
        try:
            child = await asyncio.create_subprocess_exec(
                self._path,
                *arguments,
                env=self._environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
        except OSError as e:
            return 127, f"{self._path} cannot be run: {e.strerror}"
        try:
            out, _ = await child.communicate()
        finally:
            if child.returncode is None:  # cancelled by a deadline
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                self._reaper.take(child)
        return child.returncode or 0, out[:_OUTPUT_BYTES].decode(errors="replace").strip()


def _why(status: int, out: str) -> str:
    return out or (
        f"killed by signal {-status}" if status < 0 else f"exit status {status} without output"
    )
