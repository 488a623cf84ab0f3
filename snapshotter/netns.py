"""A network namespace of its own, from within: what a slot's first processes do before user code is near.

Single-threaded callers only; root. Sources: unshare(2), network_namespaces(7), netdevice(7).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

from snapshotter.mount import BIND, mount

_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_IFREQ = struct.Struct("16sh22x")
RESOLVER = "/etc/resolv.conf"

_libc = ctypes.CDLL(None, use_errno=True)


def unshare() -> None:
    """Leave the host's network for an empty one, with 127.0.0.1 up. Raises OSError."""
    if _libc.unshare(_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare of the network: {os.strerror(code)}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = _IFREQ.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0)))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))


def use_name_servers(text: str, file: str) -> None:
    """Show `text` as /etc/resolv.conf in this mount namespace; `file` is where it is kept. Raises OSError."""
    target = os.path.realpath(RESOLVER)
    if not os.path.exists(target):
        return
    with open(file, "w") as f:
        f.write(text)
    os.chmod(file, 0o644)
    mount(file, target, None, BIND)
