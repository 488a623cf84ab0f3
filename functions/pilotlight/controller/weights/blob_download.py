"""Downloads of blobs: whole, or the byte range that `RangeRequest` requests (RFC 9110 §14),
streamed from the object store.

A blob never changes, so its digest is a strong entity tag: an interrupted download resumes with
`If-Range`, and a client that has the blob gets a 304 response."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from fastapi import HTTPException
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pilotlight.controller.weights.blobs import BlobStore
from pilotlight.core.object_store.errors import ObjectStoreError
from pilotlight.core.threads import cancel_and_wait

log = logging.getLogger(__name__)

_RANGE = re.compile(r"\s*bytes\s*=\s*(\d*)\s*-\s*(\d*)\s*\Z")
_MAX_DIGITS = 18
"""Digits of a position: enough for more bytes than any store holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """The bytes in [`begin`, `end`) of a blob; `is_whole`: the request names no range."""

    begin: int
    end: int
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeConditions:
    """The request's headers of these names."""

    range: str | None
    if_range: str | None
    if_none_match: str | None


def parse_range(size: int, requested: str | None) -> ByteRange | None:
    """Return the part of `size` bytes to send; None if the range contains no existing byte.

    Anything but a single range of bytes is ignored, as §14.2 permits: then the whole is sent.
    """
    whole = ByteRange(begin=0, end=size, is_whole=True)
    found = _RANGE.match(requested or "")
    if found is None or not (found[1] or found[2]) or max(map(len, found.groups())) > _MAX_DIGITS:
        return whole
    if not found[1]:
        begin, end = max(0, size - int(found[2])), size
    else:
        begin, end = int(found[1]), min(int(found[2]) + 1 if found[2] else size, size)
        if found[2] and int(found[2]) < begin:
            return whole  # an invalid range (§14.1.1)
    return ByteRange(begin=begin, end=end, is_whole=False) if begin < end else None


def blob_response(
    files: BlobStore,
    digest: str,
    size: int,
    conditions: RangeConditions,
    *,
    turn: AbstractAsyncContextManager[object],
) -> Response:
    """Return the response to a GET of an existing blob of `size` bytes; it is sent while it holds
    `turn`. Raises HTTPException (416)."""
    tag = f'"{digest}"'
    headers = {"etag": tag, "accept-ranges": "bytes", "cache-control": "private, no-transform"}
    if conditions.if_none_match is not None and _matches(conditions.if_none_match, tag):
        return Response(status_code=304, headers=headers)
    part = parse_range(size, conditions.range if conditions.if_range in (None, tag) else None)
    if part is None:
        unsatisfied = {**headers, "content-range": f"bytes */{size}"}
        raise HTTPException(
            416,
            f"the blob has {size} bytes, none of which is in the range {conditions.range!r}",
            headers=unsatisfied,
        )
    headers["content-length"] = str(part.end - part.begin)
    if not part.is_whole:
        headers["content-range"] = f"bytes {part.begin}-{part.end - 1}/{size}"
    return BlobResponse(files, digest, part, headers=headers, turn=turn)


def _matches(condition: str, tag: str) -> bool:
    return condition.strip() == "*" or tag in (
        one.strip().removeprefix("W/") for one in condition.split(",")
    )


class BlobResponse(StreamingResponse):
    """Streams a blob's bytes. If the store fails midway, the connection is closed, because the
    headers with the length were sent before."""

    def __init__(
        self,
        files: BlobStore,
        digest: str,
        part: ByteRange,
        *,
        headers: dict[str, str],
        turn: AbstractAsyncContextManager[object],
    ) -> None:
        self._turn = turn
        self._pieces = files.pieces(digest, begin=part.begin, end=part.end)
        self._digest = digest
        super().__init__(
            self._pieces,
            status_code=200 if part.is_whole else 206,
            headers=headers,
            media_type="application/octet-stream",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until everything is sent or the client disconnects, to avoid reads without a
        recipient."""
        sending = asyncio.create_task(self._send(send), name=f"send blob {self._digest[:12]}")
        disconnect = asyncio.create_task(self.listen_for_disconnect(receive), name="blob's caller")
        try:
            await asyncio.wait((sending, disconnect), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(sending, disconnect)

    async def _send(self, send: Send) -> None:
        async with self._turn, contextlib.aclosing(self._pieces):
            try:
                await self.stream_response(send)
            except ObjectStoreError as e:
                log.warning("event=download_broken blob=%s error=%s", self._digest, e)
