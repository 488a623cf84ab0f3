"""Limits of one image build: memory and processes by a dedicated cgroup, file size by an rlimit,
time, and free disk space that it must leave.

Without a memory controller, each process of the build is limited to the same number of bytes by
RLIMIT_DATA (setrlimit(2))."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from pilotlight.core.disk_floor import DiskFloor, no_floor
from snapshotter.linux.cgroups import Cgroups, Group

_GIB = 1024**3
NO_CGROUPS = Cgroups(bases={}, version=0, why_not="not requested")
_CPU = 0.5
"""CPU weight on a busy machine, in CPUs, relative to instances: builds may wait, calls may not."""


BUILD_TIMEOUT_S = 3600.0
"""Timeout of one build: compiling a large package on two cores takes half an hour."""


def _memory_bytes() -> int:
    return min(4 * _GIB, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildLimits:
    """The bounds of one build.

    Attributes:
        memory_bytes: all processes of the build together; by default 4 GiB, or half of a smaller
            machine.
        pids: concurrent processes and threads.
        file_bytes: one file; the largest packaged libraries have a few GiB.
        entries: files, directories and links of the image; an environment with torch and
            transformers has some 60,000.
        timeout_s: the whole build.
        floor: free disk space that builds must leave; by default none.
    """

    memory_bytes: int = field(default_factory=_memory_bytes)
    pids: int = 1024
    file_bytes: int = 16 * _GIB
    entries: int = 500_000
    timeout_s: float = BUILD_TIMEOUT_S
    floor: DiskFloor = field(default_factory=no_floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedGroup:
    """The limits in force for one build, and its cgroup."""

    bounds: BuildLimits = field(default_factory=BuildLimits)
    group: Group = field(default_factory=lambda: NO_CGROUPS.group("none"))

    def order(self) -> dict[str, Any]:
        """The limits for the child process (`sandbox_child.py`), which enters the group itself."""
        limits = {"RLIMIT_FSIZE": self.bounds.file_bytes}
        if "memory" not in self.group.directories:
            limits["RLIMIT_DATA"] = self.bounds.memory_bytes
        return {"procs": self.group.procs, "limits": limits}

    def complaint(self) -> str:
        """A suffix for a failure message if the build ran out of memory, otherwise ""."""
        if self.group.oom_kills() == 0:
            return ""
        return (
            f": ran out of memory (the limit of a build is "
            f"{self.bounds.memory_bytes // 1024**2} MiB)"
        )


@contextlib.asynccontextmanager
async def limited_group(
    name: str, *, bounds: BuildLimits, cgroups: Cgroups
) -> AsyncIterator[LimitedGroup]:
    """A cgroup for the duration of a block; processes left in it are killed. Raises OSError."""
    group = cgroups.make(name, memory_bytes=bounds.memory_bytes, cpu=_CPU, pids=bounds.pids)
    try:
        yield LimitedGroup(bounds=bounds, group=group)
    finally:
        await group.remove()
