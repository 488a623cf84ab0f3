"""Callers who share an address: good keys beside wrong ones, and whom a trusted proxy speaks
for."""

from __future__ import annotations

import pytest

from activator.http.trusted_proxies import TrustedProxies
from activator.settings import ActivatorSettings
from tests.activator.conftest import KEY, Edge
from tests.fakes.fake_controller import FakeController
from tests.fakes.routes import route_of, spec_of

RATE = 0.5
"""One attempt, and the next one two seconds later, which do not pass here."""
PROXY = "10.0.0.5"


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(
        unauthenticated_per_s=RATE, trusted_proxies=["127.0.0.1", "10.0.0.0/8"]
    )


@pytest.fixture(autouse=True)
def _no_time_passes(edge: Edge) -> None:
    edge.stop_the_clock_of_strangers()


async def _guess(edge: Edge, times: int = 3, *, forwarded: str = "") -> int:
    """Status of the last of so many wrong keys."""
    headers = {"x-forwarded-for": forwarded} if forwarded else {}
    for _ in range(times):
        answer = await edge.call(key="pl_wrong", json={"x": 1}, headers=headers)
    return answer.status_code


async def test_wrong_keys_of_one_address_keep_no_good_key_out(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(route_of(spec_of()))
    edge.add_key("pl_never_used")
    assert await _guess(edge) == 429

    assert (await edge.call(key="pl_never_used", json={"x": 1})).status_code == 200
    headers = {"authorization": f"Bearer {KEY}"}
    assert (await edge.client.get(f"{edge.url}/v1/apps", headers=headers)).status_code == 200
    assert await _guess(edge, 1) == 429


async def test_an_expired_key_counts_as_a_wrong_one(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    edge.add_key("pl_old", expires_at=1.0)

    assert [(await edge.call(key="pl_old", json={"x": 1})).status_code for _ in range(2)] == [
        401,
        429,
    ]


async def test_a_change_of_one_key_forgets_no_other_keys_proof(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    edge.add_tenant("other", tenant="t-other")
    edge.add_key("pl_other", tenant="t-other")
    for key in (KEY, "pl_other"):
        edge.table.authenticate(f"Bearer {key}".encode(), 0.0)

    edge.add_key("pl_other", tenant="t-other", expires_at=9e9)
    assert edge.table.is_known(f"Bearer {KEY}".encode())
    assert not edge.table.is_known(b"Bearer pl_other")
    edge.add_tenant("renamed", tenant="t-other")
    assert edge.table.is_known(f"Bearer {KEY}".encode())
    edge.table.authenticate(b"Bearer pl_other", 0.0)
    edge.add_tenant("again", tenant="t-other")
    assert not edge.table.is_known(b"Bearer pl_other")


async def test_strangers_behind_a_trusted_proxy_are_counted_one_by_one(edge: Edge) -> None:
    assert await _guess(edge, forwarded="203.0.113.1") == 429

    assert await _guess(edge, 1, forwarded="203.0.113.2") == 401
    # what it says of itself changes nothing
    assert await _guess(edge, 1, forwarded=f"198.51.100.9, 203.0.113.1, {PROXY}") == 429


async def test_connections_count_by_their_real_peer(edge: Edge) -> None:
    await _guess(edge, 1, forwarded="203.0.113.1")

    assert list(edge.limits.by_address) == ["127.0.0.1"]


async def test_the_controller_is_told_the_caller_last_and_its_proxy_before(
    edge: Edge, controller: FakeController
) -> None:
    await edge.client.get(
        f"{edge.url}/v1/apps",
        headers={"authorization": f"Bearer {KEY}", "x-forwarded-for": "203.0.113.1"},
    )

    assert controller.seen[0].headers["x-forwarded-for"] == "203.0.113.1"


@pytest.mark.parametrize(
    "peer,said,caller",
    [
        pytest.param("203.0.113.7", "198.51.100.1", "203.0.113.7", id="a peer that is no proxy"),
        pytest.param(PROXY, "", PROXY, id="nothing said"),
        pytest.param(PROXY, "198.51.100.1", "198.51.100.1", id="one hop"),
        pytest.param(
            PROXY,
            "1.1.1.1, 198.51.100.1",
            "198.51.100.1",
            id="a caller that writes the header itself",
        ),
        pytest.param(PROXY, "198.51.100.1, 10.9.9.9", "198.51.100.1", id="two proxies"),
        pytest.param(PROXY, "10.1.1.1, 10.9.9.9", "10.1.1.1", id="only proxies"),
        pytest.param(PROXY, "198.51.100.1, nonsense", PROXY, id="no address"),
        pytest.param(PROXY, "198.51.100.1:4711", "198.51.100.1", id="with a port"),
        pytest.param(PROXY, "[2001:db8::1]:4711", "2001:db8::1", id="IPv6 with a port"),
        pytest.param(
            "::ffff:10.0.0.5", "2001:db8::1", "2001:db8::1", id="a proxy that is mapped into IPv6"
        ),
        pytest.param("unix", "198.51.100.1", "unix", id="a peer without an address"),
    ],
)
def test_the_last_address_that_is_no_proxys_is_the_callers(
    peer: str, said: str, caller: str
) -> None:
    assert TrustedProxies(["10.0.0.0/8"]).caller(peer, said) == caller
    assert TrustedProxies([]).caller(peer, said) == peer


@pytest.mark.parametrize(
    "wrong,says",
    [("10.0.0.1/8", "host bits"), ("proxy.example", "write networks"), ("::/0", "would trust")],
)
def test_a_wrong_network_is_refused_by_name(wrong: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"trusted_proxies = '{wrong}': .*{says}"):
        ActivatorSettings(trusted_proxies=["127.0.0.1", wrong])


def test_the_address_of_a_scope_without_a_peer_stays_unknown() -> None:
    scope: dict[str, object] = {"client": None, "headers": [(b"x-forwarded-for", b"203.0.113.1")]}
    TrustedProxies(["10.0.0.0/8"]).record_caller(scope)
    assert scope == {"client": None, "headers": [(b"x-forwarded-for", b"203.0.113.1")]}
