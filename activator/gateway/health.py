"""Whether this activator lives, and whether calls may be sent to it: what `/healthz` and `/readyz`
answer.

Alive: its event loop turns (or nobody would answer) and its journal takes lines. Ready: it also
knows routes, budgets and the instances that are its own, is a member where several share quotas,
and is not on its way out. Once it was ready it stays so while the controller, Redis or the
cluster's API server are away: it goes on with what it knows, and taking all activators out of a
Service at once would help nobody."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from activator.billing.errors import JournalFull
from activator.billing.journal import Journal
from pilotlight import errors

READY = "/readyz"
SYNC_S = 5.0
"""A disk that takes longer for what was written so far is no disk to keep a journal on."""
ROOM_BYTES = 1 << 20
"""Less than this is no room: a line has some hundred bytes, a segment's beginning some thousand."""

Check = Callable[[], str]
"""What is missing, or ""."""


class Health:
    """Owner: the event loop.

    Attributes:
        is_draining: no new calls should be sent here; those that come are served.
    """

    def __init__(self, *, journal: Journal | None = None, is_served_unbilled: bool = False) -> None:
        """`is_served_unbilled`: calls run although nothing can be written down
        (`activator.journal_full: serve`)."""
        self._journal = journal
        self._is_served_unbilled = is_served_unbilled
        self._checks: list[Check] = []
        self._passed: set[Check] = set()
        self.is_draining = False

    def __repr__(self) -> str:
        return (
            f"<Health {'draining' if self.is_draining else ', '.join(self.missing()) or 'ready'}>"
        )

    def needs(self, check: Check) -> None:
        """Not ready before `check` has passed once."""
        self._checks.append(check)

    def missing(self) -> list[str]:
        """What it waits for before it can serve for the first time."""
        found = []
        for check in self._checks:
            if check in self._passed:
                continue
            if what := check():
                found.append(what)
            else:
                self._passed.add(check)
        return found

    async def expect_alive(self) -> None:
        """Raises Unavailable naming what is wrong."""
        trouble = await self._trouble()
        if trouble:
            raise errors.Unavailable(
                f"this activator cannot write its journal: {trouble}",
                retry_after_s=5,
                missing=["journal"],
            )

    async def expect_ready(self) -> None:
        """Raises Unavailable naming what is missing."""
        missing = self.missing()
        if self.is_draining:
            missing.append("it is being stopped, and serves what still comes")
        if trouble := await self._trouble():
            missing.append(f"its journal: {trouble}")
        if missing:
            raise errors.Unavailable(
                f"this activator is not ready: {'; '.join(missing)}",
                retry_after_s=1,
                missing=missing,
            )

    async def _trouble(self) -> str:
        journal = self._journal
        if journal is None or self._is_served_unbilled:
            return ""
        if journal.statistics().deferred or _free_bytes(journal.directory) < ROOM_BYTES:
            return "there is no room on its disk"
        try:
            async with asyncio.timeout(SYNC_S):
                await journal.wait_synced()
        except JournalFull as e:
            return str(e)
        except TimeoutError:
            return f"its disk has not taken what was written for {SYNC_S:g} s"
        return ""


def _free_bytes(directory: Path) -> int:
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
