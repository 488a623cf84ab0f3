"""The platform's public address: one port on every loopback family, held for as long as the
platform is up.

`localhost` resolves to 127.0.0.1 and to ::1. Where the platform listens at one of them only, a
process of a tenant can listen at the other one and answer in the platform's name; so the platform
listens at both. It also holds both while no activator runs: the supervisor keeps a socket bound to
each address that never listens (`reserve_addresses`), and activators bind beside it (SO_REUSEPORT,
which the kernel grants to sockets of one user only, socket(7)).

Functions have a network of their own, in which those addresses are out of reach. They have a Unix
socket instead (`open_functions_socket`), bound once for all activators: a second one cannot be
bound beside it, and who connects while no activator runs waits for the next."""

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
"""A machine without IPv6, or without IPv4: no process can bind that address there."""
_FREE_PORT_ATTEMPTS = 16
_BACKLOG = 2048
"""As uvicorn's own."""


class AddressInUse(OSError):
    """Raised when an address of the public port cannot be had; the message names it."""


@dataclass(frozen=True, slots=True)
class BoundAddress:
    """One address of the public port. `is_required`: it is the one in the settings."""

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
    """What is bound for `listen` (host:port): the address itself first, then the other loopback
    families that belong to it."""
    host, _, text = listen.rpartition(":")
    host, port = host.strip("[]"), int(text)
    if host == "localhost":
        hosts: Sequence[str] = _BOTH
    elif host in _BOTH:
        hosts = (host, *(other for other in _BOTH if other != host))
    elif host in ("0.0.0.0", ""):
        hosts = (host, _LOOPBACK_6)
    else:
        hosts = (host,)  # `::` covers both families; any other address is no loopback
    return [BoundAddress(each, port, is_required=number == 0) for number, each in enumerate(hosts)]


def open_listeners(listen: str, *, is_shared: bool) -> list[socket.socket]:
    """Bound sockets for every address of `listen`; port 0 picks one that is free on all. Raises
    AddressInUse.

    Args:
        listen: host:port. is_shared: other sockets of this user may be bound there too: several
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
    """Sockets that keep every address of `listen` from other users for as long as they are open.
    Raises AddressInUse.

    They never listen, so a connection is refused, not queued, while no activator runs. Each address
    is first bound without sharing, which fails where another platform is, and then shared. The held
    socket has no SO_REUSEADDR: with it the kernel would let others, who set it too, bind beside a
    socket that does not listen. Nothing is held for port 0."""
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
    """A listening Unix socket at `path`, to which every user may connect; what an earlier platform
    left there is replaced.

    Who may reach it is decided by who sees its directory: slots do. Raises OSError.
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
        # what it accepts has it too (tcp(7)): small pieces go out at once
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setblocking(False)
        yield listener


def _bind(address: BoundAddress, *, reuse_address: bool, reuse_port: bool) -> socket.socket | None:
    """None: this machine does not have the family of an address that is not required."""
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
