"""Capabilities of this machine, tested where a test is cheap, each with the reason and the remedy
if it is missing.

Kernel features are tested in processes of their own (`snapshotter/linux/kernel_probes.py`), so that
an error, or a kernel that kills the process, does no harm.
"""

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

from pilotlight.core.json_record import JsonRecord
from snapshotter.criu.self_test import self_test
from snapshotter.engines import Engines
from snapshotter.images import base_rootfs
from snapshotter.images.interpreters import installed_interpreters
from snapshotter.linux import slot_network
from snapshotter.linux.cgroups import Cgroups
from snapshotter.linux.short_commands import run_command
from snapshotter.linux.slot_network import Network

_PROBE = Path(__file__).parents[1] / "linux" / "kernel_probes.py"
_ANSWER_TIMEOUT_S = 10.0
"""nvidia-smi initializes an idle driver, which takes seconds; everything else answers in 0.1 s."""
_PROBE_LIMIT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature(JsonRecord):
    """One feature: whether it is `on`, and `why` (if off: the reason and the remedy; if on: a
    remark, or "")."""

    name: str
    on: bool
    why: str


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

    `home`: directory whose disk is measured. `cgroups`: parent of the instances' groups.
    `uid_base`: first uid of tenants. `engines`: environments with inference servers (None: those of
    the home). `function_network`: configured network of functions.
    """
    results, restore, networks, gpus, interpreters = await asyncio.gather(
        _kernel(uid_base),
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
        _device_control(cgroups),
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
        "disk_free_bytes": shutil.disk_usage(_nearest_existing(home)).free,
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
    """Directory of CRIU's cached self-test result, shared by all components."""
    return home / "node" / "criu"


def _root() -> Feature:
    on = os.geteuid() == 0
    why = (
        ""
        if on
        else f"the agent runs as uid {os.geteuid()}: workers share its uid and can read its "
        f"files. Run it as root to separate tenants"
    )
    return Feature(name="root", on=on, why=why)


async def _kernel(uid_base: int) -> list[Feature]:
    status, out = await _run(sys.executable, "-I", "-S", "-B", str(_PROBE), str(uid_base))
    try:
        body = json.loads(out)
    except ValueError:
        why = f"the probe ended with status {status}: {out.strip()[-200:] or 'no output'}"
        return [Feature(name=label, on=False, why=why) for label, _ in _KERNEL]
    return [
        Feature(name=label, on=body[name]["on"], why=body[name]["why"]) for label, name in _KERNEL
    ]


async def _cgroup_memory(cgroups: Cgroups) -> Feature:
    """Test a group with a memory limit below the parent of instances' groups, and remove it."""
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


def _device_control(cgroups: Cgroups) -> Feature:
    """Whether the kernel refuses devices that a function was not granted (`device_control`), or
    only their nodes are not shown to it."""
    if cgroups.controls_devices:
        how = "the devices controller" if cgroups.version == 1 else "BPF programs"
        return Feature(name="device control", on=True, why=f"cgroup v{cgroups.version}, {how}")
    why = (
        f"{cgroups.why_no_devices or 'no devices controller'}: functions are kept from GPUs that "
        f"they were not granted only by what their /dev shows. Run as root with CAP_SYS_ADMIN, "
        f"and where the agent's own group may open the GPUs"
    )
    return Feature(name="device control", on=False, why=why)


def _cpu_accounting(cgroups: Cgroups) -> Feature:
    """Whether the kernel counts the CPU time of instances and builds."""
    if cgroups.group("probe").cpu_file:
        return Feature(name="CPU accounting", on=True, why=f"cgroup v{cgroups.version}")
    why = (
        f"{cgroups.why_not or 'no cpuacct controller'}: CPU time outside calls is read from an "
        f"instance's worker only: commands beside it, "
        "failed starts, processes that it did not reap, and builds are not billed. Run as "
        "root, or delegate a cgroup to the agent"
    )
    return Feature(name="CPU accounting", on=False, why=why)


async def _restore(environ: Mapping[str, str], cache: Path) -> Feature:
    """Snapshots on disk: a real dump and restore, or their cached result."""
    found = await self_test(cache=cache, environ=environ)
    return Feature(name="RESTORE", on=found.on, why=found.why)


async def _networks(wanted: Network) -> Feature:
    """Networks of functions; restored servers that listen on TCP need one in any case."""
    on, why = await slot_network.probe()
    if not on and wanted is Network.OWN and os.geteuid() == 0:
        why = f"functions have no network: {why}"
    return Feature(name="function networks", on=on, why=why)


_SHARED = {
    "namespaces": "the machine's files, processes and network",
    "uid separation": "one user",
    "seccomp": "every system call of the kernel",
}
"""What functions share if a mechanism is missing."""


def isolation(features: Sequence[Feature], wanted: Network) -> Feature:
    """Summary of the isolation between functions and from the machine: missing mechanisms and their
    consequences."""
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
    advice = " Suitable for one tenant (platform.trust: shared)." if missing else ""
    return Feature(name="isolation", on=False, why=f"functions share {', '.join(shared)}.{advice}")


async def _gpus(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    path = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if path is None:
        return []
    status, out = await _run(
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
        or "nvidia-smi lists no GPU: functions that request one are refused on this node"
    )
    return Feature(name="GPU", on=bool(gpus), why=why)


def _apt(home: Path) -> Feature:
    why = base_rootfs.why_not(home / "node" / "rootfs")
    return Feature(
        name="apt packages",
        on=why is None,
        why=why or "each image with apt packages has its own root file system",
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


async def _run(*argv: str) -> tuple[int | None, str]:
    """Run a short command. Returns its exit status (None if it did not start or timed out) and
    output."""
    try:
        status, out = await run_command(
            *argv, timeout_s=_ANSWER_TIMEOUT_S, stderr=asyncio.subprocess.STDOUT
        )
    except TimeoutError:
        return None, f"no answer in {_ANSWER_TIMEOUT_S:g} s"
    except OSError as e:
        return None, str(e.strerror)
    return status, out.decode(errors="replace")


def _nearest_existing(path: Path) -> Path:
    """The nearest existing directory at or above `path`."""
    return next(p for p in [path, *path.parents] if p.exists())
