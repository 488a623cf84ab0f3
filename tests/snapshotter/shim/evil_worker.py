"""A worker that lies to its shim: executed in the worker's place, with the control channel as
descriptor 3.

`PILOTLIGHT_EVIL`: `pidfd`: says that the process which listens on the instance's socket, the node
agent, is the fork; `flood`: starts an instance as it should, and tells of failures without end;
`stay`: says that its forks enter their cgroups, and they do not; `burn`: computes for a while
behind its snapshot point; `point`: reaches one whose listeners are a number, and waits."""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import time
from typing import Any

SO_PEERPIDFD = 77
BURN_S = 0.5


def send(message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """One datagram."""
    with socket.socket(fileno=os.dup(3)) as control:
        control.sendmsg(
            [json.dumps(message).encode()],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [],
        )


def receive() -> tuple[dict[str, Any], list[int]]:
    """An order and its descriptors."""
    with socket.socket(fileno=os.dup(3)) as control:
        raw, ancillary, _, _ = control.recvmsg(1 << 18, socket.CMSG_SPACE(64 * 4))
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % 4])
    if not raw:
        os._exit(0)
    return json.loads(raw), list(fds)


def fork() -> int:
    """A child that does nothing; its pidfd."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return os.pidfd_open(pid)


def main() -> None:
    """Obey, and lie."""
    evil = os.environ["PILOTLIGHT_EVIL"]
    point = {"threads": [], "phases_ms": {}, "obstacles": [], "joins": evil == "stay"}
    send({"event": "snapshot_point", **point, **({"listens": 5} if evil == "point" else {})})
    while evil == "burn" and time.process_time() < BURN_S:
        pass
    while True:
        order, fds = receive()
        name = order.get("instance")
        if order["op"] == "fork" and evil == "pidfd":
            send(
                {"event": "forked", "instance": name},
                (socket.socket(fileno=fds[0]).getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD),),
            )
            send({"event": "ready", "instance": name, "phases_ms": {}})
        elif order["op"] == "park" and evil == "pidfd":
            send({"event": "forked", "instance": name}, (os.pidfd_open(os.getpid()),))
        elif order["op"] == "fork":
            send({"event": "forked", "instance": name}, (fork(),))
            send({"event": "ready", "instance": name, "phases_ms": {}})
            if evil != "flood":
                continue
            error = {"type": "T", "message": "x", "pad": [[]] * 30_000}  # takes longest to read
            raw = json.dumps(
                {"event": "failed", "instance": name, "phase": "x", "error": error}
            ).encode()
            with socket.socket(fileno=os.dup(3)) as control:
                while True:
                    control.send(raw)


if __name__ == "__main__":
    main()
