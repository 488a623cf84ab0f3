"""Streams that go on where they broke off: how often they are asked for again, and what counts as
broken."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from pilotlight.errors import Unavailable

MAX_BREAKS = 20
"""In a row, without anything new between them. Before each a connection was made, for which the
transport has its own patience."""


class Resumable(Protocol):
    """What is read over several connections."""

    after: str
    is_over: bool


def broken_streams(items: Resumable) -> Iterator[None]:
    """One turn for each connection, until all was read. Raises Unavailable when one after the other
    brings nothing."""
    breaks, before = 0, items.after
    while not items.is_over:
        yield
        breaks = breaks + 1 if items.after == before else 0
        before = items.after
        if breaks > MAX_BREAKS and not items.is_over:
            raise Unavailable(
                f"the stream broke off {breaks} times without anything new", reason="connection"
            )


def until_broken(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces of a body, as far as the connection holds."""
    import httpx

    try:
        yield from pieces
    except httpx.TransportError:
        return


async def until_broken_aio(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same."""
    import httpx

    try:
        async for piece in pieces:
            yield piece
    except httpx.TransportError:
        return
