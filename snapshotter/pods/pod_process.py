"""The process that announced a pod, as the kernel knows it: who it is for certain, and whether its
namespaces may be entered.

Whoever enters mounts things there. So a pod is entered only when it really has namespaces of its
own, all of them, and its launcher is the first process in them; a process of the node itself never
is."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from snapshotter.errors import Unsupported
from snapshotter.linux import proc as processes

_SO_PEERPIDFD = 77
"""unix(7); since Linux 6.5. A pid could be another process's by the time that it is looked at."""
_OWN = ("mnt", "pid", "net", "ipc", "uts")
_PROC = Path("/proc")


def pidfd_of_peer(connection: socket.socket) -> int:
    """A pidfd of the process at the other end, which the caller closes. Raises Unsupported."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as e:
        raise Unsupported(
            f"this kernel does not say for certain who is at the other end of a socket "
            f"({e.strerror}): Linux 6.5 does"
        ) from e
    return raw


def demand_own_namespaces(pidfd: int, *, proc: Path = _PROC) -> int:
    """The pod's launcher, by our numbers, where its namespaces are its own and it is their first
    process. Raises Unsupported."""
    pid = processes.host_pid(pidfd)
    if not pid:
        raise Unsupported(
            "the pod's process cannot be seen from the node agent: give the agent's pod hostPID"
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
            f"the pod's process cannot be looked at, or is gone: {e or type(e).__name__}"
        ) from e
    if shared := [name for name in _OWN if theirs[name] in (ours[name], nodes.get(name))]:
        raise Unsupported(
            f"the pod shares namespaces with its node ({', '.join(shared)}): it is no place to "
            f"restore into"
        )
    if theirs["user"] != ours["user"]:
        raise Unsupported(
            "the pod has a user namespace (hostUsers: false): uids would not be what the snapshot has"
        )
    if numbers.split()[-1] != "1":
        raise Unsupported(
            "the launcher is not its pod's first process (shareProcessNamespace): it could not "
            "look after a restored worker"
        )
    return pid


def _of_node(proc: Path) -> dict[str, str]:
    """Of the node's first process; {} where we may not look at it: that the PID namespace is not
    ours, either, tells enough."""
    try:
        return _namespaces(proc / "1")
    except PermissionError:
        return {}


def _namespaces(process: Path) -> dict[str, str]:
    return {name: os.readlink(process / "ns" / name) for name in (*_OWN, "user")}
