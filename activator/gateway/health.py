"""Liveness and readiness of this activator, served at `/healthz` and `/readyz`.

Alive: its event loop runs and its journal accepts writes. Ready: it also has routes, budgets and
its leased instances, is a member where several activators share quotas, and is not shutting down.
Once ready it stays so while the controller, Redis or the cluster's API server are unavailable: it
continues with its last state, because removing all activators from a Service at once would not
help."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from activator.billing.errors import JournalFull
from activator.billing.journal import Journal
from activator.control_plane.proxy import ControlPlaneProxy
from activator.coordination.peers import PASSED_ON
from activator.http.request import Request
from activator.routing.route_table import RouteTable
from pilotlight import errors

READY = "/readyz"
SYNC_S = 5.0
"""Timeout of a sync of the journal: a slower disk counts as failed."""
ROOM_BYTES = 1 << 20
"""Minimum free disk space: a line has some hundred bytes, a segment's beginning some thousand."""

Check = Callable[[], str]
"""Returns what is missing, or ""."""


class Health:
    """Health state of one activator. Owner: the event loop.

    Attributes:
        is_draining: no new calls should be sent here; those that arrive are served.
    """

    def __init__(self, *, journal: Journal | None = None, is_served_unbilled: bool = False) -> None:
        """`is_served_unbilled`: calls run although the journal cannot be written
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
        """Add a check that must pass once before the activator is ready."""
        self._checks.append(check)

    def missing(self) -> list[str]:
        """Return the results of the checks that have not passed yet."""
        found = []
        for check in self._checks:
            if check in self._passed:
                continue
            if what := check():
                found.append(what)
            else:
                self._passed.add(check)
        return found

    async def require_alive(self) -> None:
        """Check liveness. Raises Unavailable with the reason."""
        trouble = await self._trouble()
        if trouble:
            raise errors.Unavailable(
                f"this activator cannot write its journal: {trouble}",
                retry_after_s=5,
                missing=["journal"],
            )

    async def require_ready(self) -> None:
        """Check readiness. Raises Unavailable with what is missing."""
        missing = self.missing()
        if self.is_draining:
            missing.append("it is shutting down, and serves calls that still arrive")
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
            return "its disk is full"
        try:
            async with asyncio.timeout(SYNC_S):
                await journal.wait_synced()
        except JournalFull as e:
            return str(e)
        except TimeoutError:
            return f"its disk did not complete a sync within {SYNC_S:g} s"
        return ""


class HealthApi:
    """`/healthz` and `/readyz`, without authentication because probes have no key."""

    def __init__(self, health: Health, *, control: ControlPlaneProxy, table: RouteTable) -> None:
        self._health = health
        self._control = control
        self._table = table

    async def answer(self, request: Request) -> None:
        """Answer a probe. Raises Unavailable, NotFound."""
        request.require_method("GET", "HEAD")
        if (
            PASSED_ON in request.headers and not request.address
        ):  # a peer activator, over our Unix socket
            await self._control.catch_up()
        await (
            self._health.require_ready() if request.path == READY else self._health.require_alive()
        )
        await request.respond_json(
            200,
            {"status": "ready" if request.path == READY else "ok", "routes": self._table.version},
        )


def _free_bytes(directory: Path) -> int:
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
