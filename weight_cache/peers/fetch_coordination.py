"""Coordinates fetches from the origin: the assignments recorded by a chunk's owner, and the chunks
that a node is fetching.

Both are hints. If one is wrong (its node died or gave up), a chunk is read from the origin
twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterator

_MAX_ASSIGNMENTS = 200_000
"""Limit of remembered chunks (3 TB of weights), least recently used first out: about 40 MB."""


class FetchAssignments:
    """Which node fetches each chunk owned by this node. Owner: one event loop."""

    def __init__(self) -> None:
        self._fetchers: OrderedDict[str, str] = OrderedDict()

    def __repr__(self) -> str:
        return f"<FetchAssignments {len(self._fetchers)} chunks>"

    def fetcher(
        self, key: str, *, asker: str, without: Collection[str], nodes: Collection[str]
    ) -> str:
        """The node that has, or fetches, `key`: the first to ask; `asker` if there was none, or the
        recorded one is in `without` or not in `nodes`."""
        known = self._fetchers.get(key)
        if known is None or known in without or known not in nodes:
            known = self._fetchers[key] = asker
        self._fetchers.move_to_end(key)
        if len(self._fetchers) > _MAX_ASSIGNMENTS:
            self._fetchers.popitem(last=False)
        return known


class InFlightChunks:
    """The chunks that this node is fetching. Owner: one event loop."""

    def __init__(self) -> None:
        self._awaited: dict[str, list[asyncio.Event]] = {}

    def __repr__(self) -> str:
        return f"<InFlightChunks {len(self._awaited)} pieces>"

    @contextlib.contextmanager
    def coming(self, key: str) -> Iterator[None]:
        """Mark `key` as being fetched for the duration of the context."""
        landed = asyncio.Event()
        self._awaited.setdefault(key, []).append(landed)
        try:
            yield
        finally:
            landed.set()
            self._awaited[key].remove(landed)
            if not self._awaited[key]:
                del self._awaited[key]

    def is_coming(self, key: str) -> bool:
        """Whether `key` is being fetched."""
        return key in self._awaited

    async def wait(self, key: str, *, timeout_s: float) -> None:
        """Wait until `key` is no longer being fetched, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(landed.wait() for landed in self._awaited.get(key, ())))
