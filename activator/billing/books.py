"""The activator's books: one journal, the account of each instance, and the way to the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from activator.billing.account import InstanceAccount
from activator.billing.errors import LedgerRefused, LedgerUnavailable
from activator.billing.journal import Journal
from activator.billing.shipping import Lag, Ledger, Shipper, usage_body
from activator.billing.usage import UsageSubject
from activator.routes import Target
from activator.upstream import Answer, ConnectionPool, UpstreamGone
from pilotlight.pricing import Rates
from pilotlight.protocol import HEADER_PLATFORM_TOKEN, USAGE_PATH

log = logging.getLogger(__name__)

POST_TIMEOUT_S = 30.0
LAST_FLUSH_S = 5.0
"""At shutdown the ledger gets this long to take the last records; what it did not take is shipped by the next start."""


class ClosableLedger(Ledger, Protocol):
    """A ledger that holds connections."""

    async def aclose(self) -> None:
        """Close them."""
        ...


class ControllerLedger:
    """The controller's ledger, behind its Unix socket (`ClosableLedger`): a megabyte of records is one write on a pooled connection."""

    def __init__(self, *, socket: Path, token: str, activator: str) -> None:
        self._activator = activator
        self._connections = ConnectionPool(str(socket))
        self._head = (
            f"POST {USAGE_PATH} HTTP/1.1\r\nhost: controller\r\n{HEADER_PLATFORM_TOKEN}: {token}\r\n"
            "content-type: application/json\r\ncontent-length: "
        ).encode()

    async def accept(self, records: Sequence[bytes]) -> None:
        """See shipping.Ledger."""
        body = usage_body(self._activator, records)
        try:
            async with asyncio.timeout(POST_TIMEOUT_S):
                answer = await self._post(self._head + b"%d\r\n\r\n" % len(body) + body)
        except (UpstreamGone, TimeoutError) as e:
            raise LedgerUnavailable(f"the controller does not take usage records: {e!r}") from e
        if answer.status in (400, 413, 422):
            raise LedgerRefused(f"the controller refused usage records: {(answer.body or b'')[:500].decode(errors='replace')}")
        if answer.status >= 400:
            raise LedgerUnavailable(f"the controller answered {answer.status} to usage records")

    async def _post(self, request: bytes) -> Answer:
        loop = asyncio.get_running_loop()
        connection = self._connections.take_nowait(loop.time()) or await self._connections.open(loop)
        try:
            return await connection.request(request, loop=loop)
        finally:
            self._connections.give_back(connection, loop.time())

    async def aclose(self) -> None:
        """Close the connections."""
        self._connections.close()


class Books:
    """Everything that is written down. Made by `Books.open`, which owns the directory; `run()` is a task; `aclose()` comes last."""

    def __init__(self, *, directory: Path, activator: str, rates: Rates, sync_s: float, free_idle_s: float, ledger: ClosableLedger) -> None:
        """Opens the journal and recovers what the last process left. Raises JournalInUse, JournalFull."""
        self.journal, self.recovered = Journal.open(directory, activator=activator, sync_s=sync_s)
        self._rates = rates
        self._free_idle_ns = int(free_idle_s * 1e9)
        self._ledger = ledger
        self._shipper = Shipper(self.journal, ledger)
        if self.recovered.lost or self.recovered.unfinished:
            log.warning("recovered lost=%d unfinished=%d", len(self.recovered.lost), len(self.recovered.unfinished))

    def __repr__(self) -> str:
        return f"<Books {self.journal!r} {self._shipper!r}>"

    def account(self, target: Target, instance_id: str) -> InstanceAccount:
        """A new instance's account."""
        subject = UsageSubject(
            tenant=target.tenant,
            environment=target.environment,
            app=target.app,
            function=target.function,
            function_id=target.function_id,
            revision=target.revision,
            instance=instance_id,
        )
        return InstanceAccount(
            self.journal,
            subject=subject,
            footprint=target.footprint,
            rates=self._rates,
            started_ns=time.monotonic_ns(),
            free_ns=self._free_idle_ns,
        )

    def lag(self) -> Lag:
        """How far the ledger is behind."""
        return self._shipper.lag()

    async def run(self) -> None:
        """Group commit and shipping, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.journal.run(), name="journal")
            group.create_task(self._shipper.run(), name="usage shipping")

    async def aclose(self) -> None:
        """Ship what is left, if the ledger takes it soon, and close the journal."""
        with contextlib.suppress(LedgerUnavailable, TimeoutError, OSError):
            async with asyncio.timeout(LAST_FLUSH_S):
                await self._shipper.flush()
        self.journal.close()
        await self._ledger.aclose()
