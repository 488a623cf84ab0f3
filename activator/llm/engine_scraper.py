"""Polls the metrics of engines: often while they have calls, rarely while idle.

A scrape is not a call: it uses no slot, creates no record, does not keep an instance awake, and has
its own connection. A scrape without an answer within the deadline returns nothing and delays no
other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from activator.balancing.instance import Instance
from activator.llm.engine_metrics import EngineMetrics, parse
from activator.llm.engine_throttler import EngineThrottler
from activator.routing.route_table import CallTarget
from activator.worker_client.address import connect
from activator.worker_client.connection import WorkerConnection, WorkerConnectionLost

if TYPE_CHECKING:
    from activator.balancing.throttler import Throttler
    from activator.llm.engine_state import EngineState

log = logging.getLogger(__name__)

EVERY_S = 2.0
"""Interval of scrapes of an engine with calls: the same as the autoscaler's decisions."""
IDLE_EVERY_S = 15.0
DEADLINE_S = 1.0
MAX_BYTES = 256 * 1024
"""Maximum size of an answer: vLLM sends some 60 KiB per scheduler. A tenant controls the engine,
and must not use up the activator's time."""
AT_ONCE = 16
_REQUEST = b"GET /metrics HTTP/1.1\r\nhost: worker\r\nconnection: close\r\n\r\n"


def _ignore(_target: CallTarget, _view: EngineState) -> None:
    """Default of `seen`: only the throttlers use the state."""


class EngineScraper:
    """The scrape loop. Owner: the event loop of the activator. `throttlers`: of all active
    revisions."""

    def __init__(
        self,
        throttlers: Callable[[], Iterable[Throttler]],
        *,
        every_s: float = EVERY_S,
        deadline_s: float = DEADLINE_S,
        seen: Callable[[CallTarget, EngineState], None] = _ignore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seen`: called with each answer."""
        self._throttlers = throttlers
        self._every_s = every_s
        self._deadline_s = deadline_s
        self._seen = seen
        self._clock = clock
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def __repr__(self) -> str:
        return f"<EngineScraper {len(self.views())} engines known, asked each {self._every_s:g} s>"

    def views(self) -> Mapping[str, EngineState]:
        """The state of engines, by instance."""
        return {instance_id: view for instance_id, (_, view) in self.known().items()}

    def known(self) -> Mapping[str, tuple[CallTarget, EngineState]]:
        """The same, with the revision of the instance."""
        return {
            instance_id: (throttler.target, view)
            for throttler in self._engines()
            for instance_id, view in throttler.views().items()
        }

    async def run(self) -> None:
        """Scrape periodically, until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.scrape()

    async def scrape(self) -> None:
        """Scrape the engines that are due, concurrently. Returns when each has answered or timed
        out."""
        async with asyncio.TaskGroup() as tasks:
            for throttler, instance in self._due():
                tasks.create_task(
                    self._scrape_instance(throttler, instance), name=f"metrics of {instance.id}"
                )

    def _engines(self) -> list[EngineThrottler]:
        return [
            throttler
            for throttler in self._throttlers()
            if isinstance(throttler, EngineThrottler) and throttler.target.spec.engine is not None
        ]

    def _due(self) -> list[tuple[EngineThrottler, Instance]]:
        """Engines with calls are due each time, and once after the last call; others each
        IDLE_EVERY_S."""
        now, due = self._clock(), []
        for throttler in self._engines():
            for instance in throttler.live():
                watched = throttler.watched(instance)
                if instance.in_flight or now >= watched.due_at:
                    watched.due_at = (
                        0.0 if instance.in_flight else now + max(IDLE_EVERY_S, self._every_s)
                    )
                    due.append((throttler, instance))
        return due

    async def _scrape_instance(self, throttler: EngineThrottler, instance: Instance) -> None:
        async with self._at_once:
            reading = await read(instance.info.socket, deadline_s=self._deadline_s)
        if reading is None:
            log.debug("engine sent no metrics instance=%s", instance.id)
        if not instance.is_gone:
            view = throttler.record_metrics(instance, reading)
            if reading is not None and view is not None:
                self._seen(throttler.target, view)


async def read(path: str, *, deadline_s: float = DEADLINE_S) -> EngineMetrics | None:
    """Read the metrics of the engine at `path` (an address). None when there is no valid answer in
    time."""
    try:
        async with asyncio.timeout(deadline_s):
            text = await _fetch(path)
    except (WorkerConnectionLost, TimeoutError, OSError):
        return None
    return parse(text) if text is not None else None


async def _fetch(path: str) -> bytes | None:
    """The body of its answer; None if the status is not 200, or it is too long."""
    loop = asyncio.get_running_loop()
    connection = await connect(loop, WorkerConnection, path)
    try:
        answer = await connection.request(_REQUEST, loop=loop)
        if answer.status != 200:
            return None
        if answer.body is not None:
            return answer.body
        pieces, size = [], 0
        async for piece in answer.chunks():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BYTES:
                return None
        return b"".join(pieces)
    finally:
        connection.close()
