"""The platform's public address: one port on every loopback family, reserved while the platform is
running.

`localhost` resolves to 127.0.0.1 and to ::1. If the platform listened on one of them only, a
tenant's process could listen on the other and impersonate the platform; so the platform listens on
both. It also reserves both while no activator runs: for each address the supervisor keeps a bound
socket that never listens (`reserve_addresses`), and the sockets of activators are bound next to it
(SO_REUSEPORT, which the kernel grants only to sockets of the same user, socket(7)).

Functions have their own network, from which those addresses cannot be reached. They use a Unix
socket instead (`open_functions_socket`), bound once for all activators, since a second one cannot
be bound next to it; connections made while no activator runs wait for the next one."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

_LOOPBACK_4, _LOOPBACK_6 = "127.0.0.1", "::1"
_BOTH = (_LOOPBACK_4, _LOOPBACK_6)
_NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)
"""The machine has no IPv6, or no IPv4: no process can bind that address."""
_FREE_PORT_ATTEMPTS = 16
_BACKLOG = 2048
"""As in uvicorn."""


class AddressInUse(OSError):
    """Raised when an address of the public port cannot be bound; the message names it."""


@dataclass(frozen=True, slots=True)
class BoundAddress:
    """One address of the public port. `is_required`: the address in the settings."""

    host: str
    port: int
    is_required: bool

    @property
    def family(self) -> socket.AddressFamily:
        """IPv6 for addresses with a colon."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def public_addresses(listen: str) -> list[BoundAddress]:
    """The addresses to bind for `listen` (host:port): the address itself first, then the other
    loopback families."""
    host, _, text = listen.rpartition(":")
    host, port = host.strip("[]"), int(text)
    if host == "localhost":
        hosts: Sequence[str] = _BOTH
    elif host in _BOTH:
        hosts = (host, *(other for other in _BOTH if other != host))
    elif host in ("0.0.0.0", ""):
        hosts = (host, _LOOPBACK_6)
    else:
        hosts = (host,)  # `::` covers both families; any other address is not loopback
    return [BoundAddress(each, port, is_required=number == 0) for number, each in enumerate(hosts)]


def open_listeners(listen: str, *, is_shared: bool) -> list[socket.socket]:
    """Bind sockets for every address of `listen`; port 0 selects a port that is free on all. Raises
    AddressInUse.

    Args:
        listen: host:port.
        is_shared: other sockets of this user may be bound to the same addresses: several
            activators, or the sockets of `reserve_addresses`.
    """
    for _ in range(_FREE_PORT_ATTEMPTS - 1):
        try:
            return _open_all(public_addresses(listen), is_shared=is_shared)
        except AddressInUse:
            if not listen.endswith(":0"):
                raise
    return _open_all(public_addresses(listen), is_shared=is_shared)


def reserve_addresses(listen: str) -> list[socket.socket]:
    """Bind sockets that reserve every address of `listen` against other users while they are open.
    Raises AddressInUse.

    They never listen, so they queue no connections while no activator runs. Each
    address is first bound without sharing, which fails if another platform uses it, and then
    shared. The reserved socket has no SO_REUSEADDR: with it the kernel would let other users that
    set it bind next to a socket that does not listen. Port 0 is not reserved."""
    if listen.endswith(":0"):
        return []
    held: list[socket.socket] = []
    with ExitStack() as undo:
        for address in public_addresses(listen):
            exclusive = _bind(address, reuse_address=True, reuse_port=False)
            if exclusive is None:
                continue
            with exclusive:
                exclusive.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                kept = _bind(address, reuse_address=False, reuse_port=True)
            if kept is not None:
                held.append(undo.enter_context(kept))
        undo.pop_all()
    return held


def open_functions_socket(path: Path) -> socket.socket:
    """Create a listening Unix socket at `path` that every user may connect to, replacing that of an
    earlier platform.

    Access is limited by the visibility of its directory, which slots can see. Raises OSError.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with ExitStack() as undo:
        undo.enter_context(listener)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        undo.pop_all()
    return listener


def _open_all(addresses: Sequence[BoundAddress], *, is_shared: bool) -> list[socket.socket]:
    with ExitStack() as undo:
        opened = [undo.enter_context(one) for one in _open_each(addresses, is_shared=is_shared)]
        undo.pop_all()
    return opened


def _open_each(addresses: Sequence[BoundAddress], *, is_shared: bool) -> Iterator[socket.socket]:
    port = addresses[0].port
    for address in addresses:
        listener = _bind(
            BoundAddress(address.host, port, address.is_required),
            reuse_address=True,
            reuse_port=is_shared,
        )
        if listener is None:
            continue
        port = listener.getsockname()[1]
        # inherited by accepted connections (tcp(7)): small writes are sent at once
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setblocking(False)
        yield listener


def _bind(address: BoundAddress, *, reuse_address: bool, reuse_port: bool) -> socket.socket | None:
    """Bind a socket; None if the family is missing and the address is not required."""
    listener = None
    try:
        listener = socket.socket(address.family, socket.SOCK_STREAM)
        if reuse_address:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if address.family == socket.AF_INET6 and address.host != "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address.host, address.port))
    except OSError as e:
        if listener is not None:
            listener.close()
        if not address.is_required and e.errno in _NO_SUCH_FAMILY:
            return None
        raise AddressInUse(e.errno, f"{address}: {e.strerror or e}") from e
    return listener
