"""Ports."""

from __future__ import annotations

import socket
import subprocess
import time
from typing import Any


class DidNotStart(Exception):
    """Raised when a server ended, or did not listen in time."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses right now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_connectable(port: int, process: subprocess.Popen[Any], *, deadline: float) -> None:
    """Return once `port` accepts; `deadline` is monotonic. Raises DidNotStart."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError as e:
            if process.poll() is not None or time.monotonic() > deadline:
                raise DidNotStart(
                    f"{process.args!r} does not listen on port {port} (exit status "
                    f"{process.poll()})"
                ) from e
            time.sleep(0.02)  # another program's start can only be asked for
        else:
            return
