"""Network namespaces of slots, configured from within: by a slot's first processes before user code
exists, and by the agent.

Requires root. `unshare` and `use_name_servers` require a single-threaded caller. Sources:
unshare(2), setns(2), network_namespaces(7), netdevice(7), arp(7), rtnetlink's predecessor in
net/route.h; three external programs would take ten times as long.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable

from snapshotter.shim.sandbox.mount import BIND, mount

_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_IFREQ = struct.Struct("16sh22x")
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCADDRT, _SIOCSARP = 0x8916, 0x891C, 0x890B, 0x8955
_ADDRESS = struct.Struct("HH4s8x")
"""struct sockaddr_in."""
_IF_ADDRESS = struct.Struct("16s16s8x")
_ROUTE = struct.Struct("@L16s16s16sHhLPhPLLH")
"""struct rtentry."""
_NEIGHBOUR = struct.Struct("16sH6s8xi16s16s")
"""struct arpreq."""
_RTF_UP, _RTF_GATEWAY, _ATF_COM, _ATF_PERM, _ARPHRD_ETHER = 0x1, 0x2, 0x2, 0x4, 1
_NO_LINK_LOCAL = "1"
"""Value of net.ipv6.conf.*.addr_gen_mode: IN6_ADDR_GEN_MODE_NONE."""
RESOLVER = "/etc/resolv.conf"

_libc = ctypes.CDLL(None, use_errno=True)


def unshare() -> None:
    """Move to a new network namespace, with 127.0.0.1 up. Raises OSError."""
    if _libc.unshare(_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare of the network: {os.strerror(code)}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = _IFREQ.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0)))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))


def furnish(
    namespace: int,
    device: str,
    *,
    inside: str,
    gateway: str,
    gateway_mac: str,
    also: Callable[[], object] = lambda: None,
) -> None:
    """Configure a device in that namespace: its address (of a /30), and a default route through a
    gateway with a static ARP entry.

    Callable from any thread: a temporary thread enters the namespace, and calls `also`. Raises
    OSError, and the errors of `also`.
    """
    failed: list[Exception] = []

    def enter_and_furnish() -> None:
        try:
            if _libc.setns(namespace, _NEWNET) != 0:
                code = ctypes.get_errno()
                raise OSError(code, f"setns to a slot's network: {os.strerror(code)}")
            _furnish(device.encode(), inside, gateway, bytes.fromhex(gateway_mac.replace(":", "")))
            also()
        except Exception as e:  # noqa: BLE001 - raised again by the caller's thread
            failed.append(e)

    thread = threading.Thread(target=enter_and_furnish, name="furnish network")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _furnish(device: bytes, inside: str, gateway: str, gateway_mac: bytes) -> None:
    mode = f"/proc/sys/net/ipv6/conf/{device.decode()}/addr_gen_mode"
    # a link-local address would give the slot access to services on [::] of the host, bypassing the
    # rules of table ip
    if os.path.exists(mode):
        with open(mode, "w") as f:
            f.write(_NO_LINK_LOCAL)
    anywhere, way_out = _address("0.0.0.0"), _address(gateway)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFADDR, _IF_ADDRESS.pack(device, _address(inside)))
        fcntl.ioctl(
            any_socket, _SIOCSIFNETMASK, _IF_ADDRESS.pack(device, _address("255.255.255.252"))
        )
        flags = _IFREQ.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, _IFREQ.pack(device, 0)))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _IFREQ.pack(device, flags | _IFF_UP))
        known = _NEIGHBOUR.pack(
            way_out, _ARPHRD_ETHER, gateway_mac, _ATF_COM | _ATF_PERM, bytes(16), device
        )
        fcntl.ioctl(any_socket, _SIOCSARP, known)
        route = _ROUTE.pack(
            0, anywhere, way_out, anywhere, _RTF_UP | _RTF_GATEWAY, 0, 0, 0, 0, 0, 0, 0, 0
        )
        fcntl.ioctl(any_socket, _SIOCADDRT, route)


def add_to_loopback(address: str) -> None:
    """Give the loopback interface of this network namespace a second address, for servers that were
    bound to it elsewhere. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.255")):
            fcntl.ioctl(any_socket, request, _IF_ADDRESS.pack(b"lo:slot", _address(value)))


def _address(text: str) -> bytes:
    return _ADDRESS.pack(socket.AF_INET, 0, socket.inet_aton(text))


def use_name_servers(text: str, file: str) -> None:
    """Mount `text` as /etc/resolv.conf in this mount namespace; `file` is its storage. Raises
    OSError."""
    target = os.path.realpath(RESOLVER)
    if not os.path.exists(target):
        return
    with open(file, "w") as f:
        f.write(text)
    os.chmod(file, 0o644)
    mount(file, target, None, BIND)
