"""A read of very many frames is parsed in turns, from either side of a WebSocket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection
from websockets.frames import Frame, Opcode

from activator.gateway import websocket_frames
from activator.gateway.websocket_frames import PIECE_BYTES, CallerSocket, Pieces, WorkerSocket
from activator.lifecycle import server_config
from activator.settings import ActivatorSettings
from tests.activator.conftest import PATIENCE_S, Edge
from tests.activator.gateway.test_http_proxy import HEADERS, chatting, in_flight
from tests.activator.test_gateway import until

COUNT = 2000


class Reading(asyncio.Transport):
    """A transport of which only its reading is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False
        self.is_closed = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return self.is_closed


class World:
    """Pieces whose parser takes 1.2 ms for each: a turn has two. `due` is what the event loop would
    call."""

    def __init__(self) -> None:
        self.transport = Reading()
        self.parsed: list[bytes] = []
        self.due: list[Callable[[], None]] = []
        self.is_full = False
        self._now = 0.0
        self.pieces = Pieces(
            self.transport,
            parse=self._parse,
            is_full=lambda: self.is_full,
            call_soon=self.due.append,
            clock=lambda: self._now,
        )

    def _parse(self, data: bytes) -> None:
        self._now += 0.0012
        self.parsed.append(data)

    def turn(self) -> None:
        """One of the event loop."""
        due, self.due[:] = [*self.due], []
        for call in due:
            call()


def test_a_large_read_is_parsed_over_several_turns_and_nothing_is_read_meanwhile() -> None:
    world = World()
    data = bytes(range(256)) * 20
    world.pieces.add(data)
    assert (len(world.parsed), world.transport.is_paused, len(world.due)) == (2, True, 1)
    world.turn()
    assert (len(world.parsed), world.transport.is_paused) == (4, True)
    world.turn()

    assert (b"".join(world.parsed), world.transport.is_paused, world.due) == (data, False, [])
    assert max(map(len, world.parsed)) == 1024


def test_what_comes_though_reading_is_paused_is_parsed_in_its_turn() -> None:
    world = World()
    world.pieces.add(b"a" * 3 * PIECE_BYTES)
    world.pieces.add(b"b")
    world.turn()

    assert b"".join(world.parsed) == b"a" * 3 * PIECE_BYTES + b"b"
    assert not world.transport.is_paused


def test_nothing_is_parsed_while_messages_wait_to_be_taken() -> None:
    world = World()
    world.pieces.add(b"a" * 9 * PIECE_BYTES)
    world.is_full = True
    world.turn()
    world.pieces.resume()
    assert (len(world.parsed), world.due, world.transport.is_paused) == (2, [], True)

    world.is_full = False
    world.pieces.resume()
    world.pieces.resume()
    assert len(world.due) == 1
    world.turn()
    assert len(world.parsed) == 4


def test_what_is_left_of_a_closed_connection_is_dropped() -> None:
    world = World()
    world.pieces.add(b"a" * 9 * PIECE_BYTES)
    world.transport.is_closed = True
    world.turn()

    assert (len(world.parsed), world.due, repr(world.pieces)) == (
        2,
        [],
        "<Pieces 0 bytes not parsed>",
    )


async def test_messages_that_come_in_one_read_are_passed_on_in_order_both_ways(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: dict[type, list[int]] = {CallerSocket: [], WorkerSocket: []}

    class Watched(Pieces):
        def __init__(self, transport: asyncio.Transport, *, parse: Any, **others: Any) -> None:
            def watched(data: bytes) -> None:
                parsed[type(parse.__self__)].append(len(data))
                parse(data)

            super().__init__(transport, parse=watched, **others)

    monkeypatch.setattr(websocket_frames, "Pieces", Watched)

    async def answers(caller: ServerConnection) -> None:
        got = [await caller.recv() for _ in range(COUNT)]
        caller.transport.write(
            b"".join(Frame(Opcode.TEXT, str(text).encode()).serialize(mask=False) for text in got)
        )
        await caller.wait_closed()

    async with (
        chatting(edge, side=answers) as (url, _),
        connect(url, additional_headers=HEADERS, proxy=None) as socket,
    ):
        socket.transport.write(
            b"".join(Frame(Opcode.TEXT, b"%d" % n).serialize(mask=True) for n in range(COUNT))
        )

        assert [await socket.recv() for _ in range(COUNT)] == [str(n) for n in range(COUNT)]

    assert all(sum(sizes) > 5 * COUNT and max(sizes) <= PIECE_BYTES for sizes in parsed.values()), (
        "either side is parsed in pieces"
    )


async def test_an_activator_serves_websockets_that_are_parsed_in_pieces_bounded_and_not_compressed(
    edge: Edge,
) -> None:
    config = server_config(edge.gateway, edge.limits, ActivatorSettings())
    config.load()

    assert (config.ws_protocol_class, config.ws_max_size, config.ws_per_message_deflate) == (
        CallerSocket,
        1024**2,
        False,
    )


async def test_a_message_of_very_many_fragments_closes_its_websocket_with_1009(edge: Edge) -> None:
    """Empty fragments are no bytes of their message, and are kept until it ends."""
    async with chatting(edge) as (url, chat):
        async with connect(url, additional_headers=HEADERS, proxy=None) as socket:
            first = Frame(Opcode.BINARY, b"", fin=False).serialize(mask=True)
            socket.transport.write(
                first + Frame(Opcode.CONT, b"", fin=False).serialize(mask=True) * (16_384 + 200)
            )
            with pytest.raises(websockets.ConnectionClosedError) as closed:
                async with asyncio.timeout(PATIENCE_S):
                    await socket.recv()
        await until(lambda: in_flight(edge) == 0)

    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, chat.closed) == (1009, [1009])
