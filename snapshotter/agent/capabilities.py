"""What this machine can do, proven where a proof is cheap, with the reason and the way out where it
cannot.

Kernel features are tried in a child each (`snapshotter/linux/kernel_probes.py`), so that a refusal,
or a kernel that kills, hurts nobody."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotter.criu.self_test import self_test
from snapshotter.engines import Engines
from snapshotter.images import base_rootfs
from snapshotter.images.interpreters import installed_interpreters
from snapshotter.linux import slot_network
from snapshotter.linux.cgroups import Cgroups
from snapshotter.linux.slot_network import Network

_PROBE = Path(__file__).parents[1] / "linux" / "kernel_probes.py"
_ANSWER_TIMEOUT_S = 10.0
"""nvidia-smi wakes a sleeping driver, which takes seconds; everything else answers in 0.1 s."""
_PROBE_LIMIT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One feature: whether it is `on`, and `why` (when off: the reason and what to do; when on: a
    remark, or "")."""

    name: str
    on: bool
    why: str

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"name": self.name, "on": self.on, "why": self.why}


async def probe(
    *,
    home: Path,
    environ: Mapping[str, str],
    cgroups: Cgroups,
    uid_base: int = 20000,
    engines: Engines | None = None,
    function_network: Network = Network.OWN,
) -> Mapping[str, Any]:
    """`{"features": [{"name", "on", "why"}], "node": {…}}`; takes some 0.2 s, the first time after
    a boot 0.4 s.

    `home` is the directory whose disk is looked at, `cgroups` where instances get their limits,
    `uid_base` the first uid of a tenant, `engines` the environments with inference servers (None:
    those of the home), `function_network` the network that functions are to have."""
    kernel = asyncio.gather(*(_in_child(label, name, str(uid_base)) for label, name in _KERNEL))
    results, restore, networks, gpus, interpreters = await asyncio.gather(
        kernel,
        _restore(environ, criu_cache(home)),
        _networks(function_network),
        _gpus(environ),
        installed_interpreters(environ),
    )
    features = [
        _root(),
        *results,
        isolation(results, function_network),
        await _cgroup_memory(cgroups),
        _cpu_accounting(cgroups),
        restore,
        networks,
        _gpu_feature(gpus),
        _apt(home),
    ]
    node = {
        **_machine(),
        "gpus": gpus,
        "interpreters": [{"version": i.version, "prefix": str(i.prefix)} for i in interpreters],
        "engines": (engines or Engines(home)).describe(),
        "disk_free_bytes": shutil.disk_usage(_existing(home)).free,
    }
    return {"features": [f.to_json() for f in features], "node": node}


_KERNEL = (
    ("namespaces", "namespaces"),
    ("uid separation", "uids"),
    ("seccomp", "seccomp"),
    ("fork server", "fork_server"),
    ("userfaultfd", "userfaultfd"),
)


def criu_cache(home: Path) -> Path:
    """Where the answer of CRIU's self test is kept, for whoever needs it as well."""
    return home / "node" / "criu"


def _root() -> Feature:
    on = os.geteuid() == 0
    why = (
        ""
        if on
        else f"the agent runs as uid {os.geteuid()}: workers share its uid and see its files. Run "
        f"it as root to separate tenants"
    )
    return Feature(name="root", on=on, why=why)


async def _in_child(label: str, name: str, argument: str) -> Feature:
    status, out = await _answer(sys.executable, "-I", "-S", "-B", str(_PROBE), name, argument)
    try:
        body = json.loads(out)
    except ValueError:
        return Feature(
            name=label,
            on=False,
            why=f"the probe ended with status {status}: {out.strip()[-200:] or 'no output'}",
        )
    return Feature(name=label, on=body["on"], why=body["why"])


async def _cgroup_memory(cgroups: Cgroups) -> Feature:
    """Make a group with a memory limit where instances get theirs, and remove it."""
    if not cgroups.limits_memory:
        why = (
            f"{cgroups.why_not}; run as root, or delegate a cgroup to the agent. Limits fall "
            f"back to RLIMIT_DATA"
        )
        return Feature(name="cgroup memory", on=False, why=why)
    group = cgroups.group(f"probe-{os.getpid()}")
    try:
        cgroups.make(f"probe-{os.getpid()}", memory_bytes=_PROBE_LIMIT_BYTES, cpu=1.0)
    except OSError as e:
        return Feature(
            name="cgroup memory",
            on=False,
            why=f"cgroup v{cgroups.version}: {e}. Limits fall back to RLIMIT_DATA",
        )
    finally:
        await group.remove()
    return Feature(name="cgroup memory", on=True, why=f"cgroup v{cgroups.version}")


