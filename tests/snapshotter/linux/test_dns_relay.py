"""The relay of name servers: it passes on what comes, asks the next server where one is silent, and
gives nobody another's share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from snapshotter.linux import dns_relay
from snapshotter.linux.dns_relay import MOST_OF_ONE, DnsRelay, DnsShares

SILENT, TALKING = "127.0.0.3", "127.0.0.4"


@pytest.fixture
async def asked(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[tuple[str, int], list[bytes]]]:
    """Where a relay for a silent server and one that answers is, and what the silent one was
    asked."""
    questions: list[bytes] = []
    monkeypatch.setattr(dns_relay, "ANSWER_S", 0.2)
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        silent.bind((SILENT, 0))
        port = silent.getsockname()[1]
        talking = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        talking.bind((TALKING, port))
        # the port of TCP first: of UDP fewer are in use
        stream = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        datagrams.bind(stream.getsockname())
        for each in (silent, talking):
            each.setblocking(False)
        loop = asyncio.get_running_loop()

        async def answers() -> None:
            while True:
                question, caller = await loop.sock_recvfrom(talking, 1000)
                await loop.sock_sendto(talking, question.upper(), caller)

        async def hears() -> None:
            while True:
                questions.append((await loop.sock_recvfrom(silent, 1000))[0])

        relay = DnsRelay([SILENT, TALKING], port).serve(datagrams, stream)
        tasks = [asyncio.create_task(each) for each in (relay, answers(), hears())]
        yield datagrams.getsockname(), questions
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def caller_at(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller:
        caller.bind((address, 0))
        caller.setblocking(False)
        yield caller


async def test_where_a_server_is_silent_the_next_one_is_asked(
    asked: tuple[tuple[str, int], list[bytes]],
) -> None:
    relay, questions = asked
    loop = asyncio.get_running_loop()
    with caller_at("127.0.0.5") as caller:
        await loop.sock_sendto(caller, b"who?", relay)
        assert await loop.sock_recv(caller, 100) == b"WHO?"
    assert questions == [b"who?"]


async def test_who_asks_more_than_its_share_takes_nothing_from_others(
    asked: tuple[tuple[str, int], list[bytes]],
) -> None:
    relay, questions = asked
    loop = asyncio.get_running_loop()
    with caller_at("127.0.0.5") as flood, caller_at("127.0.0.6") as other:
        for number in range(2 * MOST_OF_ONE):
            await loop.sock_sendto(flood, b"%d" % number, relay)
        await loop.sock_sendto(other, b"who?", relay)
        assert await loop.sock_recv(other, 100) == b"WHO?"
    assert len([question for question in questions if question != b"who?"]) == MOST_OF_ONE


def test_a_share_is_given_back() -> None:
    shares = DnsShares()
    with contextlib.ExitStack() as stack:
        assert all(stack.enter_context(shares.admit("a")) for _ in range(MOST_OF_ONE))
        assert not stack.enter_context(shares.admit("a"))
        assert stack.enter_context(shares.admit("b"))
    with shares.admit("a") as has_room:
        assert has_room
