"""Memory use of each GPU, and its processes: queried with nvidia-smi, process names from /proc.

A process that has exited may occupy memory for some seconds, while the driver destroys its context;
memory of containers is visible here although their processes are not ours."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from snapshotter.cuda.reaper import Reaper

_QUERY_TIMEOUT_S = 10.0
"""nvidia-smi wakes a sleeping driver, which takes seconds."""
FREE_SHARE = 0.05
"""Share of a GPU's memory that may be in use on a free GPU: by the driver itself and by persistence
mode (below 1 GiB of 80)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """One GPU. `holders`: processes with memory on it, such as `vllm (pid 4711): 61.2 GiB`."""

    uuid: str
    index: int
    name: str
    used_bytes: int
    total_bytes: int
    holders: tuple[str, ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether no process uses it."""
        return not self.holders and self.used_bytes <= self.total_bytes * FREE_SHARE

    def describe(self) -> str:
        """A description for messages."""
        who = ", ".join(self.holders) or "a process that this node's agent cannot see"
        return (
            f"GPU {self.index} ({self.uuid}) has {_gib(self.used_bytes)} of "
            f"{_gib(self.total_bytes)} in use by {who}"
        )


class GpuMemoryUnknown(Exception):
    """Raised when the query fails; the message says why."""


class MemoryReader(Protocol):
    """A source of the GPUs' memory use."""

    async def read(self) -> tuple[GpuMemory, ...]:
        """The current memory use of all GPUs of the node. Raises GpuMemoryUnknown."""


class NvidiaSmi:
    """MemoryReader over nvidia-smi. Owner: the event loop."""

    def __init__(self, environ: Mapping[str, str], *, proc: Path = Path("/proc")) -> None:
        self._path = shutil.which("nvidia-smi", path=environ.get("PATH"))
        self._proc = proc
        self._reaper = Reaper()

    def __repr__(self) -> str:
        return f"<NvidiaSmi {self._path or 'missing'}>"

    async def read(self) -> tuple[GpuMemory, ...]:
        """The current memory use of all GPUs of the node. Raises GpuMemoryUnknown."""
        gpus = await self._query("--query-gpu=uuid,index,name,memory.used,memory.total")
        apps = await self._query("--query-compute-apps=gpu_uuid,pid,used_memory")
        return parse(gpus, apps, names=self._name)

    async def aclose(self) -> None:
        """Wait for killed processes."""
        await self._reaper.aclose()

    async def _query(self, query: str) -> str:
        if self._path is None:
            raise GpuMemoryUnknown("nvidia-smi is not on the PATH")
        try:
            child = await asyncio.create_subprocess_exec(
                self._path,
                query,
                "--format=csv,noheader,nounits",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
        except OSError as e:
            raise GpuMemoryUnknown(f"nvidia-smi cannot be started: {e.strerror}") from e
        try:
            async with asyncio.timeout(_QUERY_TIMEOUT_S):
                out, _ = await child.communicate()
        except BaseException as e:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            self._reaper.take(child)
            if isinstance(e, TimeoutError):
                raise GpuMemoryUnknown(
                    f"nvidia-smi did not answer within {_QUERY_TIMEOUT_S:.0f} s"
                ) from e
            raise
        if child.returncode:
            raise GpuMemoryUnknown(
                f"nvidia-smi exited with status {child.returncode}: "
                f"{out.decode(errors='replace').strip()[-200:]}"
            )
        return out.decode(errors="replace")

    def _name(self, pid: int) -> str:
        try:
            return (self._proc / str(pid) / "comm").read_text().strip()
        except OSError:  # in another PID namespace, or exited
            return "a process"


class Names(Protocol):
    """Returns the name of a process."""

    def __call__(self, pid: int, /) -> str: ...


def parse(gpus: str, apps: str, *, names: Names) -> tuple[GpuMemory, ...]:
    """Parse the tool's two tables. Other lines (such as an error message for a lost GPU) are
    skipped."""
    holders: dict[str, list[str]] = {}
    for uuid, pid, used in _rows(apps, 3):
        if pid.isdigit():
            held = f": {_gib(int(used) * 1024**2)}" if used.isdigit() else ""
            holders.setdefault(uuid, []).append(f"{names(int(pid))} (pid {pid}){held}")
    return tuple(
        GpuMemory(
            uuid=uuid,
            index=int(index),
            name=name,
            used_bytes=int(used) * 1024**2,
            total_bytes=int(total) * 1024**2,
            holders=tuple(holders.get(uuid, ())),
        )
        for uuid, index, name, used, total in _rows(gpus, 5)
        if index.isdigit() and used.isdigit() and total.isdigit()
    )


def _rows(table: str, cells: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines()]
    return [row for row in rows if len(row) == cells]


def _gib(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB"
