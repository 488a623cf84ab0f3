"""Asks the controller for calls that are due (schedules, dead letters sent again), and sees to it
that each is run here or elsewhere, once.

The order is what makes it once: a call that is handed out is written into the journal, then taken,
and begun only when the answer says that it is ours. Killed before it is written down, the claim
lapses and another asks. Killed after that, this activator finds it in its journal, and asks whether
it is still its own before it begins it.

A call that there is no room for stays with the controller, and so do its tenant's others for a
while: other tenants' calls go on.

Owner: the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

import httpx

from pilotlight import errors
from pilotlight.protocol import DUE_PATH, HEADER_PLATFORM_TOKEN, MAX_WITHOUT
from weight_cache.addresses import Address
from weight_cache.cookies import no_cookies

log = logging.getLogger(__name__)

WAIT_S = 25.0
"""How long the controller may hold a question open."""
ANSWER_S = 10.0
RETRY_S = (0.1, 0.5, 1.0, 5.0)
FULL_S = 5.0
"""A tenant whose call was refused is not asked for again before: until then some of what fills its
room may have ended."""

CROWDED_S = 0.5


class ScheduledCallSink(Protocol):
    """Who writes due calls down and runs them (`calls.SubmittedCalls`)."""

    async def keep(self, kept: dict[str, Any]) -> None:
        """Write a call down, without running it. Raises TooManyRequests, JournalFull, Conflict."""
        ...

    def kept(self) -> list[str]:
        """Those that are written down and not begun, by `due`."""
        ...

    def begin_kept(self, asked: list[str], ours: list[str]) -> None:
        """Of those `request` about run `ours`, forget the others."""
        ...


class SchedulePoller:
    """See the module."""

    def __init__(
        self,
        keeper: ScheduledCallSink,
        *,
        controller: Address,
        token: str,
        activator: str,
        wait_s: float = WAIT_S,
    ) -> None:
        self._keeper = keeper
        self._activator = activator
        self._wait_s = wait_s
        self._full: dict[str, float] = {}
        """Tenants that there was no room for, and until when (time.monotonic) they are left out."""
        self._client = httpx.AsyncClient(
            transport=controller.transport(),
            base_url=controller.base_url,
            headers={HEADER_PLATFORM_TOKEN: token},
            timeout=httpx.Timeout(ANSWER_S, read=wait_s + ANSWER_S),
            cookies=no_cookies(),
        )

    def __repr__(self) -> str:
        return f"<SchedulePoller of {self._activator}: {len(self._keeper.kept())} not taken>"

    async def run(self) -> None:
        """Ask until cancelled. While the controller is away what is due waits there."""
        failures = 0
        while True:
            try:
                await self.round()
                failures = 0
            except (httpx.HTTPError, errors.PilotlightError) as e:
                if failures == 0:
                    log.warning("due calls wait error=%r", e)
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1

    async def round(self) -> None:
        """First what an earlier life, or an earlier round, left in the journal; then what has
        become due.

        Raises httpx.HTTPError, JournalFull.
        """
        await self._take()
        # not all can be named: what comes may be theirs again, at once
        if len(self._full) > MAX_WITHOUT:
            await asyncio.sleep(CROWDED_S)
        response = await self._client.get(DUE_PATH, params=self._question())
        response.raise_for_status()
        try:
            for kept in response.json()["calls"]:
                await self._keep(kept)
        finally:
            await self._take()

    def _question(self) -> dict[str, str | list[str]]:
        now = time.monotonic()
        self._full = {tenant: until for tenant, until in self._full.items() if until > now}
        left_out = sorted(self._full)[:MAX_WITHOUT]
        wait_s = min(self._wait_s, FULL_S) if left_out else self._wait_s
        return {"activator": self._activator, "wait_s": f"{wait_s:g}", "without": left_out}

    async def _keep(self, kept: dict[str, Any]) -> None:
        """Raises JournalFull."""
        tenant = str(kept["record"]["tenant"])
        if tenant in self._full:
            return
        try:
            await self._keeper.keep(kept)
        except (errors.TooManyRequests, errors.Conflict) as e:
            log.warning("event=due_call_waits call=%s error=%s", kept["due"], e)
            self._full[tenant] = time.monotonic() + min(e.retry_after_s or FULL_S, FULL_S)

    async def _take(self) -> None:
        asked = self._keeper.kept()
        if not asked:
            return
        response = await self._client.post(
            DUE_PATH, json={"activator": self._activator, "ids": asked}
        )
        response.raise_for_status()
        self._keeper.begin_kept(asked, response.json()["yours"])

    async def aclose(self) -> None:
        """Close the connection; what was written down is asked about by the next life."""
        await self._client.aclose()
