"""Resumption of broken streams over new connections, with a limit of attempts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from pilotlight.client.transport import connection_errors
from pilotlight.errors import Unavailable

MAX_DISCONNECTS = 20
"""Maximum consecutive disconnects without new data. Failed connection attempts do not count: the
transport retries them."""


class ResumableStream(Protocol):
    """A stream that is read over several connections."""

    after: str
    is_over: bool


def reconnect_attempts(items: ResumableStream) -> Iterator[None]:
    """Yield once per connection attempt until everything is read. Raises Unavailable after too many
    disconnects without new data."""
    breaks, before = 0, items.after
    while not items.is_over:
        yield
        breaks = breaks + 1 if items.after == before else 0
        before = items.after
        if breaks > MAX_DISCONNECTS and not items.is_over:
            raise Unavailable(
                f"the stream broke off {breaks} times in a row without new data",
                reason="connection",
            )


def read_until_disconnect(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the pieces of a body, until its end or until the connection is lost."""
    try:
        yield from pieces
    except connection_errors():
        return


async def read_until_disconnect_async(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Asynchronous form of `read_until_disconnect`."""
    try:
        async for piece in pieces:
            yield piece
    except connection_errors():
        return
