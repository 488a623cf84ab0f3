"""A slot's network: the host's, one of its own with a way out, or none.

HOST: the namespace that the agent is in. NONE: a namespace of its own with nothing but a loopback
interface. OWN: that, and a pair of virtual interfaces (veth(4)) to the host, which forwards and
translates addresses (nftables). So several clones of one server listen on the same ports and never
meet.

What a worker in OWN reaches: itself on 127.0.0.1, and what `egress` says of the internet, of
private networks and of servers on the host by the host's address (those that listen on the host's
127.0.0.1 are out of its reach). What reaches it: answers only. Nothing on the host, in another slot
or outside opens a connection into it; its Unix socket is the way in. IPv4 only.

Every OWN slot sees the same addresses (`INSIDE`, `GATEWAY`) on every node: an image of a server
that bound its own address, or told it to its parts, restores in any slot. Its own rule translates
them to the one address that the host knows it by.

The kernel keeps the books. An interface `pls<n>` on the host stands for the address n of the block;
making it is atomic, so no two living slots have one address, whichever agent made them. It is made
straight into the slot's namespace, and ends with it, when the last process in it does: no agent,
spawner or shim has to live for that. One table holds the rules of all slots. Forwarding is switched
on for the interfaces that need it, never for the host as a whole; where it was off, a rule keeps
the host from passing on what it did not before, and names these interfaces, so that `sweep` can
switch it off again when no slot is left.

Not pasta (passt): that is a process of 20 MiB beside every worker, it does not want to be root, and
its versions differ."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from snapshotter.egress import EVERYWHERE, GATEWAY, INSIDE, Egress, Rules
from snapshotter.errors import Unsupported
from snapshotter.linux import dns_servers, host_network, net_commands
from snapshotter.linux.dns_servers import DnsServers
from snapshotter.linux.host_network import PREFIX, TABLE, interfaces
from snapshotter.shim import netns

_LAST = 65533
"""Of a /16, without the ends: nothing may send to either."""
_SLOT_MAC, _HOST_MAC = "02:00:00:00:4d:02", "02:00:00:00:4d:01"
"""Locally administered, and known beforehand: no neighbour has to be asked for."""
_ATTEMPTS = 64
_log = logging.getLogger(__name__)


class Network(enum.StrEnum):
    """Which network a slot is in."""

    HOST = "host"
    OWN = "own"
    NONE = "none"

    @classmethod
    def of(cls, value: Network | bool) -> Network:
        """True is OWN, False HOST."""
        if isinstance(value, Network):
            return value
        return cls.OWN if value else cls.HOST


async def of_functions(wanted: Network) -> Network:
    """What functions get where that is wanted: NONE instead of OWN where this machine cannot make
    one, never the host's."""
    if wanted is Network.OWN:
        on, why = await probe()
        if not on:
            _log.warning("function_network.none reason=%s", why)
            return Network.NONE
    return wanted


async def connect(
    namespace: int, egress: Egress = EVERYWHERE, servers: DnsServers | None = None
) -> str:
    """Give the network namespace behind this descriptor its way out; the name of its interface on
    the host. Raises Unsupported, OSError.

    `servers`: of names; None = those of the host that are in reach.
    """
    net_commands.check()
    async with host_network.turn():
        rules = _rules(egress, servers)
        routes = await host_network.open_host(rules)
        name, address = await _make_pair(namespace, routes, rules)
    translate = (
        f"table ip {TABLE} {{ chain out {{ type nat hook postrouting priority srcnat; "
        f"oifname eth0 snat to {address}; }}; }}"
    )
    ends = {"inside": INSIDE, "gateway": GATEWAY, "gateway_mac": _HOST_MAC}
    await asyncio.to_thread(
        netns.furnish, namespace, "eth0", **ends, also=lambda: net_commands.nft_here(translate)
    )
    return name


