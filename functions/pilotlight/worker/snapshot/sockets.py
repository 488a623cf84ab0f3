"""The kernel's list of sockets, by inode: /proc/net for TCP and UDP, sock_diag(7) for Unix sockets,
whose peers /proc does not show."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import dataclass

_LISTEN, _CLOSE, _ESTABLISHED = 0x0A, 0x07, 0x01
"""TCP states (include/net/tcp_states.h), which the kernel also uses for Unix and UDP sockets."""
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_NLM_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_UDIAG_SHOW_NAME, _UDIAG_SHOW_PEER = 0x01, 0x04
_UNIX_DIAG_NAME, _UNIX_DIAG_PEER = 0, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket:
    """One socket.

    Attributes:
        kind: `TCP`, `UDP` or `Unix`.
        local: `127.0.0.1:80`, or a path; "" for none.
        peer: the peer's address, or its path for Unix sockets; "" if not connected.
        peer_inode: the other end of a Unix socket; 0 for none, or if it is outside.
        listening: whether it accepts connections.
    """

    kind: str
    local: str
    peer: str
    peer_inode: int
    listening: bool
    connected: bool


def table() -> dict[int, Socket]:
    """All sockets of this network namespace that have an address or a peer, by inode. Sockets that
    cannot be listed are omitted."""
    found: dict[int, Socket] = {}
    for kind, name in (("TCP", "tcp"), ("TCP", "tcp6"), ("UDP", "udp"), ("UDP", "udp6")):
        found.update(_internet(kind, name))
    found.update(_unix())
    return found


def is_inside(one: Socket, everything: Mapping[int, Socket], ours: Collection[int]) -> bool:
    """Whether the other end of a connection is among `ours` (inodes), too."""
    if one.kind == "Unix":
        return one.peer_inode in ours
    return any(
        inode in ours
        and other.kind == one.kind
        and (other.local, other.peer) == (one.peer, one.local)
        for inode, other in everything.items()
    )


def _internet(kind: str, name: str) -> Iterator[tuple[int, Socket]]:
    try:
        with open(f"/proc/self/net/{name}") as f:
            lines = f.read().splitlines()[1:]
    except OSError:  # no IPv6
        return
    for line in lines:
        _, local, peer, state, _, _, _, _, _, inode, *_ = line.split()
        code = int(state, 16)
        listening = kind == "TCP" and code == _LISTEN
        connected = code not in (_LISTEN, _CLOSE)
        yield (
            int(inode),
            Socket(
                kind=kind,
                local=_address(local),
                peer=_address(peer) if connected else "",
                peer_inode=0,
                listening=listening,
                connected=connected,
            ),
        )


def _address(text: str) -> str:
    address, _, port = text.partition(":")
    # each 32-bit word is in the machine's byte order
    words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
    ip = ipaddress.ip_address(b"".join(words))
    if isinstance(ip, ipaddress.IPv6Address):
        return f"{ip.ipv4_mapped}:{int(port, 16)}" if ip.ipv4_mapped else f"[{ip}]:{int(port, 16)}"
    return f"{ip}:{int(port, 16)}"


def _unix() -> Iterator[tuple[int, Socket]]:
    listed = list(_query_unix_sockets())
    names = {inode: name for inode, _, name, _ in listed}
    for inode, state, name, peer in listed:
        yield (
            inode,
            Socket(
                kind="Unix",
                local=name,
                peer=names.get(peer, "") if peer else "",
                peer_inode=peer,
                listening=state == _LISTEN,
                connected=bool(peer) or state == _ESTABLISHED,
            ),
        )


def _query_unix_sockets() -> Iterator[tuple[int, int, str, int]]:
    """(inode, state, name, peer's inode) of all Unix sockets: unix_diag(7)."""
    request = struct.pack(
        "=BBHIIIII",
        socket.AF_UNIX,
        0,
        0,
        0xFFFFFFFF,
        0,
        _UDIAG_SHOW_NAME | _UDIAG_SHOW_PEER,
        0xFFFFFFFF,
        0xFFFFFFFF,
    )
    header = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_REQUEST_DUMP, 1, 0)
    try:
        with socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
        ) as asks:
            asks.settimeout(2.0)  # the kernel answers at once
            asks.send(header + request)
            while (data := asks.recv(1 << 16)) and (yield from _rows(data)):
                pass
    except OSError:
        return


def _rows(data: bytes) -> Generator[tuple[int, int, str, int], None, bool]:
    """The rows of one response; returns whether more responses follow."""
    at = 0
    while at + 16 <= len(data):
        length, kind = struct.unpack_from("=IH", data, at)
        if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < 16:
            return False
        _, _, state, _, inode = struct.unpack_from("=BBBBI", data, at + 16)
        attributes = dict(_attributes(data[at + 32 : at + length]))
        name = attributes.get(_UNIX_DIAG_NAME, b"")
        peer = attributes.get(_UNIX_DIAG_PEER, b"\0\0\0\0")
        yield (
            inode,
            state,
            ("@" + os.fsdecode(name[1:]) if name[:1] == b"\0" else os.fsdecode(name)),
            struct.unpack("=I", peer)[0],
        )
        at += (length + 3) & ~3
    return True


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            return
        yield kind, data[at + 4 : at + length]
        at += (length + 3) & ~3
