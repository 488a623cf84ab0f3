"""Sends kept traces to the controller. Bounded: traces are dropped if there is no room, and never
delay calls."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import httpx

from activator.tracing.trace_builder import Json
from pilotlight.core.backoff import Backoff
from pilotlight.core.transport.controller_client import controller_client
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.protocol import TRACES_PATH

log = logging.getLogger(__name__)

MAX_HELD = 1000
"""Maximum number of traces; each has some kilobytes, at most 16."""
BATCH = 100
GATHER_S = 0.5
FIRST_RETRY_S, MAX_RETRY_S = 0.5, 5.0


class TraceStore(Protocol):
    """Destination of traces."""

    async def put(self, traces: Sequence[Json]) -> None:
        """Store all traces. Raises httpx.HTTPError."""


class ControllerTraces:
    """The trace store of the controller."""

    def __init__(self, *, controller: Endpoint, token: str, activator: str) -> None:
        self._activator = activator
        self._client = controller_client(controller, token=token, timeout_s=10.0)

    async def put(self, traces: Sequence[Json]) -> None:
        """Send the traces to the controller."""
        response = await self._client.post(
            TRACES_PATH, json={"activator": self._activator, "traces": list(traces)}
        )
        response.raise_for_status()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


class Outbox:
    """Queue of traces. Owner: the event loop. `put` never waits; `run` sends until cancelled.

    Attributes:
        dropped: traces for which there was no room, or that the controller refused."""

    def __init__(
        self, store: TraceStore, *, max_held: int = MAX_HELD, gather_s: float = GATHER_S
    ) -> None:
        self._store = store
        self._max_held = max_held
        self._gather_s = gather_s
        self._held: deque[Json] = deque()
        self._news = asyncio.Event()
        self.dropped = 0
        self.sent = 0

    def __repr__(self) -> str:
        return f"<Outbox {len(self._held)} held, {self.sent} sent, {self.dropped} dropped>"

    def put(self, trace: Json) -> None:
        """Queue a trace; drops the oldest one if the queue is full."""
        if len(self._held) >= self._max_held:
            self._held.popleft()
            self.dropped += 1
        self._held.append(trace)
        self._news.set()

    async def run(self) -> None:
        """Send queued traces in batches."""
        backoff = Backoff(first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S)
        while True:
            await self._news.wait()
            await asyncio.sleep(self._gather_s)
            try:
                await self.flush()
                backoff.reset()
            except httpx.HTTPError as e:
                wait_s = backoff.next_s()
                log.warning(
                    "traces not sent held=%d retry_s=%.1f error=%r", len(self._held), wait_s, e
                )
                await asyncio.sleep(wait_s)

    async def flush(self) -> None:
        """Send the queue. Raises httpx.HTTPError, and keeps what was not accepted."""
        while self._held:
            batch = [self._held.popleft() for _ in range(min(BATCH, len(self._held)))]
            try:
                await self._store.put(batch)
            except httpx.HTTPStatusError as e:
                if e.response.status_code >= 500:
                    self._requeue(batch)
                    raise
                self.dropped += len(batch)  # a retry cannot succeed
                log.error(
                    "the controller refused traces count=%d status=%d",
                    len(batch),
                    e.response.status_code,
                )
            except BaseException:
                self._requeue(batch)
                raise
            else:
                self.sent += len(batch)
        self._news.clear()

    async def flush_or_drop(self) -> None:
        """Call `flush` at the end of the process; drop what the controller does not accept."""
        try:
            await self.flush()
        except httpx.HTTPError as e:
            self.dropped += len(self._held)
            log.warning("traces lost count=%d error=%r", len(self._held), e)

    def _requeue(self, batch: Sequence[Json]) -> None:
        room = max(0, self._max_held - len(self._held))
        kept = batch[len(batch) - room :] if room < len(batch) else batch
        self.dropped += len(batch) - len(kept)
        self._held.extendleft(reversed(kept))
