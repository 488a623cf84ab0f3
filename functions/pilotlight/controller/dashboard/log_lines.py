"""Log lines of a tenant's instances, from the node agent: a bounded tail, and a live stream.

Each line is text that user code wrote: templates escape it, and it is cut to MAX_LINE
characters."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotlight.controller.dashboard.page_context import PageContext
from pilotlight.core.threads import cancel_and_wait
from snapshotter.errors import SnapshotterError

TAIL = 300
"""Lines that a page shows when it is loaded; also the most that one live event carries."""
MAX_LINE = 4000
"""Characters of a line that are shown."""
PATIENCE_S = 5.0
"""How long a page waits for the node agent."""
TOGETHER_S = 0.25
"""Lines that are written within this time are sent together."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Which lines are shown; "" = all. The tenant and the environment come from the session."""

    function: str = ""
    instance: str = ""
    call: str = ""

    def arguments(self, visit: PageContext) -> dict[str, Any]:
        """Return the arguments for `NodeBackend.logs`."""
        app, _, name = self.function.partition("/")
        parts = {"app": app, "function": name}
        return {
            "labels": {
                "tenant": visit.caller.tenant,
                "environment": visit.environment,
                **{key: value for key, value in parts.items() if value},
            },
            "instance_id": self.instance or None,
            "call_id": self.call or None,
        }


async def tail(
    visit: PageContext, wanted: LogFilter, *, since: float | None = None, limit: int = TAIL
) -> tuple[Sequence[Line], str]:
    """Return the last `limit` lines, oldest first, and the error if the agent does not respond."""
    lines: deque[Line] = deque(maxlen=limit)
    try:
        async with asyncio.timeout(PATIENCE_S):
            source = await visit.context.agent.logs(
                **wanted.arguments(visit), since=since, tail=limit
            )
            async with contextlib.aclosing(source):
                async for line in source:
                    if line:
                        lines.append(shown(line))
    except SnapshotterError as e:
        return list(lines), str(e)
    except TimeoutError:
        return list(lines), f"the node agent sent no more lines within {PATIENCE_S:g} s"
    return list(lines), ""


async def follow(visit: PageContext, wanted: LogFilter) -> AsyncGenerator[list[Line], None]:
    """Yield new lines, in groups of at most TAIL; the first has the last TAIL lines.

    At most TAIL lines wait here: the agent is not read while the previous group is being sent.
    Raises SnapshotterError."""
    source = await visit.context.agent.logs(**wanted.arguments(visit), tail=TAIL, follow=True)
    queue: asyncio.Queue[Line | None] = asyncio.Queue(TAIL)

    async def read() -> None:
        try:
            async with contextlib.aclosing(source):
                async for line in source:
                    if line:
                        await queue.put(shown(line))
        finally:
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait(None)

    reading = asyncio.create_task(read(), name="dashboard log")
    try:
        while not (reading.done() and queue.empty()):
            first = await queue.get()
            await asyncio.sleep(TOGETHER_S)
            waiting = [queue.get_nowait() for _ in range(queue.qsize())]
            if group := [line for line in (first, *waiting) if line is not None]:
                yield group
        reading.result()
    finally:
        await cancel_and_wait(reading)


def shown(line: Line) -> Line:
    """Return a line as templates show it."""
    text, at = str(line.get("text", "")), line.get("time")
    return {
        "time": float(at) if isinstance(at, int | float) else None,
        "instance": str(line.get("instance") or ""),
        "stream": str(line.get("stream") or ""),
        "call": str(line.get("call") or ""),
        "text": text if len(text) <= MAX_LINE else text[:MAX_LINE] + "…",
    }
