"""Polls the controller for due calls (schedules, dead letters sent again), and ensures that each is
run once, here or by another activator.

The order guarantees that: a call that the controller hands out is written to the journal, then
claimed, and begun only when the controller confirms the claim. If the process dies before the
write, the hand-out lapses and another activator gets the call. If it dies after that, this
activator finds the call in its journal, and confirms its claim before it begins the call.

A call for which there is no capacity stays with the controller, and so do its tenant's other calls
for a while; other tenants' calls continue.

Owner: the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

import httpx

from pilotlight import errors
from pilotlight.core.backoff import Backoff
from pilotlight.core.transport.controller_client import controller_client
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.protocol import DUE_PATH, MAX_WITHOUT

log = logging.getLogger(__name__)

WAIT_S = 25.0
"""Long poll timeout of the controller."""
ANSWER_S = 10.0
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 5.0
FULL_S = 5.0
"""Pause for the due calls of a tenant after one was refused: by then some of its pending calls may
have ended."""

CROWDED_S = 0.5


class ScheduledCallSink(Protocol):
    """Stores due calls in the journal and runs them (`service.AsyncCalls`)."""

    async def store(self, kept: dict[str, Any]) -> None:
        """Write a call to the journal, without running it. Raises TooManyRequests, JournalFull,
        Conflict."""

    def stored(self) -> list[str]:
        """Return the `due` ids of calls that are stored and not begun."""

    def begin_stored(self, asked: list[str], ours: list[str]) -> None:
        """Run the calls in `ours`, and delete the others in `asked`."""

    async def cancel_stored(self, calls: list[str]) -> None:
        """Cancel those of these calls that are pending here."""


class SchedulePoller:
    """Polls the controller for due calls and passes them to a sink."""

    def __init__(
        self,
        keeper: ScheduledCallSink,
        *,
        controller: Endpoint,
        token: str,
        activator: str,
        wait_s: float = WAIT_S,
    ) -> None:
        self._sink = keeper
        self._activator = activator
        self._wait_s = wait_s
        self._full: dict[str, float] = {}
        """Tenants without capacity, and until when (time.monotonic) they are skipped."""
        self._client = controller_client(
            controller, token=token, timeout_s=ANSWER_S, read_s=wait_s + ANSWER_S
        )

    def __repr__(self) -> str:
        return f"<SchedulePoller of {self._activator}: {len(self._sink.stored())} not claimed>"

    async def run(self) -> None:
        """Poll until cancelled. While the controller is unavailable due calls wait there."""
        backoff = Backoff(first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S)
        while True:
            try:
                await self.round()
                backoff.reset()
            except (httpx.HTTPError, errors.PilotlightError) as e:
                if not backoff.failures:
                    log.warning("cannot poll the controller for due calls; retrying error=%r", e)
                await backoff.pause()

    async def round(self) -> None:
        """Run one poll: first claim calls that an earlier process or round left in the journal,
        then fetch new due calls.

        Raises httpx.HTTPError, JournalFull.
        """
        await self._claim_stored()
        # the query cannot name all of them, so their calls may be returned again at once
        if len(self._full) > MAX_WITHOUT:
            await asyncio.sleep(CROWDED_S)
        response = await self._client.get(DUE_PATH, params=self._query())
        response.raise_for_status()
        answer = response.json()
        try:
            for kept in answer["calls"]:
                await self._store(kept)
        finally:
            await self._claim_stored()
        if cancelled := answer.get("cancel"):
            await self._sink.cancel_stored(cancelled)

    def _query(self) -> dict[str, str | list[str]]:
        now = time.monotonic()
        self._full = {tenant: until for tenant, until in self._full.items() if until > now}
        left_out = sorted(self._full)[:MAX_WITHOUT]
        wait_s = min(self._wait_s, FULL_S) if left_out else self._wait_s
        return {"activator": self._activator, "wait_s": f"{wait_s:g}", "without": left_out}

    async def _store(self, kept: dict[str, Any]) -> None:
        """Store a due call, or skip its tenant while there is no capacity. Raises JournalFull."""
        tenant = str(kept["record"]["tenant"])
        if tenant in self._full:
            return
        try:
            await self._sink.store(kept)
        except (errors.TooManyRequests, errors.Conflict) as e:
            log.warning("event=due_call_waits call=%s error=%s", kept["due"], e)
            self._full[tenant] = time.monotonic() + min(e.retry_after_s or FULL_S, FULL_S)

    async def _claim_stored(self) -> None:
        asked = self._sink.stored()
        if not asked:
            return
        response = await self._client.post(
            DUE_PATH, json={"activator": self._activator, "ids": asked}
        )
        response.raise_for_status()
        self._sink.begin_stored(asked, response.json()["yours"])

    async def aclose(self) -> None:
        """Close the connection; the next process claims the stored calls."""
        await self._client.aclose()
