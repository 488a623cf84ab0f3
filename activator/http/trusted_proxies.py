"""Caller addresses behind proxies: X-Forwarded-For is accepted only from the networks in
`activator.trusted_proxies`.

A proxy appends the address of its own peer to X-Forwarded-For, so the last entry comes from the
proxy and earlier ones come from that peer. Read from the end, the first address that is not a
trusted proxy's is the caller; entries that the caller wrote itself come before it. Limits per
address (attempts and calls without a key) and the audit log use this address; connections are
counted by their real peer."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, MutableMapping
from functools import lru_cache
from typing import Any

from activator.http.request import CALLER

_FORWARDED = b"x-forwarded-for"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedProxies:
    """Networks whose X-Forwarded-For is trusted. Immutable."""

    def __init__(self, networks: Iterable[str]) -> None:
        """Raises ValueError for an invalid network."""
        self._networks = [ipaddress.ip_network(network) for network in networks]

    def __repr__(self) -> str:
        return f"<TrustedProxies {', '.join(map(str, self._networks)) or 'none'}>"

    def record_caller(self, scope: MutableMapping[str, Any]) -> None:
        """Write the caller's address into a scope, where a trusted proxy reports it."""
        client = scope.get("client") if self._networks else None
        if client:
            forwarded = b",".join([value for name, value in scope["headers"] if name == _FORWARDED])
            scope[CALLER] = self.caller(client[0], forwarded.decode("latin-1"))

    def caller(self, peer: str, forwarded: str) -> str:
        """Return the caller's address, where `peer` sent `forwarded` in X-Forwarded-For; reading
        stops at an entry that is not an address."""
        caller = peer
        address = _parsed(peer)
        hops = forwarded.split(",")
        while address is not None and self._has(address) and hops:
            address = _parsed(hops.pop().strip())
            if address is not None:
                caller = str(address)
        return caller

    def _has(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


def _parsed(text: str) -> Address | None:
    """Parse an address, which some proxies write with a port; None where it is invalid."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (
        (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address
    )


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """Return the unit that an address is counted as: for IPv6 its /64, because one host may use any
    address of it; for others the address itself."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return f"{ipaddress.IPv6Address(int(found) >> 64 << 64)}/64"
