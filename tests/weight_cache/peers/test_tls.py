"""Where the platform has certificates, nodes show them to each other before anything else is
said."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from pilotlight.core.transport.endpoint import TlsCredentials
from tests.fakes.authority import Authority
from tests.fakes.neighbour_nodes import KEY
from tests.fakes.origins import MemoryOrigin
from tests.weight_cache.models import put_model
from weight_cache.peers.service import PeerService, PeerSettings
from weight_cache.store.store import Store


def terms(peers: list[str] | str) -> PeerSettings:
    return PeerSettings(
        peers=peers,
        listen="127.0.0.1:0",
        answer_s=20,
        uploads_at_once=4,
        upload_bytes_per_s=0,
        distrust_s=600,
    )


@pytest.mark.parametrize(
    "named, peers",
    [("127.0.0.1", ["127.0.0.1:{port}"]), ("localhost", "dns:localhost:{port}")],
    ids=["a list", "the service's name"],
)
async def test_nodes_of_one_authority_give_each_other_weights_and_nobody_else_is_heard(
    tmp_path: Path, named: str, peers: list[str] | str
) -> None:
    authority = Authority()
    credentials = TlsCredentials(authority.issue(tmp_path / "tls", named))
    origin = MemoryOrigin()
    name = put_model(origin, {"file": b"x" * 1000})
    first = PeerService(terms([]), KEY, client_tls=credentials.client_context())
    giver = Store.open(
        tmp_path / "1",
        origin=origin,
        max_bytes=10**6,
        clock=lambda: 5.0,
        peer_source=first.exchange,
    )
    await first.open(giver.verified_chunks, tls=credentials.server_context())
    await giver.lease(name, holder="test")
    there = (
        peers.format(port=first.port)
        if isinstance(peers, str)
        else [peer.format(port=first.port) for peer in peers]
    )
    second = PeerService(terms(there), KEY, client_tls=credentials.client_context())
    taker = Store.open(
        tmp_path / "2",
        origin=MemoryOrigin(),
        max_bytes=10**6,
        clock=lambda: 5.0,
        peer_source=second.exchange,
    )
    try:
        await taker.lease(name, holder="test")
        assert taker.statistics().given_bytes == 1000
        assert first.port is not None
        with pytest.raises((ssl.SSLError, OSError)):
            await ask_with(authority.nameless_context(), first.port)
    finally:
        for service, store in ((first, giver), (second, taker)):
            await service.aclose()
            store.close()
        for _ in range(50):  # closed TLS connections say goodbye, which takes turns of the loop
            await asyncio.sleep(0.001)


async def ask_with(context: ssl.SSLContext, port: int) -> None:
    """TLS 1.3: a client learns with its first read that its certificate was not believed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(b"GET /v1/holdings HTTP/1.1\r\n\r\n")
        if not await reader.read():
            raise ConnectionResetError("cut off")
    finally:
        writer.transport.abort()
