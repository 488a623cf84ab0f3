"""Nodes give each other what they have; a fleet reads each chunk from the origin once; whatever a
peer does, the file is right."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.neighbour_nodes import KEY, Behaviour, NeighbourNode, Street, bad_peer, street
from tests.fakes.origins import MemoryOrigin
from tests.weight_cache.models import chunked, digest_of, put_model
from weight_cache.fetch.peer_source import ChunkRequest
from weight_cache.manifest import CHUNK_BYTES, ManifestFile
from weight_cache.peers import http1
from weight_cache.peers.peer_health import PeerFailure

FILLS = [bytes([n]) for n in range(1, 250)]
SMALL = {f"part-{n}": bytes([n]) * (1000 + n) for n in range(12)}


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Street]:
    async with street(tmp_path) as made:
        yield made


async def hold(node: NeighbourNode, name: str) -> Path:
    _, path = await node.store.lease(name, holder="test")
    return path


def owned(node: NeighbourNode, file: bytes) -> list[int]:
    """Chunks of a file that this node owns."""
    owner = node.peer_service.membership.owner
    return [
        index
        for index in range(-(-len(file) // CHUNK_BYTES))
        if owner(f"{digest_of(file)}/{index}") is None
    ]


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


async def test_the_second_node_takes_everything_from_the_first(nodes: Street) -> None:
    first, second = await nodes.node(), await nodes.node(origin=MemoryOrigin())
    name = put_model(nodes.origin, SMALL)
    await hold(first, name)
    assert content(await hold(second, name)) == SMALL
    assert second.origin.reads == 0
    told = second.store.statistics()
    assert (told.fetched_bytes, told.given_bytes) == (0, sum(map(len, SMALL.values())))
    assert second.peer_service.exchange.received.bytes > told.given_bytes  # and the manifest


async def test_a_node_that_joins_later_needs_no_origin_either(nodes: Street) -> None:
    first = await nodes.node()
    name = put_model(nodes.origin, SMALL)
    await hold(first, name)
    second, third = await nodes.node(origin=MemoryOrigin()), await nodes.node(origin=MemoryOrigin())
    await asyncio.gather(hold(second, name), hold(third, name))
    assert second.origin.reads == third.origin.reads == 0


@pytest.mark.parametrize("count", [2, 3])
async def test_cold_nodes_read_each_chunk_from_the_origin_once_together(
    nodes: Street, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    # a node that is slow or busy is not waited for: not the case here
    monkeypatch.setattr("weight_cache.peers.fetcher.WAIT_S", 60.0)
    fleet = [await nodes.node() for _ in range(count)]
    name = put_model(nodes.origin, {**SMALL, "large": chunked(b"x")})
    paths = await asyncio.gather(*(hold(node, name) for node in fleet))
    assert all(content(path) == {**SMALL, "large": chunked(b"x")} for path in paths)
    assert max(Counter(nodes.origin.ranges).values()) == 1
    assert sum(node.store.statistics().fetched_bytes for node in fleet) == sum(
        map(len, SMALL.values())
    ) + len(chunked(b"x"))


async def test_a_manifest_that_lands_while_it_is_looked_for_is_given(
    nodes: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await nodes.node()
    name = put_model(nodes.origin, SMALL)
    await hold(first, name)
    loop, verified_chunks, coming = (
        asyncio.get_running_loop(),
        first.store.verified_chunks,
        contextlib.ExitStack(),
    )
    coming.enter_context(first.peer_service._under_way.coming(name))
    find = verified_chunks.manifest

    async def land() -> None:
        coming.close()

    def look(digest: str) -> bytes | None:
        monkeypatch.setattr(verified_chunks, "manifest", find)
        asyncio.run_coroutine_threadsafe(land(), loop).result()
        return None  # it was not there yet

    monkeypatch.setattr(verified_chunks, "manifest", look)
    second = await nodes.node()
    [peer] = second.peer_service.membership.holders(name, name)
    answer = await second.peer_service.exchange._request(
        peer, ChunkRequest(digest=name, index=None, length_bytes=10**6, sha256=name)
    )
    assert answer is not None
    assert hashlib.sha256(answer.body).hexdigest() == name


async def test_each_node_begins_with_the_chunks_that_it_owns(nodes: Street) -> None:
    fleet = [await nodes.node() for _ in range(3)]
    file = ManifestFile(path="large", size_bytes=60 * CHUNK_BYTES, chunk_sha256s=("0" * 64,) * 60)
    begun: list[int] = []
    for node in fleet:
        order = list(node.peer_service.exchange.in_turn(file))
        assert sorted(order) == list(range(60))
        own = [
            index
            for index in order
            if node.peer_service.membership.owner(f"{file.digest}/{index}") is None
        ]
        assert order[: len(own)] == own
        begun += own
    assert sorted(begun) == list(range(60))


async def test_a_node_alone_reads_in_order(nodes: Street) -> None:
    node = await nodes.node()
    file = ManifestFile(path="large", size_bytes=5 * CHUNK_BYTES, chunk_sha256s=("0" * 64,) * 5)
    assert list(node.peer_service.exchange.in_turn(file)) == [0, 1, 2, 3, 4]


async def test_a_node_gives_what_is_verified_of_a_file_that_is_half_here(nodes: Street) -> None:
    first, second = await nodes.node(), await nodes.node(origin=MemoryOrigin())
    # what it owns it would ask its origin for
    file = next(made for made in map(chunked, FILLS) if not owned(second, made))
    name = put_model(nodes.origin, {"large": file})
    nodes.origin.lost.add((digest_of(file), 16 * 1024**2))
    arriving = asyncio.create_task(hold(first, name))
    await asyncio.wait([arriving])
    assert arriving.exception() is not None
    nodes.origin.lost.clear()
    nodes.origin.gates[digest_of(file)] = asyncio.Event()  # the rest does not come
    arriving, waiting = (
        asyncio.create_task(hold(first, name)),
        asyncio.create_task(hold(second, name)),
    )
    while second.store.statistics().given_bytes < 16 * 1024**2:
        assert not waiting.done()
        await asyncio.sleep(0.01)
    nodes.origin.gates[digest_of(file)].set()
    await arriving
    assert content(await waiting) == {"large": file}
    assert second.origin.reads == 0


async def flipped(request: http1.Request, writer: asyncio.StreamWriter) -> None:
    writer.write(http1.response_head(200, 1000) + b"!" * 1000)


async def silent(request: http1.Request, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def reset_midway(request: http1.Request, writer: asyncio.StreamWriter) -> None:
    writer.write(http1.response_head(200, 1000) + b"!" * 500)
    await writer.drain()
    writer.transport.abort()


async def closed_early(request: http1.Request, writer: asyncio.StreamWriter) -> None:
    writer.write(http1.response_head(200, 1000) + b"!" * 500)
    writer.close()


async def endless(request: http1.Request, writer: asyncio.StreamWriter) -> None:
    writer.write(http1.response_head(200, 10**12))


async def busy(request: http1.Request, writer: asyncio.StreamWriter) -> None:
    writer.write(http1.response_head(503, 0))


async def refusing(request: http1.Request, writer: asyncio.StreamWriter) -> None:
    writer.write(http1.response_head(401, 0))


async def absent(request: http1.Request, writer: asyncio.StreamWriter) -> None:
    writer.write(http1.response_head(404, 0))


async def babbling(request: http1.Request, writer: asyncio.StreamWriter) -> None:
    writer.write(b"220 mail.example ESMTP\r\n\r\n")


async def pointing_nowhere(request: http1.Request, writer: asyncio.StreamWriter) -> None:
    writer.write(http1.response_head(303, 0, {"Pilotlight-At": "f" * 32}))


async def promising(request: http1.Request, writer: asyncio.StreamWriter) -> None:
    writer.write(http1.response_head(202, 0))


@pytest.mark.parametrize(
    "behaviour, failure",
    [
        (flipped, PeerFailure.WRONG),
        (silent, PeerFailure.SLOW),
        (reset_midway, PeerFailure.BROKEN),
        (closed_early, PeerFailure.BROKEN),
        (endless, PeerFailure.BROKEN),
        (busy, PeerFailure.BUSY),
        (refusing, PeerFailure.REFUSED),
        (absent, PeerFailure.ABSENT),
        (babbling, PeerFailure.BROKEN),
        (pointing_nowhere, None),
        (promising, None),
    ],
)
async def test_whatever_a_peer_does_the_origin_is_next_and_the_file_right(
    nodes: Street, behaviour: Behaviour, failure: PeerFailure | None
) -> None:
    node = await nodes.node(
        answer_s=0.3 if behaviour in (silent, pointing_nowhere, promising) else 20.0
    )
    file = b"z" * 1000
    name = put_model(nodes.origin, {"file": file})
    async with bad_peer(behaviour, holds=[digest_of(file), name]) as address:
        await nodes.join(address)
        assert content(await hold(node, name)) == {"file": file}
        assert node.store.statistics().fetched_bytes == 1000
        if failure is not None:
            assert node.peer_service.membership.failures[failure] >= 1


async def test_a_peer_that_gives_wrong_bytes_is_named_and_not_asked_again(nodes: Street) -> None:
    node = await nodes.node()
    asked = 0

    async def lie(request: http1.Request, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await flipped(request, writer)

    name = put_model(nodes.origin, SMALL)
    async with bad_peer(lie, holds=[name, *map(digest_of, SMALL.values())]) as address:
        await nodes.join(address)
        assert content(await hold(node, name)) == SMALL
        assert asked == 1  # the manifest was wrong; after that nobody asked it for a chunk
        assert (address, "distrusted") in node.peer_service.membership.states()
        samples = {
            (s.name, *s.labels.values()): s.value
            for metric in node.peer_service.collector().collect()
            for s in metric.samples
        }
        assert samples["pilotlight_weights_peer_distrusted", address] == 1
        assert samples["pilotlight_weights_peer_failures_total", "wrong"] == 1
        await nodes.refresh()
        # a good word does not bring trust back
        assert (address, "distrusted") in node.peer_service.membership.states()


async def test_a_dead_peer_costs_its_askers_one_deadline(nodes: Street) -> None:
    node = await nodes.node(answer_s=0.3)
    name = put_model(nodes.origin, SMALL)
    async with bad_peer(silent, holds=list(map(digest_of, SMALL.values()))) as address:
        await nodes.join(address)
        await hold(node, name)
        # those that asked at once, before the first was given up
        assert node.peer_service.membership.failures[PeerFailure.SLOW] <= 9


async def test_a_node_that_dies_midway_is_replaced_by_the_origin(nodes: Street) -> None:
    first, second = await nodes.node(), await nodes.node(answer_s=1.0)
    name = put_model(nodes.origin, {"large": chunked(b"x")})
    await hold(first, name)
    before = nodes.origin.read_bytes
    await first.peer_service.aclose()
    assert content(await hold(second, name)) == {"large": chunked(b"x")}
    assert nodes.origin.read_bytes > before


async def ask(address: str, target: str, headers: dict[str, str]) -> tuple[int, bytes]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(http1.request_head(target, headers))
    head = await http1.read_head(reader)
    body = await http1.read_body(reader, head.length_bytes)
    writer.close()
    return head.status, body


async def test_nobody_without_the_key_learns_anything(nodes: Street) -> None:
    node = await nodes.node()
    name = put_model(nodes.origin, SMALL)
    await hold(node, name)
    own = node.peer_service.membership.own_id
    for target in (
        "/v1/holdings",
        f"/v1/manifests/{name}",
        f"/v1/chunks/{digest_of(SMALL['part-1'])}/0",
        "/",
        "/metrics",
    ):
        status, body = await ask(node.address, target, {})
        assert (status, body) == (401, b"no token: only nodes of this platform are served")
        old = KEY.write("GET", target, sender="a" * 32, receiver=own, now=1.0)
        assert (await ask(node.address, target, {"Authorization": old}))[0] == 401
    assert node.peer_service.server is not None
    assert node.peer_service.server.served.refused == {"absent": 5, "stale": 5}
    assert node.peer_service.server.served.bytes == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"\0\1\2\r\n\r\n",
        b"GET /v1/holdings HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        b"x" * 20_000,
    ],
)
async def test_what_is_no_request_is_cut_off(nodes: Street, raw: bytes) -> None:
    node = await nodes.node()
    host, _, port = node.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw)
    try:
        assert await reader.read() == b""
    except ConnectionResetError:
        pass
    writer.close()


async def test_uploads_beyond_the_limit_are_sent_away(nodes: Street) -> None:
    # as if it served its most
    first, second = await nodes.node(uploads_at_once=0), await nodes.node()
    name = put_model(nodes.origin, SMALL)
    await hold(first, name)
    assert content(await hold(second, name)) == SMALL
    assert first.peer_service.server is not None
    assert first.peer_service.server.served.busy > 0
    assert second.peer_service.membership.failures[PeerFailure.BUSY] > 0


async def test_a_node_among_its_own_peers_knows_itself(nodes: Street) -> None:
    node = await nodes.node()
    assert list(node.peer_service.membership.states()) == []
    assert node.peer_service.membership.owner("any") is None
    assert repr(node.peer_service.membership) == "<PeerMembership known=0 of 1>"


async def test_a_file_that_somebody_touched_is_not_given(nodes: Street) -> None:
    node = await nodes.node()
    name = put_model(nodes.origin, {"file": b"right"})
    path = await hold(node, name)
    (path / "file").chmod(0o644)
    (path / "file").write_bytes(b"wrong")
    assert node.store.verified_chunks.chunk(digest_of(b"right"), 0) is None
    other = await nodes.node()
    assert content(await hold(other, name)) == {"file": b"right"}
    assert other.peer_service.membership.failures[PeerFailure.WRONG] == 0


async def test_cancelling_a_lease_leaves_nothing_on_its_way(nodes: Street) -> None:
    first, second = await nodes.node(), await nodes.node()
    nodes.origin.gate = asyncio.Event()
    name = put_model(nodes.origin, SMALL)
    arriving = [asyncio.create_task(hold(node, name)) for node in (first, second)]
    await nodes.origin.asked.wait()
    for task in arriving:
        task.cancel()
    await asyncio.wait(arriving)
    for node in (first, second):
        assert "<InFlightChunks 0 pieces>" in repr(node.peer_service)
    nodes.origin.gate = None
    assert content(await hold(second, name)) == SMALL


async def test_what_a_neighbour_fetched_a_moment_ago_is_known_without_waiting_for_the_next_look(
    nodes: Street,
) -> None:
    first, second = await nodes.node(), await nodes.node(origin=MemoryOrigin())
    # its last look was before the first had anything
    second.peer_service.membership._looked_at = -60.0
    name = put_model(nodes.origin, SMALL)
    await hold(first, name)
    assert content(await hold(second, name)) == SMALL
    assert second.origin.reads == 0
