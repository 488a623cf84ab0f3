"""Asks the controller for calls that are due (schedules, dead letters sent again), and sees to it that each is run here or elsewhere, once.

The order is what makes it once: a call that is handed out is written into the journal, then taken, and begun only when the answer says that
it is ours. Killed before it is written down, the claim lapses and another asks. Killed after that, this activator finds it in its journal,
and asks whether it is still its own before it begins it.

Owner: the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import httpx

from pilotlight import errors
from pilotlight.protocol import DUE_PATH, HEADER_PLATFORM_TOKEN
from weight_cache.addresses import Address

log = logging.getLogger(__name__)

WAIT_S = 25.0
"""How long the controller may hold a question open."""
ANSWER_S = 10.0
RETRY_S = (0.1, 0.5, 1.0, 5.0)


class Keeper(Protocol):
    """Who writes due calls down and runs them (`calls.SubmittedCalls`)."""

    async def keep(self, kept: dict[str, Any]) -> None:
        """Write a call down, without running it. Raises TooManyRequests, JournalFull, Conflict."""
        ...

    def kept(self) -> list[str]:
        """Those that are written down and not begun, by `due`."""
        ...

    def begin_kept(self, asked: list[str], ours: list[str]) -> None:
        """Of those `asked` about run `ours`, forget the others."""
        ...


class DueCalls:
    """See the module."""

    def __init__(self, keeper: Keeper, *, controller: Address, token: str, activator: str, wait_s: float = WAIT_S) -> None:
        self._keeper = keeper
        self._activator = activator
        self._wait_s = wait_s
        self._client = httpx.AsyncClient(
            transport=controller.transport(),
            base_url=controller.base_url,
            headers={HEADER_PLATFORM_TOKEN: token},
            timeout=httpx.Timeout(ANSWER_S, read=wait_s + ANSWER_S),
        )

    def __repr__(self) -> str:
        return f"<DueCalls of {self._activator}: {len(self._keeper.kept())} not taken>"

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
        """First what an earlier life, or an earlier round, left in the journal; then what has become due.

        Raises httpx.HTTPError, TooManyRequests, JournalFull, Conflict.
        """
        await self._take()
        asked = {"activator": self._activator, "wait_s": f"{self._wait_s:g}"}
        response = await self._client.get(DUE_PATH, params=asked)
        response.raise_for_status()
        try:
            for kept in response.json()["calls"]:
                await self._keeper.keep(kept)
        finally:
            await self._take()

    async def _take(self) -> None:
        asked = self._keeper.kept()
        if not asked:
            return
        response = await self._client.post(DUE_PATH, json={"activator": self._activator, "ids": asked})
        response.raise_for_status()
        self._keeper.begin_kept(asked, response.json()["yours"])

    async def aclose(self) -> None:
        """Close the connection; what was written down is asked about by the next life."""
        await self._client.aclose()
