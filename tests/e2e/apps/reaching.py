"""Functions that connect to where they are told."""

from __future__ import annotations

import os
import socket

import pilotlight

app = pilotlight.App("reaching")


@app.cls(cpu=0.5, memory="256MiB", max_instances=2, scaledown_window=2)
class Caller:
    """Says what it reaches."""

    @pilotlight.method(example=[[]])
    def reach(self, addresses: list[tuple[str, int]]) -> list[str]:
        """What a server there says first, or the error."""
        found = []
        for host, port in addresses:
            try:
                with socket.create_connection((host, port), timeout=5) as connection:
                    connection.settimeout(30)
                    found.append(connection.recv(100).decode())
            except OSError as e:
                found.append(type(e).__name__)
        return found

    @pilotlight.method()
    def namespace(self) -> int:
        """The network namespace that it is in."""
        return os.stat("/proc/self/ns/net").st_ino
