"""Where who has a network of its own may connect to: the internet, and of private networks what the
operator allows.

Pure. The host's own addresses are closed unless allowed. So are the networks in DENIED: private
ones (RFC 1918), shared address space (RFC 6598, where slots have theirs), link-local, multicast and
reserved ones (RFC 6890). Name servers of the host are open at port 53. Where functions have the
host's network (`snapshotter.function_network`), those of them that get one of their own, because
they listen on TCP, reach whatever the host reaches (EVERYWHERE): a function must not lose its
database between a COLD start and a RESTORE."""

from __future__ import annotations

import ipaddress
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

INSIDE, GATEWAY = "169.254.77.2", "169.254.77.1"
"""Of a slot, and of the host as the slot sees it: link-local, so they name nothing anywhere else
(RFC 3927)."""
METADATA = "169.254.169.254"
"""Where clouds hand out the machine's own credentials, which open the store of snapshots among
other things: no tenant's business. Only a name server there is open."""
PORT = 53
"""Of name servers."""
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
class Egress:
    """Networks that are closed, and what of them (or of the host's addresses) is open all the same,
    to all or `on_request`."""

    denied: tuple[ipaddress.IPv4Network, ...] = tuple(map(ipaddress.IPv4Network, DENIED))
    allowed: tuple[ipaddress.IPv4Network, ...] = ()
    on_request: tuple[ipaddress.IPv4Network, ...] = ()

    @classmethod
    def of(
        cls, denied: Iterable[str], allowed: Iterable[str], on_request: Iterable[str] = ()
    ) -> Self:
        """Parse the settings' lists. Raises ValueError that names key and value."""
        lists = {
            "egress_denied": denied,
            "egress_allowed": allowed,
            "egress_on_request": on_request,
        }
        return cls(*(networks(key, texts) for key, texts in lists.items()))

    def requested(self, texts: Iterable[str]) -> Egress:
        """For a function that asks for these networks. Raises ValueError for one that the operator
        does not open, naming what is open."""
        asked = networks("egress", texts)
        for network in asked:
            if not any(network.subnet_of(each) for each in (*self.on_request, *self.allowed)):
                there = ", ".join(map(str, self.on_request)) or "nothing"
                raise ValueError(
                    f"egress: {network} is not for functions to ask for; "
                    f"snapshotter.egress_on_request has {there}"
                )
        return replace(self, allowed=tuple(ipaddress.collapse_addresses((*self.allowed, *asked))))

    def rules(self, resolvers: Iterable[str], relay_port: int | None = None) -> Rules:
        """For slots that have these name servers; `relay_port`: of 127.0.0.1, where what they ask
        their gateway goes; None = nowhere."""
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
            return Rules(to_host=(*to_host, "reject"), beyond=beyond)
        both = ("udp", "tcp")
        arrived = [
            f"ip daddr 127.0.0.1 {protocol} dport {relay_port} ct status dnat accept"
            for protocol in both
        ]
        names = tuple(
            f"ip daddr {GATEWAY} {protocol} dport {PORT} dnat to 127.0.0.1:{relay_port}"
            for protocol in both
        )
        return Rules(to_host=(*arrived, *to_host, "reject"), beyond=beyond, names=names)


PUBLIC = Egress()
EVERYWHERE = Egress((), (ipaddress.IPv4Network("0.0.0.0/0"),))


@dataclass(frozen=True, slots=True)
class Rules:
    """Of nftables, for packets of a slot `to_host`'s own addresses, and `beyond`; `names`: for what
    it asks its gateway, before either.

    Slots with the same rules share a group (`ip link`).
    """

    to_host: tuple[str, ...]
    beyond: tuple[str, ...]
    names: tuple[str, ...] = ()

    @property
    def group(self) -> int:
        """A number that only these rules have, 1 to 2^31 - 1, as ip(8) takes it."""
        return zlib.crc32(repr(self).encode()) >> 1 or 1

    @property
    def chain(self) -> str:
        """The one that is made last."""
        return f"beyond_{self.group}"

    def orders(self, table: str, prefix: str) -> str:
        """For nft(8): chains for the group, and their entry in the maps of `table` that lead there.
        Idempotent.

        `prefix`: of the names of the slots' interfaces.
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
    """Parse networks and addresses; none lies in another. Raises ValueError that names `key` and
    the value."""
    found = []
    for text in texts:
        try:
            found.append(ipaddress.IPv4Network(str(text)))
        except ValueError as e:
            raise ValueError(
                f"{key}: {text!r}: {e}; write IPv4 networks or addresses, like 10.0.0.0/8 or "
                f"192.168.1.10"
            ) from e
    return tuple(ipaddress.collapse_addresses(found))  # nftables takes no overlaps


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
