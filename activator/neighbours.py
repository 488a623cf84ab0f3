"""HTTP to the other processes of this machine: over a Unix socket, which nobody needs to encrypt."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx

_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts nobody, as nobody is asked. Without it each transport reads all certificates of the machine: 30 ms, ten times at a start."""
_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20)


def over_socket(socket: Path, *, limits: httpx.Limits = _LIMITS) -> httpx.AsyncHTTPTransport:
    """Connections to the process that serves at `socket`; closed with the client that uses them."""
    return httpx.AsyncHTTPTransport(uds=str(socket), verify=_NO_TLS, limits=limits)
