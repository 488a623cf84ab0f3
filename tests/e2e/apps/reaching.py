"""Functions that connect to where they are told, each with another network."""

from __future__ import annotations

import os
import socket

import pilotlight

app = pilotlight.App("reaching")
HERE = os.environ.get("REACHABLE", "192.0.2.1")
"""Where `Asking` asks for; the worker, which has no such variable, does not need it."""


def _reach(addresses: list[tuple[str, int]]) -> list[str]:
    found = []
    for host, port in addresses:
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                connection.settimeout(30)
                found.append(connection.recv(100).decode())
        except OSError as e:
            found.append(type(e).__name__)
    return found


@app.cls(cpu=0.5, memory="256MiB", max_instances=2, scaledown_window=2)
class Caller:
    """Says what it reaches."""

    @pilotlight.method(example=[[]])
    def reach(self, addresses: list[tuple[str, int]]) -> list[str]:
        """What a server there says first, or the error."""
        return _reach(addresses)

    @pilotlight.method()
    def namespace(self) -> int:
        """The network namespace that it is in."""
        return os.stat("/proc/self/ns/net").st_ino


@app.cls(cpu=0.5, memory="256MiB", max_instances=2, scaledown_window=2, egress=[HERE])
class Asking:
    """The same, where it asked for an address."""

    @pilotlight.method(example=[[]])
    def reach(self, addresses: list[tuple[str, int]]) -> list[str]:
        """As `Caller.reach`."""
        return _reach(addresses)


@app.function(cpu=0.25, memory="256MiB", network="none", snapshot=False)
def closed(addresses: list[tuple[str, int]]) -> list[str]:
    """The same, where the network is closed; and whether it sees the platform."""
    return [
        *_reach(addresses),
        str({"PILOTLIGHT_URL", "PILOTLIGHT_CALLS"}.isdisjoint(os.environ)),
        str({"platform", "calls"}.isdisjoint(os.listdir("/run/pilotlight/slot"))),
    ]


@app.function(
    cpu=0.25, memory="256MiB", secrets=[pilotlight.Secret.from_name("platform-key")], snapshot=False
)
def asks() -> int:
    """Calls another function, through the platform's socket in its slot."""
    found: int = pilotlight.Function.from_name("reaching", "Caller.namespace").remote()
    return found
