"""Requests that another process of the platform answers: bodies and responses stream through, with
back-pressure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx

from activator.http.request import HOP_BY_HOP, Request
from pilotlight import errors

_NOT_RELAYED = HOP_BY_HOP | {b"date"}


def target_url(client: httpx.AsyncClient, request: Request, raw_path: bytes) -> httpx.URL:
    """Return the URL at the client's server for `raw_path` and the query of a request."""
    query = request.scope["query_string"]
    return client.base_url.copy_with(raw_path=raw_path + (b"?" + query if query else b""))


async def body_of(request: Request, pause_s: float | None = None) -> AsyncIterator[bytes]:
    """Yield the pieces of a body as they arrive. Raises InvalidInput where none arrives for
    `pause_s` (None: no limit here), ClientClosedRequest."""
    while True:
        try:
            async with asyncio.timeout(pause_s):
                message = await request.receive()
        except TimeoutError as e:
            raise errors.InvalidInput(
                f"no data of the request body arrived for {pause_s:g} s"
            ) from e
        if message["type"] == "http.disconnect":
            raise errors.ClientClosedRequest("the caller disconnected while sending its body")
        if message["body"]:
            yield message["body"]
        if not message.get("more_body", False):
            return


async def relay(request: Request, response: httpx.Response, unread_s: float) -> None:
    """Answer a request with a response as it arrives. A caller may leave it unread for `unread_s`;
    a response that breaks off breaks the caller's connection. Raises ClientClosedRequest."""
    headers = [(k.lower(), v) for k, v in response.headers.raw if k.lower() not in _NOT_RELAYED]
    try:
        await request.wait_read(unread_s)  # unread responses to earlier pipelined requests
        await request.start(response.status_code, headers)
        async for chunk in response.aiter_raw():
            await request.wait_read(unread_s)
            await request.chunk(chunk)
        await request.wait_read(unread_s)
        await request.chunk(b"", more=False)
    except httpx.HTTPError:
        # the head was sent: only a broken connection can signal the error
        request.scope["connection"].transport.abort()
