"""Identifies the process at the other end of a socket through the kernel: the pod that it is in, and
whether its namespaces may be entered.

Also ends Knative's queue-proxy in a pod whose worker has ended (`end_proxy`).

Entering a pod mounts file systems in it. So a pod is entered only if it has its own namespaces of
every kind and its launcher is their first process; a process of the node itself never qualifies.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
from pathlib import Path

from snapshotter.errors import Unsupported
from snapshotter.linux import proc as processes

_SO_PEERPIDFD = 77
"""unix(7); since Linux 6.5. A pid could be reused before it is inspected."""
_OWN = ("mnt", "pid", "net", "ipc", "uts")
_PROC = Path("/proc")
_CREDENTIALS = struct.Struct("3i")
_PROXY = "queue"
"""Name of queue-proxy's executable (knative/serving cmd/queue), as in `/proc/<pid>/comm`."""
_POD_GROUP = re.compile(
    r"(?:^|[/-])pod([0-9a-f]{8}(?:([-_])[0-9a-f]{4})(?:\2[0-9a-f]{4}){2}\2[0-9a-f]{12})(?:\.slice)?(?:/|$)"
)
"""The kubelet's control group of a pod: `…/pod<uid>` or, with systemd, `…-pod<uid>.slice`, where the
uid's hyphens are underscores (kubernetes, pkg/kubelet/cm)."""


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


def pod_of_peer(connection: socket.socket, *, proc: Path = _PROC) -> str:
    """The uid of the pod that the peer process is in, by its control group, which the process
    cannot change. Raises Unsupported."""
    try:
        pidfd = peer_pidfd(connection)
    except ProcessLookupError:
        raise Unsupported("the process that connected has exited") from None
    try:
        pid = processes.host_pid(pidfd)
        groups = (proc / str(pid) / "cgroup").read_text() if pid else ""
        # the pid belonged to the peer all the time if it still does
        if not pid or processes.host_pid(pidfd) != pid:
            raise Unsupported(
                "the node agent cannot see the process that connected, or it has exited: set "
                "node.hostPID of the chart"
            )
    except OSError as e:
        raise Unsupported(f"the process that connected cannot be inspected: {e}") from e
    finally:
        os.close(pidfd)
    return pod_of_groups(groups)


def pod_of_groups(groups: str) -> str:
    """The uid of the pod in the text of `/proc/<pid>/cgroup` (cgroups(7)). Raises Unsupported."""
    found = {
        match[1].replace("_", "-")
        for line in groups.splitlines()
        # the outermost: a container may name groups below its own as it likes
        if (match := _POD_GROUP.search(line.split(":", 2)[-1])) is not None
    }
    if len(found) != 1:
        raise Unsupported("the process that connected is in no pod of this node")
    return found.pop()


def end_proxy(uid: str, *, proc: Path = _PROC) -> int:
    """Kill Knative's queue-proxy in the pod `uid`; returns the number of processes: 0 if it has none
    or none is visible. Walks all processes: not for the event loop.

    Only the first process of a container in the pod's control group, which no process can leave, is
    killed, so that nothing that a pod does ends anything elsewhere."""
    return sum(
        _kill_proxy(int(entry.name), uid, proc) for entry in proc.iterdir() if entry.name.isdigit()
    )


def _kill_proxy(pid: int, uid: str, proc: Path) -> bool:
    try:
        if not _is_proxy(proc / str(pid), uid):
            return False
        pidfd = os.pidfd_open(pid)
        try:
            # the pid may have been another process's before the descriptor was opened
            if not _is_proxy(proc / str(pid), uid) or processes.host_pid(pidfd) != pid:
                return False
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)
    except (OSError, Unsupported):  # it has exited; or is in no pod
        return False
    return True


def _is_proxy(process: Path, uid: str) -> bool:
    """Raises OSError, Unsupported."""
    if (process / "comm").read_text().strip() != _PROXY:
        return False
    if pod_of_groups((process / "cgroup").read_text()) != uid:
        return False
    lines = (process / "status").read_text().splitlines()
    numbers = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
    return len(numbers) > 1 and numbers[-1] == "1"


def present_pods(*, proc: Path = _PROC) -> set[str]:
    """Uids of the pods that have a process. Walks all processes: not for the event loop."""
    found = set()
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, Unsupported):
                found.add(pod_of_groups((entry / "cgroup").read_text()))
    return found


def peer_pidfd(connection: socket.socket) -> int:
    """As `pidfd_of_peer`; on older kernels by the pid that the peer had when it connected. Raises
    Unsupported, ProcessLookupError."""
    try:
        return pidfd_of_peer(connection)
    except Unsupported:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid: int = _CREDENTIALS.unpack(raw)[0]
        if not pid:
            raise Unsupported(
                "the node agent cannot see the process that connected: set node.hostPID of the "
                "chart"
            ) from None
        return os.pidfd_open(pid)


def require_own_namespaces(pidfd: int, *, proc: Path = _PROC) -> int:
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
