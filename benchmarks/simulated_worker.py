"""A worker whose start takes time and no processor: it stands in for `pilotlight/worker/boot.py` in
the pods of a cluster of the tests' own, so that what is measured is the platform's own part of
starts at once, as if each pod had a node to itself.

Executed by a pod's launcher with its launch file; standard library only. It speaks the launcher's
protocol (docs/reference/internals/shim.md) as far as a worker that serves in place does, and
answers each call with the pod's name."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time

BOOT_S = 0.3


def main() -> None:
    """Start, become the instance, serve."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with open(sys.argv[1], encoding="utf-8") as file:
        launch = json.load(file)
    control = socket.socket(fileno=launch["control_fd"])
    time.sleep(BOOT_S)
    booted_ms = {"boot": BOOT_S * 1000}
    told = {"event": "snapshot_point", "threads": [], "phases_ms": booted_ms}
    control.send(json.dumps(told).encode())
    data, fds, _, _ = socket.recv_fds(control, 1 << 17, 16)
    instance = json.loads(data)["instance"]
    listener, go = socket.socket(fileno=fds[0]), socket.socket(fileno=fds[3])
    start = json.loads(go.recv(1 << 17))["start"]
    listener.listen(64)
    ready = {"event": "ready", "instance": instance, "phases_ms": {}}
    control.send(json.dumps(ready).encode())
    phases_ms = {**start["phases_ms"], **booted_ms}
    status = {"instance": instance, "running": 0, "start_kind": start["kind"]}
    serve(listener, json.dumps({**status, "phases_ms": phases_ms}).encode())


def serve(listener: socket.socket, status: bytes) -> None:
    """Answer requests until the process is ended."""
    name = json.dumps(os.uname().nodename).encode()
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    connections: dict[int, tuple[socket.socket, bytearray]] = {}
    while True:
        for fd, _ in poll.poll():
            if fd == listener.fileno():
                connection, _ = listener.accept()
                connections[connection.fileno()] = (connection, bytearray())
                poll.register(connection, select.POLLIN)
                continue
            connection, read = connections[fd]
            data = connection.recv(1 << 16)
            read += data
            if not data:
                poll.unregister(fd)
                del connections[fd]
                connection.close()
            elif (path := complete(read)) is not None:
                is_end = path == b"/pilotlight/end"
                body = status if path.startswith(b"/pilotlight/health") else name
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                head += b"pilotlight-outcome: ok\r\ncontent-length: %d\r\n\r\n" % len(body)
                connection.sendall(head + body)
                if is_end:
                    os._exit(0)


def complete(read: bytearray) -> bytes | None:
    """The path of the request that was read whole, which is taken away; None: not yet."""
    head, end, _ = bytes(read).partition(b"\r\n\r\n")
    if not end:
        return None
    length = 0
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-length":
            length = int(value)
    if len(read) < len(head) + 4 + length:
        return None
    del read[: len(head) + 4 + length]
    return head.split(b" ")[1]


if __name__ == "__main__":
    main()
