"""Who calls through a proxy: the proxies that the operator names are believed, nobody else is
(`activator.trusted_proxies`).

A proxy appends the address of its own peer to X-Forwarded-For, so the last entry is its word and
the ones before it are what that peer said. Read from the end, the first address that is no trusted
proxy's is the caller: whatever it wrote itself stands before that. What is counted by address
(attempts without a key, calls without a key) counts by this one, and the audit log has it;
connections count by their real peer."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, MutableMapping
from typing import Any

from activator.http.request import CALLER

_FORWARDED = b"x-forwarded-for"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedProxies:
    """Networks whose word counts. Immutable."""

    def __init__(self, networks: Iterable[str]) -> None:
        """Raises ValueError for one that is no network."""
        self._networks = [ipaddress.ip_network(network) for network in networks]

    def __repr__(self) -> str:
        return f"<TrustedProxies {', '.join(map(str, self._networks)) or 'none'}>"

    def note_caller(self, scope: MutableMapping[str, Any]) -> None:
        """Write the caller's address into a scope, where a trusted proxy says it."""
        client = scope.get("client") if self._networks else None
        if client:
            said = b",".join([value for name, value in scope["headers"] if name == _FORWARDED])
            scope[CALLER] = self.caller(client[0], said.decode("latin-1"))

    def caller(self, peer: str, said: str) -> str:
        """The caller's address, where `peer` sent us `said` in X-Forwarded-For; of what is no
        address on, nobody is believed."""
        caller = peer
        address = _parsed(peer)
        hops = said.split(",")
        while address is not None and self._has(address) and hops:
            address = _parsed(hops.pop().strip())
            if address is not None:
                caller = str(address)
        return caller

    def _has(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


def _parsed(text: str) -> Address | None:
    """An address, which some proxies write with a port; None where it is none."""
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
