"""Where events end, and when a stream says that it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from activator.http.request import Request
from activator.http.sse import HOLD_BYTES, SseResponse, SseSplitter, data_lines, early_head
from tests.activator.conftest import PATIENCE_S
from tests.activator.streams.world import OFTEN_S
from tests.activator.test_gateway import until


class Callers:
    """The far end of an EventStream: keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.request = Request(
            {"type": "http", "method": "POST", "path": "/", "headers": []},
            self.receive,
            self._send,
        )

    async def receive(self) -> dict[str, object]:
        return {}

    async def _send(self, message: Any) -> None:
        self.sent.append(message.get("body", b"head"))

    def stream(self, every_s: float = OFTEN_S) -> SseResponse:
        """To it."""
        return SseResponse(self.request, every_s=every_s, head=lambda: early_head(self.request))


async def test_no_heartbeat_comes_in_the_middle_of_an_event() -> None:
    caller = Callers()
    async with caller.stream() as stream:
        await stream.begin([])
        await stream.send(b"data: 1", is_inside=True)
        await asyncio.sleep(3 * OFTEN_S)
        await stream.send(b"2\n\n")
        await until(lambda: len(caller.sent) == 4)

    assert caller.sent == [b"head", b"data: 1", b"2\n\n", b": waiting\n\n"]


async def test_a_failure_before_the_first_heartbeat_leaves_the_answer_to_others() -> None:
    caller = Callers()
    async with caller.stream(every_s=PATIENCE_S) as stream:
        with pytest.raises(ZeroDivisionError):
            await stream.during(_fail())

    assert (stream.is_begun, caller.sent) == (False, [])


async def test_what_came_is_not_lost_to_a_caller_who_leaves_in_that_moment() -> None:
    """What comes is an exchange, and holds a slot: whoever gets it gives that back."""
    is_there, is_blocked, got = asyncio.Event(), asyncio.Event(), list[str]()

    async def send(message: Any) -> None:
        is_blocked.set()
        try:
            await asyncio.Event().wait()  # the caller does not read
        finally:
            await asyncio.sleep(0)

    async def step() -> str:
        await is_there.wait()
        return "a slot"

    caller = Callers()
    request = Request(
        {"type": "http", "method": "POST", "path": "/", "headers": []}, caller.receive, send
    )

    async def run() -> None:
        async with SseResponse(
            request, every_s=OFTEN_S, head=lambda: early_head(request)
        ) as stream:
            got.append(await stream.during(step()))

    task = asyncio.create_task(run())
    await is_blocked.wait()
    is_there.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

    assert got == ["a slot"]


async def test_a_stream_without_anything_is_a_head_and_an_end() -> None:
    caller = Callers()
    async with caller.stream() as stream:
        await stream.close(b"event: end\ndata: {}\n\n")

    assert caller.sent == [b"head", b"event: end\ndata: {}\n\n"]


async def _fail() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "pieces, passed",
    [
        ([b"data: 1\n\n"], [b"data: 1\n\n"]),
        ([b"data: 1\n", b"\n"], [b"", b"data: 1\n\n"]),
        ([b"a\n\nb\n\nc", b"\n\n"], [b"a\n\nb\n\n", b"c\n\n"]),
        ([b""], [b""]),
    ],
)
def test_events_are_cut_where_they_end(pieces: list[bytes], passed: list[bytes]) -> None:
    cutter = SseSplitter()

    assert [cutter.feed(piece) for piece in pieces] == passed
    assert (cutter.end(200)[1], cutter.is_inside) == (b"", False)


def test_a_long_event_is_passed_on_in_parts_and_known_to_be_one() -> None:
    cutter = SseSplitter()
    long = b"data: " + b"x" * (HOLD_BYTES + 1)
    first = cutter.feed(long)
    assert (first, cutter.is_inside) == (long[:-1], True)
    assert (cutter.feed(b"\n"), cutter.is_inside) == (b"x", True)
    assert (cutter.feed(b"\ndata: 2\n\nrest"), cutter.is_inside) == (b"\n\ndata: 2\n\n", False)
    assert cutter.end(200) == (200, b"rest\n\n")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_nothing_is_lost_however_a_stream_is_cut(size: int) -> None:
    stream = (
        b"".join(b"data: %d\n\n" % n for n in range(30))
        + b"data: "
        + b"y" * 200_000
        + b"\n\ndata: last\n\n"
    )
    cutter = SseSplitter()
    step: Callable[[int], bytes] = lambda at: stream[at : at + (size if at < 400 else 4096)]  # noqa: E731
    at, out = 0, b""
    while at < len(stream):
        piece = step(at)
        out += cutter.feed(piece)
        at += len(piece)

    assert out + cutter.end(200)[1] == stream


def test_a_text_of_several_lines_is_one_event() -> None:
    assert data_lines(b'{\n"a": 1}') == b'data: {\ndata: "a": 1}\n\n'
    assert data_lines(b"") == b"data: \n\n"
