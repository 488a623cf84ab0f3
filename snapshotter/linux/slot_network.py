"""A slot's network: the host's, a separate one with external access, or none.

HOST: the namespace of the agent. NONE: a separate namespace with only a loopback interface. OWN:
that, and a pair of virtual interfaces (veth(4)) to the host, which forwards packets and translates
addresses (nftables). Several clones of one server can therefore listen on the same ports without
conflict.

A worker in OWN reaches itself on 127.0.0.1, and what `egress` allows of the internet, of private
networks and of servers on the host by the host's address (not those on the host's 127.0.0.1). Only
answers reach it: nothing on the host, in another slot or outside can open a connection to it;
requests arrive on its Unix socket. IPv4 only.

Every OWN slot has the same addresses (`INSIDE`, `GATEWAY`) on every node: an image of a server that
bound its own address, or passed it to its components, can be restored in any slot. A rule in the
slot translates them to the unique address that the host knows it by.

The kernel holds all state. An interface `pls<n>` on the host represents the address n of the block;
creating it is atomic, so no two live slots share an address, whichever agent created them. It is
created directly in the slot's namespace, and removed with it, when its last process exits: no
agent, spawner or shim has to run for that. One table holds the rules of all slots. Forwarding is
enabled on the interfaces that need it, never for the whole host; where it was disabled, a rule
prevents the host from forwarding other packets, and lists these interfaces, so that `sweep` can
disable it again after the last slot.

Alternative: pasta (passt) needs a process of 20 MiB beside every worker, is not designed to run as
root, and its versions differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from snapshotter.errors import Unsupported
from snapshotter.linux import dns_servers, host_network, net_commands
from snapshotter.linux.dns_servers import DnsServers
from snapshotter.linux.egress_policy import (
    EVERYWHERE,
    GATEWAY,
    INSIDE,
    PORT,
    EgressPolicy,
    EgressRules,
)
from snapshotter.linux.host_network import PREFIX, TABLE, interfaces
from snapshotter.shim.sandbox import netns

_LAST = 65533
"""Last host number of a /16; the network and broadcast addresses are unusable."""
_SLOT_MAC, _HOST_MAC = "02:00:00:00:4d:02", "02:00:00:00:4d:01"
"""Locally administered and fixed, so that no neighbor discovery is needed."""
_ATTEMPTS = 64
_SLOTS_OF_CONNECTIONS, _LEAST_CONNECTIONS = 32, 1024
"""In how many slots' parts the host's table of connections is divided; the least part."""
_NAMES_PER_S, _NAMES_BURST = 200, 400
"""Packets of one slot to the relay of DNS queries, which serves all in turn: those beyond are
dropped here, so that they do not fill its socket."""
_log = logging.getLogger(__name__)


class Network(enum.StrEnum):
    """The kind of a slot's network."""

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
    """The network that functions get: `wanted`, or NONE instead of OWN if this machine does not
    support it; never the host's."""
    if wanted is Network.OWN:
        on, why = await probe()
        if not on:
            _log.warning("function_network.none reason=%s", why)
            return Network.NONE
    return wanted


async def connect(
    namespace: int, egress: EgressPolicy = EVERYWHERE, servers: DnsServers | None = None
) -> str:
    """Connect the network namespace of this descriptor; returns the name of its interface on the
    host. Raises Unsupported, OSError.

    `servers`: name servers; None = the reachable ones of the host.
    """
    net_commands.check()
    async with host_network.turn():
        rules = _rules(egress, servers)
        routes = await host_network.open_host(rules)
        name, address = await _make_pair(namespace, routes, rules)
    ends = {"inside": INSIDE, "gateway": GATEWAY, "gateway_mac": _HOST_MAC}
    await asyncio.to_thread(
        netns.furnish, namespace, "eth0", **ends, also=lambda: _apply_rules(address)
    )
    return name


def _apply_rules(address: str) -> None:
    """Set the rules of this thread's network namespace, a slot's. Raises Unsupported."""
    try:
        net_commands.nft_here(_slot_rules(address, most=max_connections()))
    except Unsupported as e:  # a kernel without CONFIG_NFT_CONNLIMIT
        net_commands.nft_here(_slot_rules(address, most=None))
        _log.warning("network.connections_unlimited error=%s", e)


