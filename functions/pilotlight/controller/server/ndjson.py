"""Streamed responses: newline-delimited JSON from the node agent to the caller."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pilotlight.controller.server import error_responses
from pilotlight.core.threads import cancel_and_wait
from pilotlight.errors import PilotlightError
from pilotlight.protocol import CONTENT_NDJSON
from snapshotter.errors import SnapshotterError


class NdjsonResponse(StreamingResponse):
    """Records as lines. An error after the first line becomes the last line, `{"error": problem}`,
    because the status was already sent.

    The source is closed as soon as the caller disconnects, even while it is idle: a followed log
    may print nothing for days."""

    media_type = CONTENT_NDJSON

    def __init__(self, records: AsyncIterator[Mapping[str, Any]], *, request: str) -> None:
        self._records = records
        super().__init__(
            _lines(records, request),
            media_type=CONTENT_NDJSON,
            headers={"cache-control": "no-store"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the source ends or the caller disconnects."""
        sending = asyncio.create_task(self.stream_response(send), name="ndjson answer")
        leaving = asyncio.create_task(self.listen_for_disconnect(receive), name="ndjson caller")
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            try:
                await cancel_and_wait(sending, leaving)
            finally:
                await _close(self._records)  # also if the caller left before the first line


async def _lines(records: AsyncIterator[Mapping[str, Any]], request: str) -> AsyncIterator[bytes]:
    try:
        async for record in records:
            if record:
                yield _line(record)
    except (SnapshotterError, PilotlightError) as e:
        yield _line({"error": error_responses.problem_document(e, request)})
    finally:
        await _close(records)


async def _close(records: AsyncIterator[Mapping[str, Any]]) -> None:
    close = getattr(records, "aclose", None)
    if close is not None:
        await close()


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