def _cpu_accounting(cgroups: Cgroups) -> Feature:
    """Whether the kernel counts the CPU time of instances and builds."""
    if cgroups.group("probe").cpu_file:
        return Feature(name="CPU accounting", on=True, why=f"cgroup v{cgroups.version}")
    why = (
        f"{cgroups.why_not or 'no cpuacct controller'}: CPU outside calls is read from an "
        f"instance's worker alone: commands beside it, "
        "failed starts, and processes that it did not reap are not billed, nor are builds. Run as "
        "root, or delegate a cgroup to the agent"
    )
    return Feature(name="CPU accounting", on=False, why=why)


async def _restore(environ: Mapping[str, str], cache: Path) -> Feature:
    """Snapshots on disk: a live dump and restore, or the remembered answer of one."""
    found = await self_test(cache=cache, environ=environ)
    return Feature(name="RESTORE", on=found.on, why=found.why)


async def _networks(wanted: Network) -> Feature:
    """A network for each function; servers that listen on TCP and are restored need one whatever
    others have."""
    on, why = await slot_network.probe()
    if not on and wanted is Network.OWN and os.geteuid() == 0:
        why = f"functions have no network at all: {why}"
    return Feature(name="function networks", on=on, why=why)


_SHARED = {
    "namespaces": "the machine's files, processes and network",
    "uid separation": "one user",
    "seccomp": "every system call of the kernel",
}
"""What functions have in common where a mechanism is missing."""


def isolation(features: Sequence[Feature], wanted: Network) -> Feature:
    """What keeps one function from another and from the machine, in one line: which mechanisms are
    missing, and what that means."""
    missing = [feature.name for feature in features if not feature.on and feature.name in _SHARED]
    shared = [_SHARED[name] for name in missing]
    if wanted is Network.HOST and "namespaces" not in missing:
        shared.append("the machine's network (snapshotter.function_network: host)")
    if not shared:
        return Feature(
            name="isolation",
            on=True,
            why="a root directory, a network, a user and a filter of system calls for each "
            "function",
        )
    way_out = " Fit for one tenant (platform.trust: shared)." if missing else ""
    return Feature(name="isolation", on=False, why=f"functions share {', '.join(shared)}.{way_out}")


async def _gpus(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    path = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if path is None:
        return []
    status, out = await _answer(
        path, "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader,nounits"
    )
    rows = (
        [[cell.strip() for cell in line.split(",")] for line in out.splitlines()]
        if status == 0
        else []
    )
    return [
        {
            "index": int(row[0]),
            "name": row[1],
            "memory_bytes": int(row[2]) * 1024**2,
            "driver": row[3],
        }
        for row in rows
        if len(row) == 4 and row[0].isdigit() and row[2].isdigit()
    ]


def _gpu_feature(gpus: list[dict[str, Any]]) -> Feature:
    why = (
        ", ".join(g["name"] for g in gpus)
        or "nvidia-smi names no GPU: functions that ask for one are refused on this node"
    )
    return Feature(name="GPU", on=bool(gpus), why=why)


def _apt(home: Path) -> Feature:
    why = base_rootfs.why_not(home / "node" / "rootfs")
    return Feature(
        name="apt packages",
        on=why is None,
        why=why or "each image that installs some has a root file system of its own",
    )


def _machine() -> dict[str, Any]:
    name = os.uname()
    memory = {
        k: int(v.split()[0]) * 1024
        for k, _, v in (
            line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines()
        )
    }
    return {
        "host": name.nodename,
        "kernel": name.release,
        "machine": name.machine,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory.get("MemTotal"),
        "memory_available_bytes": memory.get("MemAvailable"),
    }


async def _answer(*argv: str) -> tuple[int | None, str]:
    """Exit status (None when it did not start or did not end in time) and output of a short
    command."""
    try:
        child = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as e:
        return None, str(e.strerror)
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            out, _ = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        return None, f"no answer in {_ANSWER_TIMEOUT_S:g} s"
    return child.returncode, out.decode(errors="replace")


def _existing(path: Path) -> Path:
    """The nearest directory that exists at or above `path`."""
    return next(p for p in [path, *path.parents] if p.exists())
