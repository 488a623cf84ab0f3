"""Egress policy of functions and builds with their own network: the internet, and the private
networks that the operator allows.

Pure. The host's own addresses are denied unless allowed. So are the networks in DENIED: private
(RFC 1918), shared address space (RFC 6598, which slots use), link-local, multicast and reserved
networks (RFC 6890). The host's name servers are allowed at port 53. If functions use the host's
network (`snapshotter.function_network`), functions that get their own network because they listen
on TCP may reach whatever the host reaches (EVERYWHERE): a function must not lose its database
between a COLD start and a RESTORE.
"""

from __future__ import annotations

import ipaddress
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

INSIDE, GATEWAY = "169.254.77.2", "169.254.77.1"
"""Addresses of a slot, and of the host as the slot sees it. Both are link-local, so they mean
nothing outside the slot (RFC 3927)."""
METADATA = "169.254.169.254"
"""Cloud metadata service. It returns the machine's credentials, which also open the snapshot store,
so tenants must not reach it. Only a name server at this address is allowed."""
PORT = 53
"""DNS port."""
DENIED = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "224.0.0.0/3",
)


@dataclass(frozen=True, slots=True)
class EgressPolicy:
    """Denied networks, and exceptions to them (or to the host's addresses): `allowed` for all,
    `on_request` for functions that request them."""

    denied: tuple[ipaddress.IPv4Network, ...] = tuple(map(ipaddress.IPv4Network, DENIED))
    allowed: tuple[ipaddress.IPv4Network, ...] = ()
    on_request: tuple[ipaddress.IPv4Network, ...] = ()

    @classmethod
    def of(
        cls, denied: Iterable[str], allowed: Iterable[str], on_request: Iterable[str] = ()
    ) -> Self:
        """Parse the settings' lists. Raises ValueError that names the key and the value."""
        lists = {
            "egress_denied": denied,
            "egress_allowed": allowed,
            "egress_on_request": on_request,
        }
        return cls(*(networks(key, texts) for key, texts in lists.items()))

    def requested(self, texts: Iterable[str]) -> EgressPolicy:
        """The policy of a function that requests these networks. Raises ValueError for a network
        that the operator does not offer, listing those offered."""
        wanted = networks("egress", texts)
        for network in wanted:
            if not any(network.subnet_of(each) for each in (*self.on_request, *self.allowed)):
                offered = ", ".join(map(str, self.on_request)) or "nothing"
                raise ValueError(
                    f"egress: {network} is not available to functions; "
                    f"snapshotter.egress_on_request allows {offered}"
                )
        return replace(self, allowed=tuple(ipaddress.collapse_addresses((*self.allowed, *wanted))))

    def rules(self, resolvers: Iterable[str], relay_port: int | None = None) -> EgressRules:
        """The rules of slots that use these name servers. `relay_port`: port on 127.0.0.1 to which
        DNS queries to the gateway are redirected; None: no redirection."""
        denied, allowed, servers = (
            _members(self.denied),
            _members(self.allowed),
            _members(sorted(set(resolvers))),
        )
        to_host = [
            "ct state established,related accept",
            *(
                [f"meta l4proto {{ tcp, udp }} th dport {PORT} ip daddr {servers} accept"]
                if servers
                else []
            ),
            f"ip daddr {METADATA} reject",
            *([f"ip daddr {allowed} accept"] if allowed else []),
        ]
        beyond = (*to_host, *([f"ip daddr {denied} reject"] if denied else []), "accept")
        if relay_port is None:
            return EgressRules(to_host=(*to_host, "reject"), beyond=beyond)
        both = ("udp", "tcp")
        arrived = [
            f"ip daddr 127.0.0.1 {protocol} dport {relay_port} ct status dnat accept"
            for protocol in both
        ]
        names = tuple(
            f"ip daddr {GATEWAY} {protocol} dport {PORT} dnat to 127.0.0.1:{relay_port}"
            for protocol in both
        )
        return EgressRules(to_host=(*arrived, *to_host, "reject"), beyond=beyond, names=names)


PUBLIC = EgressPolicy()
EVERYWHERE = EgressPolicy((), (ipaddress.IPv4Network("0.0.0.0/0"),))


@dataclass(frozen=True, slots=True)
class EgressRules:
    """nftables rules for packets of a slot: to the host's own addresses (`to_host`), to all others
    (`beyond`), and for DNS queries to the gateway, evaluated first (`names`).

    Slots with equal rules share an interface group (`ip link`).
    """

    to_host: tuple[str, ...]
    beyond: tuple[str, ...]
    names: tuple[str, ...] = ()

    @property
    def group(self) -> int:
        """Interface group of these rules, 1 to 2^31 - 1, as ip(8) accepts it."""
        return zlib.crc32(repr(self).encode()) >> 1 or 1

    @property
    def chain(self) -> str:
        """The chain that `orders` creates last."""
        return f"beyond_{self.group}"

    def orders(self, table: str, prefix: str) -> str:
        """Commands for nft(8): chains of the group, and their entries in the maps of `table`.
        Idempotent.

        `prefix`: prefix of the slots' interface names.
        """
        lines, chains = [], {"to_host": self.to_host, "beyond": self.beyond}
        if self.names:
            chains = {"names": self.names, **chains}
            lines = [
                f"add map ip {table} names {{ type devgroup : verdict; }}",
                (
                    f"add chain ip {table} prerouting {{ type nat hook prerouting priority dstnat; "
                    f"policy accept; }}"
                ),
                f"flush chain ip {table} prerouting",
                f'add rule ip {table} prerouting iifname "{prefix}*" iifgroup vmap @names',
            ]
        for name, rules in chains.items():
            chain = f"{name}_{self.group}"
            lines += [f"add chain ip {table} {chain}", f"flush chain ip {table} {chain}"]
            lines += [f"add rule ip {table} {chain} {rule}" for rule in rules]
            lines += [f"add element ip {table} {name} {{ {self.group} : jump {chain} }}"]
        return "\n".join([*lines, ""])


def _members(networks: Iterable[object]) -> str:
    texts = [str(network) for network in networks]
    return f"{{ {', '.join(texts)} }}" if texts else ""


def networks(key: str, texts: Iterable[str]) -> tuple[ipaddress.IPv4Network, ...]:
    """Parse networks and addresses and merge overlaps. Raises ValueError that names `key` and the
    value."""
    found = []
    for text in texts:
        try:
            found.append(ipaddress.IPv4Network(str(text)))
        except ValueError as e:
            raise ValueError(
                f"{key}: {text!r}: {e}; write IPv4 networks or addresses, like 10.0.0.0/8 or "
                f"192.168.1.10"
            ) from e
    return tuple(ipaddress.collapse_addresses(found))  # nftables rejects overlaps


def resolvers(lines: Sequence[str]) -> list[str]:
    """IPv4 addresses of the name servers in lines of resolv.conf(5)."""
    words = [line.split() for line in lines]
    return [w[1] for w in words if len(w) > 1 and w[0] == "nameserver" and _is_ipv4(w[1])]


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True