def _slot_rules(address: str, *, most: int | None) -> str:
    """nftables rules inside a slot, which nothing in it may change: its address, and its part of
    what all slots and the host share. Connections to itself are not tracked. `most`:
    connections at once; None = any number."""
    limit = "" if most is None else f"oifname eth0 ct state new ct count over {most} drop"
    return f"""
table ip {TABLE} {{
  chain own {{ type filter hook output priority raw; oifname lo notrack; }}
  chain shares {{
    type filter hook output priority filter;
    {limit}
    ip daddr {GATEWAY} meta l4proto {{ tcp, udp }} th dport {PORT} jump names
  }}
  chain names {{
    meta l4proto tcp ct state established accept
    limit rate over {_NAMES_PER_S}/second burst {_NAMES_BURST} packets drop
  }}
  chain out {{ type nat hook postrouting priority srcnat; oifname eth0 snat to {address}; }}
}}
"""


def max_connections() -> int:
    """Connections and flows of one slot that the host tracks at once, ended TCP connections not
    counted: a part of what the host can track for all (`nf_conntrack_max`). Beyond it new ones are
    dropped."""
    try:
        most = int(Path("/proc/sys/net/netfilter/nf_conntrack_max").read_text())
    except (OSError, ValueError):
        return _LEAST_CONNECTIONS
    return max(most // _SLOTS_OF_CONNECTIONS, _LEAST_CONNECTIONS)


def _rules(egress: EgressPolicy, servers: DnsServers | None) -> EgressRules:
    if servers is None:
        return egress.rules(dns_servers.find().addresses)
    return egress.rules(servers.find().addresses, servers.relay_port())


async def keep(
    names: Iterable[str], egress: EgressPolicy, servers: DnsServers | None = None
) -> None:
    """Apply `egress` and `servers` to live networks. Raises Unsupported, OSError."""
    async with host_network.turn():
        if live := set(host_network.interfaces()).intersection(names):
            rules = _rules(egress, servers)
            await host_network.open_host(rules)
            for name in live:
                host_network.write(name, "route_localnet", "1" if rules.names else "0")
            await net_commands.run(
                "ip",
                "-batch",
                "-",
                stdin="".join(f"link set {name} group {rules.group}\n" for name in sorted(live)),
            )


async def sweep() -> None:
    """Restore the host's network, unless a slot with a separate network is live. Does nothing if it
    cannot."""
    if os.geteuid() != 0 or not net_commands.has_nft():
        return
    with contextlib.suppress(Unsupported, OSError):
        async with host_network.turn():
            if not interfaces():
                await host_network.close_host()


async def probe() -> tuple[bool, str]:
    """Whether OWN works here, tested with a temporary namespace; and the reason if not."""
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
    """Remove these networks now: the kernel removes the network of an ended slot later,
    asynchronously."""
    for name in names:
        with contextlib.suppress(Unsupported):  # the kernel has removed it already
            await net_commands.run("ip", "link", "delete", name)


async def _make_pair(
    namespace: int, routes: Sequence[Mapping[str, Any]], rules: EgressRules
) -> tuple[str, str]:
    """Create interfaces with a number that no live slot has; returns the name on the host and the
    address.

    The number is chosen at random, so that late answers to a recently removed slot reach no other
    one.
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
        host_network.write(name, "rp_filter", "1")  # a worker may send from its own address only
        if rules.names:
            # for packets to the relay; the rules reject the rest of 127.0.0.0/8
            host_network.write(name, "route_localnet", "1")
        return name, address
    raise Unsupported(refusal or f"all {_LAST} addresses for networks of workers are in use")


def _without_ipv6(device: str) -> str:
    """Disables the link-local address, which would give the slot access to services on [::] of the
    host, bypassing the rules of table ip."""
    return f"link set {device} addrgenmode none" if os.path.exists("/proc/sys/net/ipv6") else ""
