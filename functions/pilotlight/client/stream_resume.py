"""Streams that go on where they broke off: how often they are asked for again, and what counts as
broken."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from pilotlight.errors import Unavailable

MAX_DISCONNECTS = 20
"""In a row, without anything new between them. Before each a connection was made, for which the
transport has its own patience."""


class ResumableStream(Protocol):
    """What is read over several connections."""

    after: str
    is_over: bool


def reconnect_attempts(items: ResumableStream) -> Iterator[None]:
    """One turn for each connection, until all was read. Raises Unavailable when one after the other
    brings nothing."""
    breaks, before = 0, items.after
    while not items.is_over:
        yield
        breaks = breaks + 1 if items.after == before else 0
        before = items.after
        if breaks > MAX_DISCONNECTS and not items.is_over:
            raise Unavailable(
                f"the stream broke off {breaks} times without anything new", reason="connection"
            )


def read_until_disconnect(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces of a body, as far as the connection holds."""
    import httpx

    try:
        yield from pieces
    except httpx.TransportError:
        return


async def read_until_disconnect_async(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same."""
    import httpx

    try:
        async for piece in pieces:
            yield piece
    except httpx.TransportError:
        return
