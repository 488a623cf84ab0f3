"""A tenant that has what another one must not reach: code, weights, a secret, sockets, shared
memory, files, a log, calls."""

import ctypes
import os
import socket
import threading
from typing import Any

import pilotlight

app = pilotlight.App("holder")
weights = pilotlight.Weights("private")
KEPT: list[Any] = []
"""What `hold` opened stays open as long as the instance lives."""
FOUND: dict[str, int] = {}


@app.function(
    memory="256MiB",
    max_instances=1,
    scaledown_window=600,
    weights=weights,
    secrets=[pilotlight.Secret.from_name("kept")],
)
def hold(marker: str = "", ipc_key: int = 1) -> dict[str, int]:
    """Open everything once, and say where. `marker` names what has a name."""
    print(marker)
    if FOUND:
        return FOUND
    libc = ctypes.CDLL(None, use_errno=True)
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        with open(f"{folder}/{marker}", "w") as file:
            file.write(marker)
        os.chmod(f"{folder}/{marker}", 0o666)
    memory = libc.shmget(ipc_key, 4096, 0o1666)
    queue = libc.mq_open(b"/" + marker.encode(), os.O_RDWR | os.O_CREAT, 0o666, None)
    if min(memory, queue) < 0:
        raise OSError(ctypes.get_errno(), "shared memory or a message queue")
    abstract, tcp = socket.socket(socket.AF_UNIX), socket.socket()
    abstract.bind("\0" + marker)
    tcp.bind(("127.0.0.1", 0))
    for server in (abstract, tcp):
        server.listen()
        threading.Thread(target=_greet, args=(server,), daemon=True).start()
    KEPT.extend((abstract, tcp))
    FOUND.update(port=tcp.getsockname()[1], memory=memory, queue=queue)
    return FOUND


def _greet(server: socket.socket) -> None:
    while True:
        client, _ = server.accept()
        with client:
            client.sendall(b"this is another tenant's server")
