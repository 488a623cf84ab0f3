"""Who is at the other end of a connection that has no address: the user, as the kernel names it."""

from __future__ import annotations

import asyncio
import os
import socket

from weight_cache.protocol import uid_of


def user_behind(transport: asyncio.BaseTransport) -> tuple[str, int] | None:
    """`("uid-<n>", 0)` for a function at the Unix socket of functions; None for the platform's own
    processes at the others' socket.

    It has no address, but the uid of its tenant: what is bounded by address is bounded for each
    tenant there."""
    peer = transport.get_extra_info("socket")
    if peer is None or peer.family != socket.AF_UNIX:
        return None
    uid = uid_of(peer)
    return None if uid in (0, os.geteuid()) else (f"uid-{uid}", 0)
