"""PID 1 of a self-test sandbox: starts a subject and CRIU, passes on their descriptors, reaps, and
takes all processes with it when its owner exits.

Executed by `snapshotter.criu.self_test_sandbox` in its own process; single-threaded, standard
library only.

Owner → sandbox (`op`): spawn, criu, criu_kill, pages, watch, kdat. Sandbox → owner (`event`):
ready, failed, done (the answer to each order, in sequence), exited."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from select import POLLIN, poll
from typing import Any

from snapshotter.criu.fd_numbers import FIRST_FD, SOCKET_FD
from snapshotter.shim import seqpacket
from snapshotter.shim.pages import page_server_process
from snapshotter.shim.sandbox import mounts
from snapshotter.shim.sandbox.mount import mount

KDAT = "/run/criu.kdat"
"""Where CRIU caches detected kernel features, if that is a tmpfs (criu/kerndat.c)."""
_PR_SET_PDEATHSIG = 1
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
_TAMPERED = (*_IGNORED, signal.SIGCHLD)
_NOT_STARTED = 127
Order = Callable[[Mapping[str, Any]], tuple[int, list[int]]]
"""Handles a message; returns pid and descriptors (a socket before a pidfd) for the answer. Raises
OSError."""
_MANY = 4096
"""More descriptors than this process ever opens."""


def main(control_fd: int) -> None:
    """Create the namespaces and wait for their PID 1."""
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    try:
        mounts.unshare()
        first = os.fork()
    except OSError as e:
        seqpacket.send(control, seqpacket.encode({"event": "failed", "message": str(e)}))
        return
    if first:
        control.close()
        os.waitpid(first, 0)
        return
    try:
        _become_init()
        _serve(control)
    except OSError as e:
        with contextlib.suppress(OSError):
            seqpacket.send(control, seqpacket.encode({"event": "failed", "message": str(e)}))
    finally:
        os._exit(0)


def _become_init() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    mounts.enter_as_init()
    mount("tmpfs", "/run", "tmpfs", 0, "size=1m,mode=755")
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)


def _serve(control: socket.socket) -> None:
    serve(control, {})


def serve(control: socket.socket, more: Mapping[str, Order]) -> None:
    """Execute orders until the owner exits. `more`: additional orders of another sandbox kind."""
    children, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = poll()
    waiting.register(control, POLLIN)
    waiting.register(children, POLLIN)
    seqpacket.send(control, seqpacket.encode({"event": "ready"}))
    while True:
        ready = {fd for fd, _ in waiting.poll()}
        if children in ready:
            os.read(children, 4096)
            _reap(control)
        if control.fileno() in ready:
            message, fds = seqpacket.receive(control)
            if message is None:
                return
            _obey(control, message, fds, more)
            seqpacket.close_all(fds)


def _reap(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            seqpacket.send(
                control, seqpacket.encode({"event": "exited", "pid": pid, "status": status})
            )


def _obey(
    control: socket.socket,
    message: Mapping[str, Any],
    fds: Sequence[int],
    more: Mapping[str, Order],
) -> None:
    answer: dict[str, Any] = {"event": "done", "pid": 0}
    ours: list[int] = []
    try:
        match message["op"]:
            case "spawn":
                answer["pid"] = _spawn(message, fds)
                ours = [os.pidfd_open(answer["pid"])]
            case "criu":
                answer["pid"], ours = _criu(message, fds)
                answer["socket"] = message["socket"]
            case "pages":
                images, work, working_set, brought = fds
                answer["pid"] = page_server_process.fork(
                    images=images,
                    work=work,
                    working_set=working_set,
                    record=message["record"],
                    ready=brought,
                )
                ours = [os.pidfd_open(answer["pid"])]
            case "watch":
                answer["pid"] = message["pid"]
                ours = [os.pidfd_open(message["pid"])]
            case "keep_kdat":
                _keep_kdat(fds[0])
            case "kdat":
                ours = [os.open(KDAT, os.O_RDONLY | os.O_CLOEXEC)]
            case op if op in more:
                answer["pid"], ours = more[op](message)
                answer["socket"] = len(ours) > 1
    except OSError as e:
        answer["error"] = str(e)
    seqpacket.send(control, seqpacket.encode(answer), ours)
    seqpacket.close_all(ours)


def _spawn(message: Mapping[str, Any], fds: Sequence[int]) -> int:
    """Start the subject. It must exec: a mere fork has mappings from mounts that were left, which
    CRIU cannot name."""
    mounts.reserve_low_pids()  # for CRIU, when the subject is restored
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for target, source in enumerate((null, *fds, *[null] * (2 - len(fds)))):
            os.dup2(source, target)
        os.closerange(3, _MANY)
        for number in _TAMPERED:
            signal.signal(number, signal.SIG_DFL)
        os.execve(message["argv"][0], message["argv"], message["env"])
    except OSError as e:
        os.write(2, f"{e}\n".encode())
    finally:
        os._exit(_NOT_STARTED)


def _criu(message: Mapping[str, Any], fds: Sequence[int]) -> tuple[int, list[int]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        if not message["socket"]:
            ours.close()
            return pid, [os.pidfd_open(pid)]
        return pid, [ours.detach(), os.pidfd_open(pid)]
    try:
        # move them to high numbers first: the target numbers may be descriptors still needed
        socket_fd, *given = [_high(fd) for fd in (theirs.fileno(), *fds)]
        if message["socket"]:
            os.dup2(socket_fd, SOCKET_FD)
        for number, fd in enumerate(given, start=FIRST_FD):
            os.dup2(fd, number)
        null = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        for known in _TAMPERED:
            signal.signal(known, signal.SIG_DFL)
        os.setresgid(message["uid"], 0, 0)
        os.setresuid(message["uid"], 0, 0)
        os.execve(message["argv"][0], message["argv"], message["env"])
    finally:
        os._exit(_NOT_STARTED)


def _high(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD + 100)


def _keep_kdat(source: int) -> None:
    target = os.open(KDAT, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.sendfile(target, source, 0, os.fstat(source).st_size)
    finally:
        os.close(target)


if __name__ == "__main__":
    main(int(sys.argv[1]))