def _rules(egress: Egress, servers: DnsServers | None) -> Rules:
    if servers is None:
        return egress.rules(dns_servers.find().addresses)
    return egress.rules(servers.find().addresses, servers.relay_port())


async def keep(names: Iterable[str], egress: Egress, servers: DnsServers | None = None) -> None:
    """Living networks: what they reach from now on is what `egress` and `servers` say. Raises
    Unsupported, OSError."""
    async with host_network.turn():
        if there := set(host_network.interfaces()).intersection(names):
            rules = _rules(egress, servers)
            await host_network.open_host(rules)
            for name in there:
                host_network.write(name, "route_localnet", "1" if rules.names else "0")
            await net_commands.run(
                "ip",
                "-batch",
                "-",
                stdin="".join(f"link set {name} group {rules.group}\n" for name in sorted(there)),
            )


async def sweep() -> None:
    """Take the host back to what it was, unless a slot with a network of its own lives. Where it
    cannot, it does nothing."""
    if os.geteuid() != 0 or not net_commands.has_nft():
        return
    with contextlib.suppress(Unsupported, OSError):
        async with host_network.turn():
            if not interfaces():
                await host_network.close_host()


async def probe() -> tuple[bool, str]:
    """Whether OWN works here, tried with a namespace that is gone afterwards; why not."""
    if os.geteuid() != 0:
        return (
            False,
            (
                "needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN): servers that listen on TCP share the "
                "host's network"
            ),
        )
    try:
        async with net_commands.fresh_namespace() as namespace:
            await remove([await connect(namespace)])
    except (Unsupported, OSError) as e:
        return False, str(e)
    finally:
        await sweep()
    return True, ""


async def remove(names: Iterable[str]) -> None:
    """End these networks now: that of a slot which has ended goes by itself, but when the kernel
    finds the time."""
    for name in names:
        with contextlib.suppress(Unsupported):  # it was faster
            await net_commands.run("ip", "link", "delete", name)


async def _make_pair(
    namespace: int, routes: Sequence[Mapping[str, Any]], rules: Rules
) -> tuple[str, str]:
    """Name on the host and address of interfaces with a number that no living slot has, nor had a
    moment ago.

    So late answers of its connections find nobody.
    """
    taken, refusal, mtu, block = (
        set(interfaces()),
        "",
        host_network.mtu(routes),
        host_network.block(routes),
    )
    start = random.SystemRandom().randrange(_LAST)
    free = (
        n
        for n in ((start + step) % _LAST + 1 for step in range(_LAST))
        if f"{PREFIX}{n}" not in taken
    )
    for _, number in zip(range(_ATTEMPTS), free, strict=False):
        name, address = f"{PREFIX}{number}", str(block[number])
        orders = f"""
            link add {name} group {rules.group} address {_HOST_MAC} mtu {mtu} type veth peer name eth0 address {_SLOT_MAC} mtu {mtu} \
                netns /proc/self/fd/{namespace}
            {_without_ipv6(name)}
            link set {name} up
            neigh replace {address} lladdr {_SLOT_MAC} dev {name} nud permanent
            route add {address}/32 dev {name}
        """
        try:
            await net_commands.run("ip", "-batch", "-", stdin=orders, fds=(namespace,))
        except Unsupported as e:
            if "File exists" not in str(e):
                raise
            refusal = str(e)
            continue
        host_network.write(name, "forwarding", "1")
        host_network.write(name, "rp_filter", "1")  # a worker sends under its own address only
        if rules.names:
            # what goes to the relay; the rules refuse the rest of 127.0.0.0/8
            host_network.write(name, "route_localnet", "1")
        return name, address
    raise Unsupported(refusal or f"all {_LAST} addresses for networks of workers are in use")


def _without_ipv6(device: str) -> str:
    """No link-local address: over it a slot would reach what the host has on [::], past the rules
    of table ip."""
    return f"link set {device} addrgenmode none" if os.path.exists("/proc/sys/net/ipv6") else ""
