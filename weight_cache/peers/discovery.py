"""Peer addresses: a list, or a DNS name that resolves to all of them (a headless service)."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

_DNS = "dns:"
_log = logging.getLogger(__name__)


def split_host_port(address: str) -> tuple[str, int]:
    """Split `host:port`, with an IPv6 host in brackets. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host.strip("[]") or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_peers(peers: Sequence[str] | str) -> None:
    """Validate the setting `peers`. Raises ValueError."""
    if isinstance(peers, str) and not peers.startswith(_DNS):
        raise ValueError(f"peers = {peers!r}: expected a list of host:port, or dns:<name>:<port>")
    for address in [peers.removeprefix(_DNS)] if isinstance(peers, str) else peers:
        try:
            split_host_port(address)
        except ValueError as e:
            raise ValueError(
                f"peers: {e}: expected a list of host:port, or dns:<name>:<port>"
            ) from e


def check_peer_listen(address: str) -> None:
    """Validate the setting `peer_listen`; port 0 selects a free port. Raises ValueError."""
    try:
        split_host_port(address.removesuffix(":0") + ":1" if address.endswith(":0") else address)
    except ValueError as e:
        raise ValueError(
            f"peer_listen = {address!r}: expected host:port, or null not to serve peers"
        ) from e


class PeerDiscovery:
    """The addresses of all nodes, possibly including this one. Owner: one event loop."""

    def __init__(self, peers: Sequence[str] | str) -> None:
        self._peers = peers
        self._last: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<PeerDiscovery {self._peers!r} {len(self._last)} addresses>"

    @property
    def name(self) -> str | None:
        """The DNS name of all peers; None for a list."""
        return (
            split_host_port(self._peers.removeprefix(_DNS))[0]
            if isinstance(self._peers, str)
            else None
        )

    async def addresses(self) -> tuple[str, ...]:
        """`host:port` of each node. If the name cannot be resolved now, the last result."""
        if isinstance(self._peers, str):
            host, port = split_host_port(self._peers.removeprefix(_DNS))
            try:
                found = await asyncio.get_running_loop().getaddrinfo(
                    host, port, type=socket.SOCK_STREAM
                )
            except OSError as e:
                _log.warning(
                    "peers.not_resolved name=%s error=%s kept=%d", host, e, len(self._last)
                )
            else:
                self._last = tuple(
                    sorted({_format_address(str(where[0]), port) for *_, where in found})
                )
        else:
            self._last = tuple(dict.fromkeys(self._peers))
        return self._last


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
