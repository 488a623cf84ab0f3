"""Identity of the peer of a Unix socket connection: the uid that the kernel reports."""

from __future__ import annotations

import asyncio
import os
import socket

from pilotlight.core.rpc import peer_uid


def user_behind(transport: asyncio.BaseTransport) -> tuple[str, int] | None:
    """Return `("uid-<n>", 0)` for a function at the functions' Unix socket; None for the platform's
    own processes.

    A Unix socket peer has no address, but the uid of its tenant: limits per address apply per
    tenant there."""
    peer = transport.get_extra_info("socket")
    if peer is None or peer.family != socket.AF_UNIX:
        return None
    uid = peer_uid(peer)
    return None if uid in (0, os.geteuid()) else (f"uid-{uid}", 0)
