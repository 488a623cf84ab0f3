"""Who goes to the origin for a chunk: what its owner notes, and what a node itself is about to
have.

Both are hints. When one is wrong (its node died, gave up) a chunk is read from the origin once
more."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterator

_MAX_ASSIGNMENTS = 200_000
"""Chunks at most (3 TB of weights), least recently asked for go first: some 40 MB."""


class FetchAssignments:
    """For the chunks that this node owns: who went to the origin. Owner: one event loop."""

    def __init__(self) -> None:
        self._fetchers: OrderedDict[str, str] = OrderedDict()

    def __repr__(self) -> str:
        return f"<FetchAssignments {len(self._fetchers)} chunks>"

    def fetcher(
        self, key: str, *, asker: str, without: Collection[str], nodes: Collection[str]
    ) -> str:
        """Who has, or fetches, `key`: whoever asked first; `asker` if nobody did, or only one of
        `without`, or one not among `nodes`."""
        known = self._fetchers.get(key)
        if known is None or known in without or known not in nodes:
            known = self._fetchers[key] = asker
        self._fetchers.move_to_end(key)
        if len(self._fetchers) > _MAX_ASSIGNMENTS:
            self._fetchers.popitem(last=False)
        return known


class InFlightChunks:
    """What this node is about to have. Owner: one event loop."""

    def __init__(self) -> None:
        self._awaited: dict[str, list[asyncio.Event]] = {}

    def __repr__(self) -> str:
        return f"<InFlightChunks {len(self._awaited)} pieces>"

    @contextlib.contextmanager
    def coming(self, key: str) -> Iterator[None]:
        """While this lasts `key` is on its way here."""
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
        """Whether it pays to wait."""
        return key in self._awaited

    async def wait(self, key: str, *, timeout_s: float) -> None:
        """Until `key` is no longer on its way, or for `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(landed.wait() for landed in self._awaited.get(key, ())))
