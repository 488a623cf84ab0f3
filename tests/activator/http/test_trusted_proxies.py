"""Whom an address is counted as."""

from __future__ import annotations

import pytest

from activator.http.trusted_proxies import network_of
from activator.quotas.unauthenticated_limit import UnauthenticatedRateLimiter
from pilotlight import errors


@pytest.mark.parametrize(
    "address,counted_as",
    [
        ("127.0.0.1", "127.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:DB8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("::1", "::/64"),
        ("", ""),
        ("not:an:address", "not:an:address"),
    ],
)
def test_an_ipv6_address_counts_as_its_network(address: str, counted_as: str) -> None:
    assert network_of(address) == counted_as


def test_strangers_of_one_network_share_their_attempts() -> None:
    limit = UnauthenticatedRateLimiter(rate_per_s=1.0)
    for n in range(2):
        limit.check(f"2001:db8::{n}", 0.0)

    with pytest.raises(errors.TooManyRequests):
        limit.guard("2001:db8::ffff", 0.0)
    with pytest.raises(errors.TooManyRequests):
        limit.check("2001:db8::fffe", 0.0)
    limit.check("2001:db8:0:1::1", 0.0)
