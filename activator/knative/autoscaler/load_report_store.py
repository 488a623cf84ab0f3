"""The store in which activators report loads and request decisions; in the process for a single
activator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from typing import Protocol

from activator.knative.autoscaler.load_report import Statement, StoredReport

MOST_POKES = 10_000
"""Maximum number of unread requests. Further revisions are found with the next statement."""


class BoardUnreachable(Exception):
    """Raised when the report store does not answer. The message names its address, never its
    password."""


class LoadReportStore(Protocol):
    """The operations of one member on the store."""

    async def post(self, statement: Statement, pokes: Collection[str] = ()) -> None:
        """Replace this member's statement; `pokes`: revisions that need a decision at once. Raises
        BoardUnreachable."""

    async def read(self) -> Mapping[str, StoredReport]:
        """Read the latest statement of every member that has not left. Raises BoardUnreachable."""

    def pokes(self) -> AsyncGenerator[str, None]:
        """Yield keys of revisions that need a decision, forever. Requests without a listener are
        lost; statements are not."""

    async def delete(self) -> None:
        """Delete the own statement: nothing is requested or claimed here. Does not raise."""

    async def aclose(self) -> None:
        """Close the connections; statements remain."""


class InMemoryHub:
    """Shared state of the stores in one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.statements: dict[str, tuple[float, Statement]] = {}
        self.listeners: set[asyncio.Queue[str]] = set()

    def __repr__(self) -> str:
        return f"<InMemoryHub {len(self.statements)} statements, {len(self.listeners)} listen>"


class ProcessBoard:
    """`LoadReportStore` in this process. Owner: the event loop."""

    def __init__(self, wall: InMemoryHub | None = None, *, member: str) -> None:
        self._wall = wall or InMemoryHub()
        self._member = member

    def __repr__(self) -> str:
        return f"<ProcessBoard of {self._member}: {self._wall!r}>"

    async def post(self, statement: Statement, pokes: Collection[str] = ()) -> None:
        """Replace this member's statement."""
        self._wall.statements[self._member] = (self._wall.clock(), dict(statement))
        for key in pokes:
            for listener in self._wall.listeners:
                if listener.qsize() < MOST_POKES:
                    listener.put_nowait(key)

    async def read(self) -> Mapping[str, StoredReport]:
        """Read the statements of all members."""
        now = self._wall.clock()
        return {
            member: StoredReport(statement=said, age_s=now - at)
            for member, (at, said) in self._wall.statements.items()
        }

    async def pokes(self) -> AsyncGenerator[str, None]:
        """Yield keys of revisions that need a decision."""
        mine: asyncio.Queue[str] = asyncio.Queue()
        self._wall.listeners.add(mine)
        try:
            while True:
                yield await mine.get()
        finally:
            self._wall.listeners.discard(mine)

    async def delete(self) -> None:
        """Delete the own statement."""
        self._wall.statements.pop(self._member, None)

    async def aclose(self) -> None:
        """Do nothing: there are no connections."""
