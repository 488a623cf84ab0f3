"""The driver over `cuda.core.checkpoint` (cuda-python), in a persistent helper process that
initialises the CUDA driver once.

The agent never loads CUDA: libcuda starts threads, and a call into it can hang forever. A helper
that exceeds a deadline is killed, and the next call starts another."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snapshotter.cuda.errors import DriverFailed
from snapshotter.cuda.gpu_blockers import API_RELEASE
from snapshotter.cuda.reaper import Reaper
from snapshotter.cuda.transitions import CudaState

# -P: the script's own directory (snapshotter/cuda) must not shadow modules that the package `cuda`
# imports.
HELPER_COMMAND = (sys.executable, "-P", "-B", str(Path(__file__).with_name("helper.py")))
_STDERR_BYTES = 4096
_LAST_BREATH_S = 0.5
"""Time for a helper that stopped answering to exit by itself, before it is killed."""


class CoreDriver:
    """CudaDriver over the helper. Owner: the agent's event loop; `_turn` serializes requests, as
    the pipe requires."""

    def __init__(
        self, *, command: Sequence[str] = HELPER_COMMAND, environ: Mapping[str, str] | None = None
    ) -> None:
        self._command = tuple(command)
        self._environ = dict(os.environ if environ is None else environ)
        self._turn = asyncio.Lock()
        self._reaper = Reaper()
        self._ids = itertools.count(1)
        self._helper: Process | None = None
        # a pipe without a reader would block the helper; this file is unnamed, and aclose() closes
        # it
        self._errors = tempfile.TemporaryFile(prefix="pl-cuda-")  # noqa: SIM115 - lives as long as we do
        self._version = ""
        self.starts = 0

    def __repr__(self) -> str:
        return (
            f"<CoreDriver {'pid ' + str(self._helper.pid) if self._helper else 'idle'}, "
            f"{self.starts} starts>"
        )

    @property
    def name(self) -> str:
        """Library and version, such as `cuda.core 1.0.0`."""
        return f"cuda.core {self._version}".rstrip()

    @property
    def minimum_release(self) -> int:
        """The oldest supported release of the display driver."""
        return API_RELEASE

    async def start(self) -> None:
        """Start the helper and initialise the driver. Raises DriverFailed with the reason (no
        cuda-python, no device, too old)."""
        async with self._turn:
            await self._up()

    async def restore_thread(self, pid: int) -> int | None:
        """The restore thread's id; None if the driver reports an error, as it does without
        CUDA."""
        try:
            return int(await self._request("restore_thread", pid))
        except HelperRefused:
            return None

    async def state(self, pid: int) -> CudaState:
        """The CUDA state of the process."""
        said = await self._request("state", pid)
        try:
            return CudaState(said)
        except ValueError as e:
            raise DriverFailed("state", pid, f"cuda.core reports an unknown state {said!r}") from e

    async def lock(self, pid: int, *, timeout_s: float) -> None:
        """Lock the process's CUDA calls."""
        # 0 would wait forever
        await self._request("lock", pid, timeout_ms=max(1, int(timeout_s * 1000)))

    async def checkpoint(self, pid: int) -> None:
        """Checkpoint the process's CUDA state."""
        await self._request("checkpoint", pid)

    async def restore(self, pid: int, *, gpu_mapping: Mapping[str, str]) -> None:
        """Restore the process's CUDA state; cuda.core expects UUIDs without `GPU-`."""
        bare = {
            old.removeprefix("GPU-"): new.removeprefix("GPU-") for old, new in gpu_mapping.items()
        }
        await self._request("restore", pid, gpu_mapping=bare)

    async def unlock(self, pid: int) -> None:
        """Unlock the process's CUDA calls."""
        await self._request("unlock", pid)

    async def aclose(self) -> None:
        """Stop the helper."""
        self._drop()
        await self._reaper.aclose()
        self._errors.close()

    async def _request(self, op: str, pid: int, **more: Any) -> Any:
        async with self._turn:
            helper = await self._up()
            number = next(self._ids)
            try:
                answer = await _exchange(helper, {"id": number, "op": op, "pid": pid, **more})
            except (OSError, ValueError) as e:
                raise DriverFailed(op, pid, await self._obituary(helper)) from e
            except asyncio.CancelledError:
                # it is still busy, and its late answer would be mistaken for the next one
                self._drop()
                raise
        if not answer["ok"]:
            raise HelperRefused(op, pid, answer["error"])
        return answer["value"]

    async def _up(self) -> Process:
        if self._helper is not None and self._helper.returncode is None:
            return self._helper
        self.starts += 1
        pipe = asyncio.subprocess.PIPE
        try:
            helper = await asyncio.create_subprocess_exec(
                *self._command, env=self._environ, stdin=pipe, stdout=pipe, stderr=self._errors
            )
        except OSError as e:
            raise DriverFailed("start", 0, f"the helper cannot be run: {e.strerror}") from e
        self._helper = helper
        try:
            hello = await _exchange(helper, None)
        except (OSError, ValueError) as e:
            raise DriverFailed("start", 0, await self._obituary(helper)) from e
        except asyncio.CancelledError:
            self._drop()
            raise
        if not hello["ready"]:
            self._drop()
            raise DriverFailed("start", 0, hello["why"])
        self._version = hello["version"]
        return helper

    async def _obituary(self, helper: Process) -> str:
        """Why a helper that is dead, or about to die, did not answer."""
        self._helper = None
        try:
            # wait first: `kill` would reap it, and asyncio would never learn its status
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_BREATH_S):
                    await helper.wait()
            if helper.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    helper.kill()
            await helper.communicate()
        finally:
            if helper.returncode is None:
                self._reaper.take(helper)
        written = os.fstat(self._errors.fileno()).st_size
        tail = os.pread(self._errors.fileno(), _STDERR_BYTES, max(0, written - _STDERR_BYTES))
        last = tail.decode(errors="replace").strip().rpartition("\n")[2]
        return f"the CUDA helper died (status {helper.returncode}){': ' + last if last else ''}"

    def _drop(self) -> None:
        helper, self._helper = self._helper, None
        if helper is None:
            return
        with contextlib.suppress(ProcessLookupError):
            helper.kill()
        self._reaper.take(helper)


class HelperRefused(DriverFailed):
    """Raised when the driver itself reports an error; the helper still runs."""


async def _exchange(helper: Process, order: Mapping[str, Any] | None) -> dict[str, Any]:
    """Send `order` (None: only receive), and read one answer. Raises OSError or ValueError if the
    helper has exited."""
    if helper.stdin is None or helper.stdout is None:
        raise OSError("the helper has no pipes")
    if order is not None:
        helper.stdin.write(json.dumps(order).encode() + b"\n")
        await helper.stdin.drain()
    line = await helper.stdout.readline()
    answer: dict[str, Any] = json.loads(line)
    if order is not None and answer["id"] != order["id"]:
        raise ValueError(f"the answer is for {answer['id']}, not {order['id']}")
    return answer
