"""Where activators leave their statements, and poke whoever decides; in the process for a lone
activator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from typing import Protocol

from activator.knative.autoscaler.load_report import Statement, StoredReport

MOST_POKES = 10_000
"""That nobody has read yet: a revision more is found with the next statement."""


class BoardUnreachable(Exception):
    """Raised when what activators share does not answer; the message names its address, never its
    password."""


class LoadReportStore(Protocol):
    """The verbs, as one member sees them."""

    async def post(self, statement: Statement, pokes: Collection[str] = ()) -> None:
        """State everything anew; `pokes`: revisions to be decided on at once. Raises
        BoardUnreachable."""
        ...

    async def read(self) -> Mapping[str, StoredReport]:
        """The last statement of every member that has made one and did not leave. Raises
        BoardUnreachable."""
        ...

    def pokes(self) -> AsyncGenerator[str, None]:
        """Keys of revisions to be decided on, as they come, for ever. What is poked while nobody
        listens is lost: statements are not."""
        ...

    async def leave(self) -> None:
        """Take the own statement away: nothing is wanted or held here any more. Does not raise."""
        ...

    async def aclose(self) -> None:
        """Close the connections; statements stay."""
        ...


class InMemoryHub:
    """What a process' boards hang on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.statements: dict[str, tuple[float, Statement]] = {}
        self.listeners: set[asyncio.Queue[str]] = set()

    def __repr__(self) -> str:
        return f"<Wall {len(self.statements)} statements, {len(self.listeners)} listen>"


class ProcessBoard:
    """`Board` in this process. Owner: the event loop."""

    def __init__(self, wall: InMemoryHub | None = None, *, member: str) -> None:
        self._wall = wall or InMemoryHub()
        self._member = member

    def __repr__(self) -> str:
        return f"<ProcessBoard of {self._member}: {self._wall!r}>"

    async def post(self, statement: Statement, pokes: Collection[str] = ()) -> None:
        """See Board."""
        self._wall.statements[self._member] = (self._wall.clock(), dict(statement))
        for key in pokes:
            for listener in self._wall.listeners:
                if listener.qsize() < MOST_POKES:
                    listener.put_nowait(key)

    async def read(self) -> Mapping[str, StoredReport]:
        """See Board."""
        now = self._wall.clock()
        return {
            member: StoredReport(statement=said, age_s=now - at)
            for member, (at, said) in self._wall.statements.items()
        }

    async def pokes(self) -> AsyncGenerator[str, None]:
        """See Board."""
        mine: asyncio.Queue[str] = asyncio.Queue()
        self._wall.listeners.add(mine)
        try:
            while True:
                yield await mine.get()
        finally:
            self._wall.listeners.discard(mine)

    async def leave(self) -> None:
        """See Board."""
        self._wall.statements.pop(self._member, None)

    async def aclose(self) -> None:
        """See Board."""
