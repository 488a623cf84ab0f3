"""Limits the requests that one network causes at issuers and that these refuse: an issuer that sees
many of them from the platform's client may refuse it, and with it everybody's sign-ins."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pilotlight.errors import TooManyRequests

MAX_REFUSED: Final = 20
"""Refused attempts of a network at once."""
REGAIN_S: Final = 6.0
"""After which a network has one more."""
MAX_NETWORKS: Final = 10_000
"""Networks that are remembered; the one that was seen longest ago is forgotten first."""


class AttemptLimit:
    """The attempts of networks. Owner: the event loop; every change is synchronous."""

    def __init__(self) -> None:
        self._used: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By network: attempts, as of a time."""

    def __repr__(self) -> str:
        return f"<AttemptLimit {len(self._used)} networks>"

    @contextmanager
    def attempt(self, address: str, now: float) -> Iterator[None]:
        """Count an attempt, unless it succeeds. Raises TooManyRequests."""
        network = network_of(address)
        used = self._count(network, now)
        if used + 1 > MAX_REFUSED:
            raise TooManyRequests(
                "the issuer refused too many sign-ins of this address: try again later",
                retry_after_s=REGAIN_S,
            )
        self._store(network, used + 1, now)
        yield
        self._store(network, max(0.0, self._count(network, now) - 1), now)

    def _count(self, network: str, now: float) -> float:
        used, at = self._used.get(network, (0.0, now))
        return max(0.0, used - max(0.0, now - at) / REGAIN_S)

    def _store(self, network: str, used: float, now: float) -> None:
        self._used[network] = used, now
        self._used.move_to_end(network)
        if not used:
            del self._used[network]
        elif len(self._used) > MAX_NETWORKS:
            self._used.popitem(last=False)


def network_of(address: str) -> str:
    """Return the address as which a client is counted: IPv6 networks of one client have /64."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is None:
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else ip)
