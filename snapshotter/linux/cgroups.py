"""Limits per slot and instance through cgroup v1 or v2, in groups below the group that the agent
was started in, and the devices that each may open (`device_control`).

All groups are children of one base with a normal CPU weight, so that a low priority inside it
(`cpu_priority`) does not starve them beside the machine's other processes.

Needs no daemon. If the hierarchy is not writable there are no limits, `why_not` has the reason, and
the shim falls back to RLIMIT_DATA. Sources: kernel documentation, admin-guide/cgroup-v1 and
cgroup-v2.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from snapshotter.linux import device_control
from snapshotter.linux.device_control import DeviceRule
from snapshotter.shim import cpu_priority

_CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")
_UNIFIED = ("memory", "pids", "cpu")
"""The same in v2, where `cpu` includes accounting."""
_DEVICES = "devices"
"""A controller of v1. In v2 it is a program, which needs no delegation, only a group."""
MAX_PIDS = 4096
"""Processes and threads of one instance: numeric libraries use some hundred; the limit stops fork
bombs. Fewer where the machine has few pids (`max_pids`)."""
_ALL_PIDS, _SLOTS_OF_PIDS, _FEWEST_PIDS = 0.75, 32, 512
"""Fraction of the machine's pids that all groups together get; in how many instances these are; and
the least of one."""
_TCP_PART, _LEAST_TCP_BYTES = 8, 32 * 1024**2
"""v1 does not count buffers of sockets as memory: they get a limit of their own, this part of the
memory limit, because the whole machine shares `net.ipv4.tcp_mem`."""
_PID_LIMITS = ("pid_max", "threads-max")
_REMOVE_S = 20.0
"""How long processes may take to end after SIGKILL: on a busy machine, seconds for some GiB."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The group of one slot or instance: a directory per hierarchy.

    Attributes:
        directories: controller → directory; under v2 all are the same. Empty without cgroups.
        version: 1 or 2.
        cpu: its share of a busy machine, in CPUs.
    """

    directories: Mapping[str, Path]
    version: int
    cpu: float = 1.0

    @property
    def name(self) -> str:
        """Name that it was created with; "" without cgroups."""
        return next((d.name for d in self._unique()), "")

    @property
    def has_cpu_group(self) -> bool:
        """Whether there is a cpu group."""
        return "cpu" in self.directories

    @property
    def procs(self) -> list[str]:
        """The `cgroup.procs` files, each once."""
        return [str(d / "cgroup.procs") for d in self._unique()]

    @property
    def tasks(self) -> list[str]:
        """The files to which a single-threaded process writes "0" to move itself; v1 only.

        This costs nothing. The alternative (`procs`, usable by any process) takes a lock that all
        forks of the machine share, and waits for an RCU grace period if it was idle: 10 to 25 ms
        (kernel, `cgroup_procs_write_start`).
        """
        return [str(d / "tasks") for d in self._unique()] if self.version == 1 else []

    def entry_files(self) -> dict[str, Any]:
        """Arguments of the shim's `child.Cgroup`."""
        return {"procs": self.procs, "tasks": self.tasks}

    def oom_kills(self) -> int:
        """Number of OOM kills in this group."""
        if (memory := self.directories.get("memory")) is None:
            return 0
        return _keyed(
            memory / ("memory.events" if self.version == 2 else "memory.oom_control"), "oom_kill"
        )

    def memory_bytes(self) -> int | None:
        """Memory charged now; None without a memory controller."""
        if (memory := self.directories.get("memory")) is None:
            return None
        return _number(
            memory / ("memory.current" if self.version == 2 else "memory.usage_in_bytes")
        )

    def cpu_ns(self) -> int | None:
        """CPU time used so far; None without a counter."""
        if self.version == 2 and (cpu := self.directories.get("cpu")) is not None:
            return _keyed(cpu / "cpu.stat", "usage_usec") * 1000
        if (accounting := self.directories.get("cpuacct")) is not None:
            return _number(accounting / "cpuacct.usage")
        return None

    @property
    def cpu_file(self) -> str:
        """File of its CPU time counter (`cpu_counter` reads it); "" without a counter."""
        if self.version == 2 and (cpu := self.directories.get("cpu")) is not None:
            return str(cpu / "cpu.stat")
        accounting = self.directories.get("cpuacct")
        return "" if accounting is None else str(accounting / "cpuacct.usage")

    def weigh(self, part: float) -> None:
        """Set the fraction `part` of its CPU share; 0: only idle time. No effect without a cpu
        group."""
        with contextlib.suppress(OSError):
            if self.has_cpu_group:
                cpu_priority.weigh(
                    self.directories["cpu"], version=self.version, cpu=self.cpu, part=part
                )

    def members(self) -> list[int]:
        """Pids of its processes, descendants in other sessions included."""
        return list(dict.fromkeys(pid for directory in self._unique() for pid in _pids(directory)))

    def kill(self) -> None:
        """SIGKILL all remaining processes, descendants in other sessions included."""
        for directory in self._unique():
            for pid in _pids(directory):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def remove(self) -> None:
        """Kill all remaining processes and remove the directories. The kernel needs a moment after
        the last exit."""
        until, pause_s = time.monotonic() + _REMOVE_S, 0.0
        while left := [d for d in self._unique() if not _remove(d)]:
            if time.monotonic() > until:
                _log.warning("cgroup.not_removed group=%s processes=%s", left[0], self.members())
                return
            self.kill()
            pause_s = min(0.1, pause_s + 0.002)
            await asyncio.sleep(pause_s)

    def to_json(self) -> dict[str, Any]:
        """As JSON values: sufficient for a restarted agent in any cgroup."""
        return {
            "version": self.version,
            "cpu": self.cpu,
            "directories": {c: str(d) for c, d in self.directories.items()},
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        directories = {c: Path(d) for c, d in body["directories"].items()}
        return cls(version=body["version"], directories=directories, cpu=body.get("cpu", 1.0))

    def _unique(self) -> list[Path]:
        return list(dict.fromkeys(self.directories.values()))


@dataclass(frozen=True, kw_only=True)
class Cgroups:
    """All groups of one node. Created by `find`.

    Attributes:
        bases: controller → the base's directory in its hierarchy.
        version: 1 or 2; 0 without cgroups.
        why_not: why memory cannot be limited, or None.
        why_no_devices: why access to devices cannot be controlled, or None.
        reader: gid of users who may read the counters of a group whose name they know; None = only
            root.
    """

    bases: Mapping[str, Path]
    version: int
    why_not: str | None = None
    why_no_devices: str | None = None
    reader: int | None = None

    @classmethod
    def find(
        cls, run: Path, *, reader: int | None = None, proc: Path = Path("/proc/self")
    ) -> Cgroups:
        """Detect the mounted hierarchies, create the base (named after `run`), and determine what
        works."""
        name = base_name(run)
        places = _places(proc)
        if not places:
            nothing = "no cgroup hierarchy is mounted"
            return cls(bases={}, version=0, why_not=nothing, why_no_devices=nothing)
        version = 2 if "unified" in places and "memory" not in places else 1
        parents = {c: own for c, (own, _) in places.items() if c in _CONTROLLERS}
        if version == 2:
            own, top = places["unified"]
            bases, problems = _bases(dict.fromkeys(_UNIFIED, own), name, version)
            if "memory" not in bases and top != own:
                # A group with processes, such as a session's or a service's, cannot delegate
                # controllers; the root of the hierarchy can.
                bases, at_top = _bases(dict.fromkeys(_UNIFIED, top), name, version)
                problems += at_top
        else:
            bases, problems = _bases(parents, name, version)
        why_not = None if "memory" in bases else "; ".join(problems) or "no memory controller"
        base, why_no_devices = _device_base(places, bases, name, version)
        return cls(
            bases=bases if base is None else {**bases, _DEVICES: base},
            version=version,
            why_not=why_not,
            why_no_devices=why_no_devices,
            reader=reader,
        )

    @property
    def limits_memory(self) -> bool:
        """Whether a memory limit is enforced."""
        return "memory" in self.bases

    @property
    def limits_pids(self) -> bool:
        """Whether the number of processes is limited."""
        return "pids" in self.bases

    @property
    def controls_devices(self) -> bool:
        """Whether groups may open their own devices only."""
        return _DEVICES in self.bases

    def make(
        self,
        name: str,
        *,
        memory_bytes: int,
        cpu: float,
        pids: int | None = None,
        devices: Iterable[DeviceRule] = (),
    ) -> Group:
        """Create a group with limits. `pids`: None: `max_pids`. `devices`: what it may open in
        addition to the standard devices; of a group that exists, the new ones replace the earlier
        ones. Raises OSError."""
        group = self.group(name, cpu=cpu)
        for directory in set(group.directories.values()):
            directory.mkdir(mode=0o700, exist_ok=True)
            if self.reader is not None:
                os.chown(directory, -1, self.reader)
                directory.chmod(0o710)
        limits = {
            "memory": "memory.max" if self.version == 2 else "memory.limit_in_bytes",
            "pids": "pids.max",
        }
        values = {"memory": memory_bytes, "pids": max_pids() if pids is None else pids}
        for controller, file in limits.items():
            if controller in group.directories:
                (group.directories[controller] / file).write_text(str(values[controller]))
        if self.version == 1 and (memory := group.directories.get("memory")) is not None:
            with contextlib.suppress(OSError):  # a kernel without it (CONFIG_MEMCG_V1)
                (memory / "memory.kmem.tcp.limit_in_bytes").write_text(
                    str(max(memory_bytes // _TCP_PART, _LEAST_TCP_BYTES))
                )
        if group.has_cpu_group:
            (group.directories["cpu"] / cpu_priority.FILE[self.version]).write_text(
                cpu_priority.weight(self.version, cpu)
            )
        if self.controls_devices:
            device_control.allow_only(
                group.directories[_DEVICES],
                [*device_control.STANDARD, *devices],
                version=self.version,
            )
        return group

    def group(self, name: str, *, cpu: float = 1.0) -> Group:
        """The group of that name, whether it exists or not."""
        directories = {c: base / name for c, base in self.bases.items()}
        return Group(directories=directories, version=self.version, cpu=cpu)

    def names(self) -> set[str]:
        """Names of the existing groups."""
        return {
            d.name
            for base in self.bases.values()
            if base.is_dir()
            for d in base.iterdir()
            if d.is_dir()
        }

    def remove_empty(self) -> None:
        """Remove the base, unless there are groups."""
        for base in dict.fromkeys(self.bases.values()):
            _remove(base)


def pids_of_all(proc: Path = Path("/proc")) -> int | None:
    """Pids that all groups together may use, so that the machine keeps some; None if unknown."""
    try:
        limits = [int((proc / "sys/kernel" / name).read_text()) for name in _PID_LIMITS]
    except (OSError, ValueError):
        return None
    return int(min(limits) * _ALL_PIDS)


def max_pids(proc: Path = Path("/proc")) -> int:
    """Processes and threads that one instance may have: MAX_PIDS, or fewer on a machine that would
    be full with a few instances (`kernel.pid_max` is 32,768 without systemd)."""
    everything = pids_of_all(proc)
    if everything is None:
        return MAX_PIDS
    return min(MAX_PIDS, max(everything // _SLOTS_OF_PIDS, _FEWEST_PIDS))


def base_name(run: Path) -> str:
    """Name of the base of the agent with this run directory."""
    return f"pilotlight-{hashlib.sha256(str(run).encode()).hexdigest()[:12]}"


def _bases(
    parents: Mapping[str, Path], name: str, version: int
) -> tuple[dict[str, Path], list[str]]:
    """Controller → the base of that name below the parent; and the problems of those without
    one."""
    bases, problems = {}, []
    for controller, parent in parents.items():
        try:
            if version == 2:
                _delegate(parent, controller)
            base = parent / name
            base.mkdir(exist_ok=True)
            base.chmod(0o711)  # other users must not list the names of instances
            if version == 2:
                _delegate(base, controller)
            if controller == "cpu":
                (base / cpu_priority.FILE[version]).write_text(
                    cpu_priority.weight(version, len(os.sched_getaffinity(0)))
                )
            if controller == "pids" and (most := pids_of_all()) is not None:
                (base / "pids.max").write_text(str(most))
            bases[controller] = base
        except OSError as e:
            problems.append(f"{controller}: {e.strerror} ({parent})")
    return bases, problems


def _device_base(
    places: Mapping[str, tuple[Path, Path]], bases: Mapping[str, Path], name: str, version: int
) -> tuple[Path | None, str | None]:
    """The base of groups with their own devices, created if it does not exist; or None and the
    reason. In v2 it is that of the other controllers, if there is one."""
    place = "unified" if version == 2 else _DEVICES
    if place not in places:
        return None, "no devices controller is mounted"
    base = next(iter(bases.values())) if version == 2 and bases else places[place][0] / name
    is_new = not base.is_dir()
    try:
        base.mkdir(exist_ok=True)
        base.chmod(0o711)
        device_control.probe(base, version=version)
    except OSError as e:
        if is_new:
            _remove(base)
        return None, f"devices: {e.strerror or e} ({base.parent})"
    return base, None


def _places(proc: Path) -> dict[str, tuple[Path, Path]]:
    """Controller (`unified` for v2) → our own group's directory and the hierarchy's root, from
    mountinfo and cgroup (proc(5))."""
    own = {}
    try:
        for line in (proc / "cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            own.update(dict.fromkeys((names or "unified").split(","), path))
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return {}
    places = {}
    for mount in mounts:
        left, _, right = mount.partition(" - ")
        root, point = left.split()[3:5]
        kind, _, options = right.split(" ", 2)
        for name in (
            ["unified"] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        ):
            if name in own:
                top = Path(point)
                places[name] = (
                    top / os.path.relpath(own[name], root) if own[name].startswith(root) else top,
                    top,
                )
    return places


def _delegate(directory: Path, controller: str) -> None:
    (directory / "cgroup.subtree_control").write_text(f"+{controller}")


def _remove(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _pids(directory: Path) -> list[int]:
    try:
        return [int(pid) for pid in (directory / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except OSError:
        return 0


def _keyed(file: Path, key: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)
