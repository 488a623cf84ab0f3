"""Detects when another program removes the slots' rules: `nft flush ruleset`, as a restart of
nftables.service does.

Until the rules are restored, slots can reach the host's own addresses. Sources: netlink(7),
linux/netfilter/nfnetlink.h, nf_tables.h.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Callable, Iterator

_NETLINK_NETFILTER, _SOL_NETLINK, _ADD_MEMBERSHIP = 12, 270, 1
_CHANGES_OF_NFTABLES = 7
"""NFNLGRP_NFTABLES."""
_TABLE_DELETED = 10 << 8 | 2
"""NFNL_SUBSYS_NFTABLES, NFT_MSG_DELTABLE."""
_HEADER, _FAMILY, _ATTRIBUTE = struct.Struct("=IHHII"), 4, struct.Struct("=HH")
"""struct nlmsghdr; the size of struct nfgenmsg behind it; struct nlattr."""
_TABLE_NAME = 1
"""NFTA_TABLE_NAME."""
_READ_BYTES = 64 * 1024


class NftWatch:
    """Calls `on_removed` in the event loop when a table of this name is removed by any program.
    Must be closed."""

    def __init__(self, table: str, on_removed: Callable[[], None]) -> None:
        """Watch the network namespace of this thread. Raises OSError without CAP_NET_ADMIN, or if
        the kernel has no nftables."""
        self._table = table.encode() + b"\0"
        self._on_removed = on_removed
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(
            socket.AF_NETLINK,
            socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC,
            _NETLINK_NETFILTER,
        )
        try:
            self._socket.bind((0, 0))
            self._socket.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, _CHANGES_OF_NFTABLES)
        except OSError:
            self._socket.close()
            raise
        self._loop.add_reader(self._socket, self._read)

    def close(self) -> None:
        """Stop watching."""
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        try:
            is_removed = any(
                _names(message, self._table)
                for message in _messages(self._socket.recv(_READ_BYTES))
            )
        except OSError as e:
            if e.errno in (errno.EAGAIN, errno.EINTR):
                return
            # messages were lost: the removal may have been among them
            is_removed = e.errno == errno.ENOBUFS
        if is_removed:
            self._on_removed()


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Types and bodies of the messages."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size:
            return
        yield kind, data[at + _HEADER.size + _FAMILY : at + length]
        at += _padded(length)


def _names(message: tuple[int, bytes], table: bytes) -> bool:
    kind, body = message
    at = 0
    while kind == _TABLE_DELETED and at + _ATTRIBUTE.size <= len(body):
        length, attribute = _ATTRIBUTE.unpack_from(body, at)
        if attribute == _TABLE_NAME:
            return body[at + _ATTRIBUTE.size : at + length] == table
        at += max(_padded(length), _ATTRIBUTE.size)
    return False


def _padded(length: int) -> int:
    """NLMSG_ALIGN."""
    return (length + 3) & ~3
