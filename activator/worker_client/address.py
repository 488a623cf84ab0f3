"""Address of a worker: the path of a Unix socket on this machine, or `tcp:<host>:<port>`, a pod's
address.

A pod may vanish with its node without closing its connections: connecting has a timeout, and the
kernel detects connections whose peer is silent (tcp(7): TCP_USER_TIMEOUT, keep-alive), so that a
call on them fails instead of waiting for its clock."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, TypeVar

TCP: Final = "tcp:"
CONNECT_S: Final = 3.0
"""Connect timeout: a lost SYN is repeated after one second, and again two seconds later (RFC 6298);
a host that has not answered by then is unreachable."""
SILENT_MS: Final = 30_000
"""Time without acknowledgement of sent bytes after which the kernel closes the connection."""
PROBE_AFTER_S: Final = 10
PROBE_EVERY_S: Final = 5
PROBES: Final = 4

P = TypeVar("P", bound=asyncio.BaseProtocol)


def tcp_address(host: str, port: int) -> str:
    """Format the `socket` value of a TCP instance; an IPv6 address is put in brackets."""
    return f"{TCP}[{host}]:{port}" if ":" in host else f"{TCP}{host}:{port}"


def is_tcp(where: str) -> bool:
    """Return whether it is a pod's address, not a path."""
    return where.startswith(TCP)


def host_and_port(where: str) -> tuple[str, int]:
    """Parse a `tcp:` address. Raises ValueError for another one."""
    host, _, port = where.removeprefix(TCP).rpartition(":")
    if not is_tcp(where) or not host or not port.isdigit():
        raise ValueError(f"{where!r}: not tcp:<host>:<port>")
    return host.strip("[]"), int(port)


async def connect(loop: asyncio.AbstractEventLoop, make: Callable[[], P], where: str) -> P:
    """Open a new connection. Raises OSError (TimeoutError is one) when it is refused or not
    answered."""
    if not is_tcp(where):
        _, made = await loop.create_unix_connection(make, where)
        return made
    host, port = host_and_port(where)
    async with asyncio.timeout(CONNECT_S):
        transport, made = await loop.create_connection(make, host, port)
    configure_tcp(transport)
    return made


def configure_tcp(transport: asyncio.BaseTransport) -> None:
    """Set TCP options that send small pieces at once and detect vanished peers. Does nothing for
    other sockets."""
    own = transport.get_extra_info("socket")
    if own is None or own.family not in (socket.AF_INET, socket.AF_INET6):
        return
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, PROBE_AFTER_S),
        (socket.TCP_KEEPINTVL, PROBE_EVERY_S),
        (socket.TCP_KEEPCNT, PROBES),
        (socket.TCP_USER_TIMEOUT, SILENT_MS),
    ):
        own.setsockopt(socket.IPPROTO_TCP, option, value)
