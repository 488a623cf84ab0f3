"""TCP listeners for other machines: a server that listens on a Unix socket also listens on a TCP
address, with mutual TLS."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TYPE_CHECKING

from pilotlight.core.settings import SettingsInvalid
from pilotlight.core.transport.endpoint import HANDSHAKE_TIMEOUT_S, TlsCredentials

if TYPE_CHECKING:
    import uvicorn

BACKLOG = 1024


def require_tls_or_loopback(key: str, listen: str | None, *, is_known: bool) -> None:
    """Raise SettingsInvalid if unauthenticated clients of other machines could connect (`is_known`:
    platform.tls_* is set)."""
    if listen is not None and not is_known and not is_loopback(_host(listen)):
        raise SettingsInvalid(
            f"{key} = {listen!r}: needs platform.tls_cert, tls_key and tls_ca; without them only "
            f"a loopback address is allowed"
        )


def open_tcp_listener(key: str, listen: str) -> socket.socket:
    """Open a listening socket at host:port. Raises SettingsInvalid, naming `key`, if it cannot be
    bound."""
    host = _host(listen)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, int(listen.rpartition(":")[2])))
        listener.setblocking(False)
    except OSError as e:
        listener.close()
        raise SettingsInvalid(f"{key} = {listen!r}: cannot listen: {e.strerror or e}") from e
    return listener


async def serve_on_listener(
    server: uvicorn.Server, listener: socket.socket, credentials: TlsCredentials | None
) -> None:
    """Make a running server accept connections at `listener`, too. The server closes it at
    shutdown."""
    config = server.config

    def protocol() -> asyncio.Protocol:
        return config.http_protocol_class(
            config=config, server_state=server.server_state, app_state=server.lifespan.state
        )  # type: ignore[call-arg]

    context = credentials.server_context() if credentials is not None else None
    timeout_s = HANDSHAKE_TIMEOUT_S if context is not None else None
    accepting = await asyncio.get_running_loop().create_server(
        protocol, sock=listener, ssl=context, ssl_handshake_timeout=timeout_s, backlog=BACKLOG
    )
    server.servers.append(accepting)


def _host(listen: str) -> str:
    return listen.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
