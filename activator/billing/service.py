"""The activator's billing service: one journal, one account per instance, and the connection to the
ledger."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from activator.billing.budgets.applicable import Subject
from activator.billing.budgets.budgets import Budgets
from activator.billing.budgets.leases import BudgetLeaser, BudgetLeaseStore
from activator.billing.budgets.sync import BudgetSource, BudgetStates, parse_states
from activator.billing.errors import LedgerRefused, LedgerUnavailable
from activator.billing.instance_account import InstanceAccount
from activator.billing.instance_time import BillingTerms
from activator.billing.journal import Journal
from activator.billing.shipping import Lag, Ledger, Shipper, usage_body
from activator.billing.usage_pricing import UsageSubject
from activator.quotas.token_reservation import TokenReservation
from activator.routing.route_table import CallTarget
from activator.worker_client.connection import (
    ConnectionPool,
    WorkerConnection,
    WorkerConnectionLost,
    WorkerResponse,
)
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.protocol import BUDGETS_PATH, USAGE_PATH, BudgetState
from pilotlight.spec.pricing import GpuState, Rates
from snapshotter.types import GpuGrant

log = logging.getLogger(__name__)

POST_TIMEOUT_S = 30.0
LAST_FLUSH_S = 5.0
"""At shutdown the ledger gets this long to accept the last records. The next start ships the
rest."""
UNBILLED_LOG_S = 60.0
"""Minimum interval between two log lines about unbilled calls."""


class ClosableLedger(Ledger, BudgetSource, Protocol):
    """A ledger that holds connections and reports the state of budgets."""

    async def aclose(self) -> None:
        """Close the connections."""


class UsageObserver(Protocol):
    """Counts usage in metrics."""

    def unbilled(self) -> None:
        """A call was served without a billing record."""

    def gpu_time(self, subject: UsageSubject, gpu: str, state: GpuState, seconds: float) -> None:
        """GPUs of this kind were in this state for so many GPU seconds."""


class _ControllerPool(ConnectionPool):
    """Connections to the controller, which may be on another machine."""

    __slots__ = ("_address",)

    def __init__(self, address: Endpoint) -> None:
        super().__init__(str(address))
        self._address = address

    async def open(self, loop: asyncio.AbstractEventLoop) -> WorkerConnection:
        """Open a connection. Raises WorkerConnectionLost."""
        try:
            return await self._address.connect(loop, WorkerConnection)
        except OSError as e:
            raise WorkerConnectionLost(
                f"cannot connect to the controller at {self._address}: {e.strerror or e}",
                sent=False,
            ) from e


class ControllerLedger:
    """The controller's ledger (`ClosableLedger`). A megabyte of records is one write on a pooled
    connection."""

    def __init__(self, *, controller: Endpoint, token: str, activator: str) -> None:
        self._activator = activator
        self._connections = _ControllerPool(controller)
        head = f"HTTP/1.1\r\nhost: controller\r\n{HEADER_PLATFORM_TOKEN}: {token}\r\n"
        self._post_head = (
            f"POST {USAGE_PATH} {head}content-type: application/json\r\ncontent-length: ".encode()
        )
        self._head = head

    async def accept(self, records: Sequence[bytes]) -> Mapping[str, BudgetState]:
        """Send the records to the controller. Raises LedgerUnavailable or LedgerRefused."""
        body = usage_body(self._activator, records)
        answer = await self._request(self._post_head + b"%d\r\n\r\n" % len(body) + body)
        if answer.status in (400, 413, 422):
            raise LedgerRefused(f"the controller refused usage records: {_body_start(answer)}")
        if answer.status >= 400:
            raise LedgerUnavailable(f"the controller answered {answer.status} to usage records")
        return _parse_states(answer)  # the records are accepted, even if the states are invalid

    async def budgets(self, ids: Collection[str] = ()) -> Mapping[str, BudgetState]:
        """Read the state of these budgets, () = of all, from the controller. Raises
        LedgerUnavailable."""
        query = "?" + "&".join(f"id={name}" for name in ids) if ids else ""
        answer = await self._request(f"GET {BUDGETS_PATH}{query} {self._head}\r\n".encode())
        if answer.status >= 400:
            raise LedgerUnavailable(
                f"the controller answered {answer.status} to the request for budgets: "
                f"{_body_start(answer)}"
            )
        return _parse_states(answer)

    async def _request(self, request: bytes) -> WorkerResponse:
        try:
            async with asyncio.timeout(POST_TIMEOUT_S):
                return await self._exchange(request)
        except (WorkerConnectionLost, TimeoutError) as e:
            raise LedgerUnavailable(f"the controller does not answer: {e!r}") from e

    async def _exchange(self, request: bytes) -> WorkerResponse:
        loop = asyncio.get_running_loop()
        connection = self._connections.acquire_nowait(loop.time()) or await self._connections.open(
            loop
        )
        try:
            answer = await connection.request(request, loop=loop)
            if answer.body is None:
                answer.body = b"".join([chunk async for chunk in answer.chunks()])
            return answer
        finally:
            self._connections.release(connection, loop.time())

    async def aclose(self) -> None:
        """Close the connections."""
        self._connections.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBudgets:
    """The store of hard budgets that several activators share. While it does not answer, each
    activator spends as if it were alone (`is_open`), or only what it has borrowed."""

    store: BudgetLeaseStore
    is_open: bool = False


class BillingService:
    """The billing of an activator. It owns its directory; run `run()` as a task and call `aclose()`
    last.

    Attributes:
        budgets: the hard budgets and their balances.
        on_unbilled: counts a call that the journal had no room for; None = it is refused.
        unbilled: number of calls that were served although the journal had no room."""

    def __init__(
        self,
        *,
        directory: Path,
        activator: str,
        sync_s: float,
        free_idle_s: float,
        ledger: ClosableLedger,
        shared: SharedBudgets | None = None,
        is_served_unbilled: bool = False,
        observer: UsageObserver | None = None,
    ) -> None:
        """Opens the journal and recovers what the last process left. Raises JournalInUse,
        JournalFull.

        `shared`: None = this is the only activator. `is_served_unbilled`: a call that the journal
        has no room for runs all the same, and is counted (`journal_full: serve`)."""
        self.journal, self.recovered = Journal.open(directory, activator=activator, sync_s=sync_s)
        self._free_idle_ns = int(free_idle_s * 1e9)
        self._ledger = ledger
        self.budgets = Budgets(is_shared=shared is not None)
        self._borrower = (
            BudgetLeaser(shared.store, budgets=self.budgets, is_open=shared.is_open)
            if shared is not None
            else None
        )
        self.budgets.lender = self._borrower
        self.shipper = Shipper(
            self.journal, ledger, before_batch=self._before_batch, on_accepted=self._on_accepted
        )
        self._states = BudgetStates(
            self.budgets, journal=self.journal, source=ledger, lock=self.shipper.lock
        )
        self.unbilled = 0
        self.on_unbilled = self._count_unbilled if is_served_unbilled else None
        self._observer = observer
        self._unbilled_logged_at = -UNBILLED_LOG_S
        if self.recovered.lost or self.recovered.unfinished:
            log.warning(
                "recovered lost=%d unfinished=%d",
                len(self.recovered.lost),
                len(self.recovered.unfinished),
            )

    def __repr__(self) -> str:
        free_s = self._free_idle_ns / 1e9
        parts = f"{self.journal!r} {self.shipper!r} {self.budgets!r}"
        return f"<BillingService {free_s:g} s free {parts}>"

    def account(
        self, target: CallTarget, instance_id: str, gpus: GpuGrant | None = None
    ) -> InstanceAccount:
        """Create a new instance's account. `gpus`: those that it was granted, by which it is
        priced; None = the first kind that its revision names.

        Raises Unavailable when the granted kind has no price."""
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
            terms=BillingTerms(
                footprint=target.granted_footprint(gpus),
                worst=target.footprint,
                rates=target.rates,
                free_ns=self._free_idle_ns,
                limit_ns=_ns(target.spec.clocks.execution_s),
                is_free=target.is_shadow,
            ),
            started_ns=time.monotonic_ns(),
            budgets=self.budgets,
            on_unbilled=self.on_unbilled,
            on_gpu_time=self._observer.gpu_time if self._observer is not None else None,
        )

    def is_spent(self, target: CallTarget) -> bool:
        """Whether a hard budget leaves no room for even one call of this target. Then nothing is
        kept warm or started for it."""
        rates = target.rates
        return self.budgets.is_spent(
            _subject(target, rates), target, rates, limit_ns=_ns(target.spec.clocks.execution_s)
        )

    def check(
        self,
        target: CallTarget,
        limit_s: float,
        tokens: TokenReservation | None = None,
        customer: str = "",
    ) -> None:
        """Refuse a call that may take `limit_s` and these tokens, before it waits for an instance
        or has one started.

        Raises OverBudget, BudgetReserved."""
        rates = target.rates
        self.budgets.check(
            _subject(target, rates),
            target,
            rates,
            limit_ns=_ns(limit_s),
            tokens=tokens,
            customer=customer,
        )

    async def load_budgets(self) -> None:
        """Load what was spent, before calls are served. Without a controller it takes at most
        `budgets.sync.FIRST_STATES_S`."""
        await self._states.load()
        if self._borrower is not None:
            # release what the previous process borrowed, except what it spent
            await self._borrower.state_claims()

    async def _before_batch(self) -> None:
        await self._states.count_own()

    async def _on_accepted(
        self, states: Mapping[str, BudgetState], records: Sequence[bytes]
    ) -> None:
        await self._states.accepted(states, records)

    def _count_unbilled(self) -> None:
        self.unbilled += 1
        if self._observer is not None:
            self._observer.unbilled()
        now_s = time.monotonic()
        if now_s - self._unbilled_logged_at >= UNBILLED_LOG_S:
            self._unbilled_logged_at = now_s
            log.error(
                "the journal is full and journal_full is 'serve': calls run unbilled total=%d",
                self.unbilled,
            )

    def lag(self) -> Lag:
        """How far the ledger is behind."""
        return self.shipper.lag()

    async def run(self) -> None:
        """Group commit and shipping, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.journal.run(), name="journal")
            group.create_task(self.shipper.run(), name="usage shipping")
            group.create_task(self._states.run(), name="budget states")
            if self._borrower is not None:
                group.create_task(self._borrower.run(), name="budget allowances")

    async def aclose(self) -> None:
        """Ship the remaining records, if the ledger accepts them in time, and close the journal."""
        with contextlib.suppress(LedgerUnavailable, TimeoutError, OSError):
            async with asyncio.timeout(LAST_FLUSH_S):
                await self.shipper.flush()
        if self._borrower is not None:
            await self._borrower.aclose()
        self.journal.close()
        await self._ledger.aclose()


def _ns(seconds: float) -> int:
    return max(0, int(seconds * 1e9))


def _subject(target: CallTarget, rates: Rates) -> Subject:
    return Subject(target.tenant, target.environment, target.app, target.function, rates.currency)


def _body_start(answer: WorkerResponse) -> str:
    return (answer.body or b"")[:500].decode(errors="replace")


def _parse_states(answer: WorkerResponse) -> Mapping[str, BudgetState]:
    try:
        body = json.loads(answer.body or b"{}")
    except ValueError:
        log.error("budget states from the controller are not valid JSON: %s", _body_start(answer))
        return {}
    return parse_states(body.get("budgets", {}) if isinstance(body, dict) else {})
