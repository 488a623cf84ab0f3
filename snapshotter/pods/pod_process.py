"""Identifies the process that announced a pod through the kernel, and checks whether its namespaces
may be entered.

Entering a pod mounts file systems in it. So a pod is entered only if it has its own namespaces of
every kind and its launcher is their first process; a process of the node itself never qualifies.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from snapshotter.errors import Unsupported
from snapshotter.linux import proc as processes

_SO_PEERPIDFD = 77
"""unix(7); since Linux 6.5. A pid could be reused before it is inspected."""
_OWN = ("mnt", "pid", "net", "ipc", "uts")
_PROC = Path("/proc")


def pidfd_of_peer(connection: socket.socket) -> int:
    """A pidfd of the peer process, which the caller closes. Raises Unsupported."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as e:
        raise Unsupported(
            f"this kernel cannot identify the peer process of a socket reliably "
            f"({e.strerror}): Linux 6.5 or newer is required"
        ) from e
    return raw


def demand_own_namespaces(pidfd: int, *, proc: Path = _PROC) -> int:
    """Our pid of the pod's launcher, if the pod has its own namespaces and the launcher is their
    first process. Raises Unsupported."""
    pid = processes.host_pid(pidfd)
    if not pid:
        raise Unsupported(
            "the pod's process is not visible to the node agent: set hostPID in the agent's pod"
        )
    try:
        ours, theirs = (_namespaces(proc / str(one)) for one in (os.getpid(), pid))
        nodes = _of_node(proc)
        numbers = next(
            line
            for line in (proc / str(pid) / "status").read_text().splitlines()
            if line.startswith("NSpid:")
        )
    except (OSError, StopIteration) as e:
        raise Unsupported(
            f"the pod's process cannot be inspected, or has exited: {e or type(e).__name__}"
        ) from e
    if shared := [name for name in _OWN if theirs[name] in (ours[name], nodes.get(name))]:
        raise Unsupported(
            f"the pod shares namespaces with its node ({', '.join(shared)}): cannot restore into it"
        )
    if theirs["user"] != ours["user"]:
        raise Unsupported(
            "the pod has a user namespace (hostUsers: false): uids would differ from the snapshot"
        )
    if numbers.split()[-1] != "1":
        raise Unsupported(
            "the launcher is not its pod's first process (shareProcessNamespace): it cannot "
            "supervise a restored worker"
        )
    return pid


def _of_node(proc: Path) -> dict[str, str]:
    """Namespaces of the node's first process; {} if we may not inspect it: then our PID namespace
    is not the node's, which is sufficient."""
    try:
        return _namespaces(proc / "1")
    except PermissionError:
        return {}


def _namespaces(process: Path) -> dict[str, str]:
    return {name: os.readlink(process / "ns" / name) for name in (*_OWN, "user")}
