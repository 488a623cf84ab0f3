"""In a pod's namespaces: builds the tree that a snapshot's worker knows, runs CRIU there, and
leaves the restored worker to the pod.

Executed by `snapshotter.pods.entry` in a process of its own; single-threaded, standard library
only. The process that enters stays outside of the pod's PID namespace and waits for its child,
which is inside and obeys. When that one leaves, what was kept is a child of the pod's first
process, the launcher; what was not kept is killed.

Owner → us: `enter` [pidfd of the pod, kdat, files], then the orders of a cell
(`snapshotter.criu.sandbox_init`), and revive, keep."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from typing import Any

from snapshotter.criu import sandbox_init
from snapshotter.pods import mounts
from snapshotter.shim import child, isolation, seqpacket, workdir_archive
from snapshotter.shim import mounts as tree

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)


def main(control_fd: int) -> None:
    """Enter as told, and serve from inside."""
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    os.umask(0o022)
    try:
        message, fds = seqpacket.receive(control)
        if message is None:
            return
        _enter(message, fds)
        inside = os.fork()
    except (OSError, workdir_archive.InvalidArchive) as e:
        seqpacket.send(control, seqpacket.encode({"event": "failed", "message": str(e)}))
        return
    if inside:
        control.close()
        os.waitpid(inside, 0)
        return
    try:
        _serve(control)
    finally:
        os._exit(0)


def _enter(message: Mapping[str, Any], fds: list[int]) -> None:
    """The pod's groups first, so that all that is made here counts as the pod's; what is ours is
    taken along as descriptors."""
    pod, kdat, files = fds
    held = [(mounts.take(source), name) for source, name in message["binds"]]
    child.enter(message["groups"], 0)
    mounts.enter(pod)
    mounts.build(held, uid=message["uid"], writable_bytes=message["writable_bytes"])
    tree.write_criu_kdat(kdat)
    workdir_archive.unpack(files)
    seqpacket.close_all(fds)
    isolation.forbid_imports()


def _serve(control: socket.socket) -> None:
    os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    kept = _Kept()
    try:
        sandbox_init.serve(control, {"revive": kept.revive, "keep": kept.keep})
    finally:
        if not kept.is_kept:
            _kill_children()


class _Kept:
    """Whether the restored worker stays when we leave."""

    def __init__(self) -> None:
        self.is_kept = False

    def revive(self, message: Mapping[str, Any]) -> tuple[int, list[int]]:
        """Connect to the restored process: (its pid, [control channel, pidfd]). Raises OSError."""
        pid = int(message["pid"])
        if pid not in tree.children():
            raise OSError(f"process {pid} is no child of ours")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(tree.CONTROL)
            os.unlink(tree.CONTROL)
        except OSError:
            connection.close()
            raise
        return pid, [connection.detach(), os.pidfd_open(pid)]

    def keep(self, message: Mapping[str, Any]) -> tuple[int, list[int]]:
        """It is the pod's from now on."""
        self.is_kept = True
        return 0, []


def _kill_children() -> None:
    """Half a tree is no worker. Its own children follow it: they are restored with it, and are
    reaped by the pod's first process."""
    for pid in tree.children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
