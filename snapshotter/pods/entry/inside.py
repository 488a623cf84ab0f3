"""Runs in a pod's namespaces: builds the tree of a snapshot's worker, runs CRIU, and leaves the
restored worker to the pod; or boots a worker in the root file system of its function's image, which
nothing inside the pod could enter.

Executed for `snapshotter.pods.entry.pod_entry` as a separate process; single-threaded, standard
library only. The entering process stays outside the pod's PID namespace and waits for its child,
which is inside and handles requests. When the child exits, a worker that was kept becomes a child
of the pod's first process, the launcher; otherwise it is killed.

Owner → this process: `enter` [pidfd of the pod, kdat, files, stdout and stderr of a worker to
boot], then the requests of a sandbox (`snapshotter.criu.sandbox_init`), and revive, boot, keep.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from typing import Any

from snapshotter.criu import sandbox_init
from snapshotter.pods import mounts
from snapshotter.shim import child, seqpacket
from snapshotter.shim.sandbox import isolation, netns, workdir_archive
from snapshotter.shim.sandbox import mounts as tree

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)


def main(control_fd: int) -> None:
    """Enter the requested pod, and serve from inside."""
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    os.umask(0o022)
    try:
        message, fds = seqpacket.receive(control)
        if message is None:
            return
        stdio = _enter(message, fds)
        inside = os.fork()
    except (OSError, workdir_archive.InvalidArchive) as e:
        seqpacket.send(control, seqpacket.encode({"event": "failed", "message": str(e)}))
        return
    if inside:
        control.close()
        os.waitpid(inside, 0)
        return
    try:
        _serve(control, stdio)
    finally:
        os._exit(0)


def _enter(message: Mapping[str, Any], fds: list[int]) -> list[int]:
    """Join the pod's cgroups first, so that everything that follows is charged to the pod; our own
    files are passed as descriptors. Returns stdout and stderr of a worker to boot, if any."""
    pod, kdat, files, *stdio = fds
    rootfs = mounts.detach_rootfs(message["rootfs"]) if message["rootfs"] else None
    copies = [(mounts.detach(source), name) for source, name in message["binds"]]
    if message["driver"]:
        copies += [
            (mounts.detach(path), f"driver/{os.path.basename(path)}")
            for path in tree.driver_libraries()
            if os.path.isfile(path)
        ]
    programs = mounts.detach_programs() if message["restores"] and rootfs is None else []
    child.enter(message["groups"], 0)
    mounts.enter(pod)
    if message["address"]:
        netns.add_to_loopback(message["address"])
    if rootfs is not None:
        isolation.forbid_imports()  # files are the tenant's from here on
        mounts.change_root(rootfs, directories=message["kept"])
    elif message["restores"]:
        mounts.cover(programs)
    mounts.build(copies, **{name: message[name] for name in ("uid", "writable_bytes", "python")})
    tree.write_criu_kdat(kdat)
    workdir_archive.unpack(files)
    seqpacket.close_all([pod, kdat, files])
    isolation.forbid_imports()
    return stdio


def _serve(control: socket.socket, stdio: list[int]) -> None:
    os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    kept = _Kept(stdio)
    orders = {"revive": kept.attach, "boot": kept.boot, "keep": kept.keep}
    try:
        sandbox_init.serve(control, orders)
    finally:
        if not kept.is_kept:
            _kill_children()


class _Kept:
    """Whether the worker is kept at exit."""

    def __init__(self, stdio: list[int]) -> None:
        self._stdio = stdio
        self.is_kept = False

    def boot(self, message: Mapping[str, Any]) -> tuple[int, list[int]]:
        """Execute a worker, confined as in a slot: (its pid, [control channel, pidfd]). Raises
        OSError."""
        stdout, stderr = self._stdio
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        names = ("uid", "limits", "env", "work")
        confinement = child.Confinement(**{name: message[name] for name in names})
        with theirs:
            pid = child.execute(
                message["argv"],
                confinement,
                env=message["env"],
                cgroup=child.Cgroup(),
                stdout=stdout,
                stderr=stderr,
                control=theirs.fileno(),
            )
        return pid, [ours.detach(), os.pidfd_open(pid)]

    def attach(self, message: Mapping[str, Any]) -> tuple[int, list[int]]:
        """Connect to the restored process: (its pid, [control channel, pidfd]). Raises OSError."""
        pid = int(message["pid"])
        if pid not in tree.children():
            raise OSError(f"process {pid} is not a child of this process")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(tree.CONTROL)
            os.unlink(tree.CONTROL)
        except OSError:
            connection.close()
            raise
        return pid, [connection.detach(), os.pidfd_open(pid)]

    def keep(self, message: Mapping[str, Any]) -> tuple[int, list[int]]:
        """Keep the worker: it belongs to the pod from now on."""
        self.is_kept = True
        return 0, []


def _kill_children() -> None:
    """Kill a partially restored tree. Descendants end with it: they are restored with it, and are
    reaped by the pod's first process."""
    for pid in tree.children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
