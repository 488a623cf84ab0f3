"""Results of very many items: a reader of one shares the event loop with everybody else."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine
from typing import Any

import pytest

from activator.async_calls.pending_call import PendingCall
from activator.async_calls.result_stream import PIECE_BYTES, Position, StreamSubscriber
from activator.http.request import Request
from activator.http.sse import SseResponse
from pilotlight.protocol import CONTENT_NDJSON, CONTENT_PICKLE_STREAM, CONTENT_SSE, CallRecord

SIZE = 8 * PIECE_BYTES
KINDS = pytest.mark.parametrize(
    "content_type,item",
    [
        (CONTENT_NDJSON, b"1\n"),
        (CONTENT_SSE, b":\n\n"),
        (CONTENT_PICKLE_STREAM, bytes(4)),
        (CONTENT_NDJSON, b"\n"),
    ],
)
PLACES = pytest.mark.parametrize(
    "after", [(0, 0), (1, 999_999_999_999)], ids=["from the beginning", "behind the end"]
)


class Fast:
    """A caller who reads whatever it is sent at once."""

    def __init__(self) -> None:
        self.sent = bytearray()

    async def receive(self) -> dict[str, Any]:
        """Not called: the request has no body."""
        raise AssertionError

    async def send(self, message: Any) -> None:
        """ASGI."""
        self.sent += message.get("body", b"")

    def stream(self) -> SseResponse:
        """What it is answered with."""
        request = Request(
            {"type": "http", "method": "GET", "path": "/", "headers": []}, self.receive, self.send
        )
        return SseResponse(request, every_s=60.0, head=list)


def record_of(content_type: str, result: bytes) -> CallRecord:
    return CallRecord(
        id="req-1",
        tenant="t-acme",
        environment="main",
        app="shop",
        function="hello",
        method="",
        state="SUCCEEDED",
        sequence=3,
        submitted_at=0.0,
        expires_at=1.0,
        attempt=1,
        content_type=content_type,
        result=base64.b64encode(result).decode(),
    )


async def turns_of(work: Coroutine[Any, Any, None]) -> int:
    """How often others had the event loop until it was done."""
    task = asyncio.create_task(work)
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    await task
    return turns


@KINDS
@PLACES
async def test_a_result_of_very_many_items_leaves_the_event_loop_to_others(
    content_type: str, item: bytes, after: Position
) -> None:
    result = item * (SIZE // len(item))
    turns = await turns_of(
        StreamSubscriber(Fast().stream(), after).finish(record_of(content_type, result).to_json())
    )

    assert turns >= SIZE // PIECE_BYTES


@KINDS
@PLACES
async def test_a_log_of_very_many_items_leaves_the_event_loop_to_others(
    content_type: str, item: bytes, after: Position
) -> None:
    held = PendingCall(record_of(content_type, b""))
    held.begin_log(1, content_type).data += item * (SIZE // len(item))
    turns = await turns_of(StreamSubscriber(Fast().stream(), after).follow(held))

    assert turns >= SIZE // PIECE_BYTES


async def test_no_item_is_lost_where_pieces_meet() -> None:
    lines = [b'"%s"' % (b"x" * (n % 97)) for n in range(2000)]
    caller = Fast()
    await StreamSubscriber(caller.stream(), (1, 500)).finish(
        record_of(CONTENT_NDJSON, b"\n".join([*lines, b""])).to_json()
    )

    events = caller.sent.split(b"\n\n")
    assert events[:1500] == [
        b"id: 1-%d\ndata: %b" % (n + 1, line) for n, line in enumerate(lines) if n >= 500
    ]
    assert events[1500].startswith(b"event: end")
