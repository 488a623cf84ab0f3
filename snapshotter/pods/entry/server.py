"""Forks the processes that enter pods: one process of the node agent that has imported what they
need, so that entering a pod costs a fork instead of the start of an interpreter.

Executed by `snapshotter.pods.entry.processes`; single-threaded, standard library only. It never
enters anything itself: each order is one child, which serves the socket that came with it.

Agent → server: `{"kind": "enter" | "show"}` [socket]. Server → agent: `{"pid": n}` [pidfd], or
`{"error": text}`. A child of kind `enter` is `entry.inside`; one of kind `show` mounts a tenant's
directory in a promoted pod: `{"source", "over", "target"}` [pidfd of the pod] → `ok`, or the error.
It enters the pod's mount namespace alone, so that no process of the pod sees or traces it."""

from __future__ import annotations

import contextlib
import os
import socket

from snapshotter.pods import mounts
from snapshotter.pods.entry import inside
from snapshotter.shim import seqpacket


def main(control_fd: int) -> None:
    """Serve until the agent exits."""
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    while True:
        message, fds = seqpacket.receive(control)
        if message is None:
            return
        _reap()
        answer, ours = _fork(control, str(message.get("kind")), fds)
        with contextlib.suppress(OSError):
            seqpacket.send(control, seqpacket.encode(answer), ours)
        seqpacket.close_all([*fds, *ours])


def _fork(control: socket.socket, kind: str, fds: list[int]) -> tuple[dict[str, object], list[int]]:
    """The answer and the child's pidfd."""
    try:
        pid = os.fork()
        if pid:
            return {"pid": pid}, [os.pidfd_open(pid)]
    except OSError as e:
        return {"error": str(e)}, []
    try:
        control.close()
        {"enter": inside.main, "show": _show}[kind](fds[0])
    finally:
        os._exit(0)


def _show(control_fd: int) -> None:
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    message, fds = seqpacket.receive(control)
    if message is None:
        return
    try:
        over = os.stat(message["over"])
        place = (over.st_dev, over.st_ino)
        mounts.show(fds[0], message["source"], message["target"], over=place)
        answer = b"ok"
    except OSError as e:
        answer = str(e).encode()
    with contextlib.suppress(OSError):  # the agent has exited
        control.send(answer)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
