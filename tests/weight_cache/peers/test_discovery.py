"""Where peers are: a list, or a name that is asked again and again."""

from __future__ import annotations

import asyncio
import socket

import pytest

from weight_cache.peers.discovery import PeerDiscovery, split_host_port
from weight_cache.settings import WeightCacheSettings


async def test_a_list_stands_for_itself_each_once() -> None:
    assert await PeerDiscovery(["a:1", "b:2", "a:1"]).addresses() == ("a:1", "b:2")


async def test_a_name_stands_for_what_it_resolves_to() -> None:
    assert "127.0.0.1:8705" in await PeerDiscovery("dns:localhost:8705").addresses()


async def test_a_name_that_cannot_be_resolved_stands_for_what_it_stood_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    assert await PeerDiscovery("dns:nobody.invalid:8705").addresses() == ()
    members = PeerDiscovery("dns:localhost:8705")
    found = await members.addresses()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fails)
    assert await members.addresses() == found != ()


@pytest.mark.parametrize(
    "address, parts",
    [
        ("host:1", ("host", 1)),
        ("[::1]:8705", ("::1", 8705)),
        ("10.0.0.7:65535", ("10.0.0.7", 65535)),
    ],
)
def test_addresses_are_host_and_port(address: str, parts: tuple[str, int]) -> None:
    assert split_host_port(address) == parts


@pytest.mark.parametrize("wrong", ["host", "host:", ":1", "host:0", "host:65536", "host:x", ""])
def test_what_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        split_host_port(wrong)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"peers": "headless:8705"}, "expected a list of host:port, or dns:"),
        ({"peers": "dns:headless"}, "peers: .*is not host:port"),
        ({"peers": ["a:1", "b"]}, "peers: 'b' is not host:port"),
        ({"peer_listen": "8705"}, "peer_listen = '8705': expected host:port"),
        ({"peer_timeout_s": 0}, r"peer_timeout_s = 0: must be 0\.05 to 60"),
        ({"peer_uploads_at_once": 0}, "peer_uploads_at_once = 0: must be 1 to 64"),
    ],
)
def test_wrong_settings_say_what_is_right(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WeightCacheSettings(**settings)  # type: ignore[arg-type]


def test_right_settings_pass() -> None:
    WeightCacheSettings(peers="dns:agents.pilotlight.svc:8705", peer_listen="0.0.0.0:8705")
    WeightCacheSettings(peers=["a:1"], peer_listen="[::]:0")
