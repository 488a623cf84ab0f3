"""Streams from the node agent: they end with their caller, and their errors are the last line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.types import Message

from pilotlight.controller.server.ndjson import NdjsonResponse
from snapshotter.errors import AgentUnavailable


async def test_a_silent_source_is_closed_when_the_caller_leaves() -> None:
    closed, left, sent = asyncio.Event(), asyncio.Event(), []

    async def silent() -> AsyncIterator[Mapping[str, Any]]:
        try:
            yield {"text": "one line, and then nothing for days"}
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def send(message: Message) -> None:
        sent.append(message)
        if message.get("body"):
            left.set()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async with asyncio.timeout(30):
        await NdjsonResponse(silent(), request="req-1")({"type": "http"}, receive, send)
        await closed.wait()
    assert json.loads(sent[1]["body"]) == {"text": "one line, and then nothing for days"}


async def test_an_error_on_the_way_is_the_last_line() -> None:
    async def breaks() -> AsyncIterator[Mapping[str, Any]]:
        yield {"text": "so far"}
        raise AgentUnavailable("the node agent left")

    response = NdjsonResponse(breaks(), request="req-1")
    lines = [
        json.loads(piece if isinstance(piece, str) else bytes(piece))
        async for piece in response.body_iterator
    ]
    assert lines[0] == {"text": "so far"}
    assert (lines[1]["error"]["status"], lines[1]["error"]["instance"]) == (503, "req-1")
