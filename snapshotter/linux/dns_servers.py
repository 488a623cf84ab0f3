"""Name servers of separate networks: the host's if they are reachable from there, otherwise a relay
on the host.

A server on the host's loopback (dnsmasq, unbound, the one that Docker puts into containers), or
with an IPv6 address, is unreachable from a separate network. Servers behind systemd-resolved are
read from its own file. If none is left, a separate process (`snapshotter.linux.dns_relay`) relays
datagrams and connections without parsing them; slots reach it at their gateway, port 53.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from snapshotter.linux.egress_policy import EVERYWHERE, GATEWAY, EgressPolicy, resolvers

_HOSTS = Path("/etc/resolv.conf")
_RESOLVED = Path("/run/systemd/resolve/resolv.conf")
"""The upstream servers of a local stub, written by systemd-resolved."""
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class FoundServers:
    """DNS configuration of a separate network, derived from resolv.conf(5).

    Attributes:
        text: content of the file in that network; None if the host's own file works.
        addresses: IPv4 addresses of the servers in it.
        relayed: the host's servers that a relay must query, because none is reachable; () if one
            is.
    """

    text: str | None
    addresses: tuple[str, ...]
    relayed: tuple[str, ...] = ()


def find(host_file: Path = _HOSTS, behind: Path = _RESOLVED) -> FoundServers:
    """Read the host's file in its current state."""
    lines = _lines(host_file)
    if not any(_is_out_of_reach(line) for line in lines):
        return FoundServers(None, tuple(resolvers(lines)))
    kept = [line for line in lines if not _is_out_of_reach(line)]
    servers = [
        line
        for line in [*kept, *_lines(behind)]
        if line.startswith("nameserver") and not _is_out_of_reach(line)
    ]
    relayed = () if servers else tuple(line.split()[1] for line in lines if _is_out_of_reach(line))
    servers = servers or [f"nameserver {GATEWAY}"]
    text = "\n".join([*servers, *(line for line in kept if not line.startswith("nameserver")), ""])
    return FoundServers(text, tuple(resolvers(servers)), relayed)


class DnsServers:
    """The host's name servers for slots and builds. Owner: the event loop."""

    def __init__(self, host_file: Path = _HOSTS, behind: Path = _RESOLVED) -> None:
        self._files = host_file, behind
        self._relay: subprocess.Popen[bytes] | None = None
        self._relayed: tuple[str, ...] = ()
        self._sockets: list[socket.socket] = []

    def __repr__(self) -> str:
        return f"<DnsServers {self.find()}, relay {self._relay.pid if self._relay else 'off'}>"

    def find(self) -> FoundServers:
        """The current name servers."""
        return find(*self._files)

    def relay_port(self) -> int | None:
        """Port of the relay on 127.0.0.1; starts or restarts it if one is needed. None if not.
        Raises OSError."""
        relayed = self.find().relayed
        if not relayed:
            return None
        if not self._sockets:
            self._sockets = _bound()
        if self._relay is None or self._relay.poll() is not None or relayed != self._relayed:
            self.close_relay()
            self._relay, self._relayed = _start(self._sockets, relayed), relayed
        return int(self._sockets[0].getsockname()[1])

    def close_relay(self) -> None:
        """Stop the relay; its port stays bound, so that rules with the port remain valid."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait(_END_S)
            self._relay = None

    async def aclose(self) -> None:
        """Stop the relay and release its port. Idempotent."""
        self.close_relay()
        for each in self._sockets:
            each.close()
        self._sockets = []


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkAccess:
    """What separate networks can reach: the addresses that `egress` allows, and name servers."""

    egress: EgressPolicy = EVERYWHERE
    name_servers: DnsServers = field(default_factory=DnsServers)


def _bound() -> list[socket.socket]:
    """A UDP and a TCP socket on one port of 127.0.0.1. Raises OSError."""
    with contextlib.ExitStack() as undo:
        stream = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
        datagrams = undo.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        datagrams.bind(stream.getsockname())
        undo.pop_all()
    return [datagrams, stream]


def _start(sockets: list[socket.socket], servers: tuple[str, ...]) -> subprocess.Popen[bytes]:
    descriptors = [each.fileno() for each in sockets]
    source = Path(__file__).with_name("dns_relay.py")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(source), *map(str, descriptors), *servers],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,
    )


def _lines(path: Path) -> list[str]:
    try:
        return [
            line.strip()
            for line in path.read_text().splitlines()
            if line.strip() and line[0] not in "#;"
        ]
    except OSError:
        return []


def _is_out_of_reach(line: str) -> bool:
    words = line.split()
    return (
        len(words) > 1
        and words[0] == "nameserver"
        and (words[1].startswith("127.") or ":" in words[1])
    )
