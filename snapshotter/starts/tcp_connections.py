"""TCP connections of processes, from the kernel's tables (proc(5), /proc/pid/net/tcp)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

_LISTEN, _CLOSE = "0A", "07"
"""States (include/net/tcp_states.h) of sockets that are not connected."""
_MAPPED = "0000000000000000FFFF0000"
"""How the table writes the first 12 bytes of an IPv4 address in an IPv6 socket (RFC 4291,
2.5.5.2)."""


def has_outside(pids: Collection[int]) -> bool:
    """Whether one of these processes, which share a network namespace, has a connection whose other
    end is none of theirs. Blocks for milliseconds: not for the event loop."""
    ours = {inode for pid in pids for inode in _socket_inodes(pid)}
    ends = {
        (local, peer)
        for pid in list(pids)[:1]
        for local, peer, inode in _connected(pid)
        if inode in ours
    }
    return any((peer, local) not in ends for local, peer in ends)


def _socket_inodes(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has exited
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")
                if kind == "socket":
                    yield inode.rstrip("]")


def _connected(pid: int) -> Iterator[tuple[str, str, str]]:
    """Local address, peer and inode of each connected socket of its network namespace."""
    for name in ("tcp", "tcp6"):
        lines: list[str] = []
        with contextlib.suppress(OSError):  # no IPv6, or it has exited
            lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        for line in lines:
            _, local, peer, state, _, _, _, _, _, inode, *_ = line.split()
            if state not in (_LISTEN, _CLOSE):
                yield local.removeprefix(_MAPPED), peer.removeprefix(_MAPPED), inode
