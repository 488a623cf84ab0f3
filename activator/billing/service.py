"""The activator's books: one journal, the account of each instance, and the way to the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from activator.billing.budget_leases import BudgetLeaser, BudgetLeaseStore
from activator.billing.budget_sync import BudgetSource, BudgetStates, parse_states
from activator.billing.budgets import Budgets, Subject
from activator.billing.errors import LedgerRefused, LedgerUnavailable
from activator.billing.instance_meter import InstanceAccount
from activator.billing.journal import Journal
from activator.billing.shipping import Lag, Ledger, Shipper, usage_body
from activator.billing.usage import UsageSubject
from activator.llm.token_reservation import TokenReservation
from activator.routing.route_table import CallTarget
from activator.worker_client.connection import (
    ConnectionPool,
    WorkerConnection,
    WorkerConnectionLost,
    WorkerResponse,
)
from pilotlight.pricing import Rates
from pilotlight.protocol import BUDGETS_PATH, HEADER_PLATFORM_TOKEN, USAGE_PATH, BudgetState
from weight_cache.addresses import Address

log = logging.getLogger(__name__)

POST_TIMEOUT_S = 30.0
LAST_FLUSH_S = 5.0
"""At shutdown the ledger gets this long to take the last records; what it did not take is shipped
by the next start."""
UNBILLED_LOG_S = 60.0
"""Between two lines about calls that run unbilled."""


class ClosableLedger(Ledger, BudgetSource, Protocol):
    """A ledger that holds connections, and knows where budgets stand."""

    async def aclose(self) -> None:
        """Close them."""
        ...


class _ControllerPool(ConnectionPool):
    """Connections to the controller, which may be on another machine."""

    __slots__ = ("_address",)

    def __init__(self, address: Address) -> None:
        super().__init__(str(address))
        self._address = address

    async def open(self, loop: asyncio.AbstractEventLoop) -> WorkerConnection:
        """See ConnectionPool."""
        try:
            return await self._address.connect(loop, WorkerConnection)
        except OSError as e:
            raise WorkerConnectionLost(
                f"no controller at {self._address}: {e.strerror or e}", sent=False
            ) from e


class ControllerLedger:
    """The controller's ledger (`ClosableLedger`): a megabyte of records is one write on a pooled
    connection."""

    def __init__(self, *, controller: Address, token: str, activator: str) -> None:
        self._activator = activator
        self._connections = _ControllerPool(controller)
        head = f"HTTP/1.1\r\nhost: controller\r\n{HEADER_PLATFORM_TOKEN}: {token}\r\n"
        self._post_head = (
            f"POST {USAGE_PATH} {head}content-type: application/json\r\ncontent-length: ".encode()
        )
        self._get_budgets = f"GET {BUDGETS_PATH} {head}\r\n".encode()

    async def accept(self, records: Sequence[bytes]) -> Mapping[str, BudgetState]:
        """See shipping.Ledger."""
        body = usage_body(self._activator, records)
        answer = await self._ask(self._post_head + b"%d\r\n\r\n" % len(body) + body)
        if answer.status in (400, 413, 422):
            raise LedgerRefused(f"the controller refused usage records: {_start_of(answer)}")
        if answer.status >= 400:
            raise LedgerUnavailable(f"the controller answered {answer.status} to usage records")
        return _states_in(answer)  # the records are taken, whatever it says besides

    async def budgets(self) -> Mapping[str, BudgetState]:
        """See states.BudgetSource."""
        answer = await self._ask(self._get_budgets)
        if answer.status >= 400:
            raise LedgerUnavailable(
                f"the controller answered {answer.status} when asked for budgets: "
                f"{_start_of(answer)}"
            )
        return _states_in(answer)

    async def _ask(self, request: bytes) -> WorkerResponse:
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


class BillingService:
    """Everything that is written down. Made by `BillingService.open`, which owns the directory;
    `run()` is a task; `aclose()` comes last.

    Attributes:
        budgets: the hard ones, and what is left of them.
        unbilled: calls that were served although the journal had no room.
    """

    def __init__(
        self,
        *,
        directory: Path,
        activator: str,
        sync_s: float,
        free_idle_s: float,
        ledger: ClosableLedger,
        money: BudgetLeaseStore | None = None,
        is_open_without_money: bool = False,
        is_served_unbilled: bool = False,
        on_unbilled: Callable[[], None] | None = None,
    ) -> None:
        """Opens the journal and recovers what the last process left. Raises JournalInUse,
        JournalFull.

        `money`: what several activators share of hard budgets; None = there is no other. While it
        does not answer, each spends as if it were alone (`is_open_without_money`), or nothing
        beyond what it has. `is_served_unbilled`: a call that the journal has no room for runs all
        the same, and `on_unbilled` is told (`journal_full: serve`)."""
        self.journal, self.recovered = Journal.open(directory, activator=activator, sync_s=sync_s)
        self._free_idle_ns = int(free_idle_s * 1e9)
        self._ledger = ledger
        self.budgets = Budgets(is_shared=money is not None)
        self._borrower = (
            BudgetLeaser(money, budgets=self.budgets, is_open=is_open_without_money)
            if money is not None
            else None
        )
        self.budgets.lender = self._borrower
        self._shipper = Shipper(
            self.journal, ledger, before_batch=self._before_batch, on_accepted=self._on_accepted
        )
        self._states = BudgetStates(
            self.budgets, journal=self.journal, source=ledger, lock=self._shipper.lock
        )
        self.unbilled = 0
        self._is_served_unbilled = is_served_unbilled
        self._on_unbilled = on_unbilled
        self._unbilled_said_at = -UNBILLED_LOG_S
        if self.recovered.lost or self.recovered.unfinished:
            log.warning(
                "recovered lost=%d unfinished=%d",
                len(self.recovered.lost),
                len(self.recovered.unfinished),
            )

    def __repr__(self) -> str:
        return f"<BillingService {self.journal!r} {self._shipper!r} {self.budgets!r}>"

    def account(self, target: CallTarget, instance_id: str) -> InstanceAccount:
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
            rates=target.rates,
            started_ns=time.monotonic_ns(),
            free_ns=self._free_idle_ns,
            budgets=self.budgets,
            limit_ns=_ns(target.spec.clocks.execution_s),
            on_unbilled=self._note_unbilled if self._is_served_unbilled else None,
            is_free=target.is_shadow,
        )

    def is_spent(self, target: CallTarget) -> bool:
        """Whether a hard budget leaves no room for even one call of this target: then nothing is
        kept warm or started for it."""
        rates = target.rates
        return self.budgets.is_spent(
            _subject(target, rates), target, rates, limit_ns=_ns(target.spec.clocks.execution_s)
        )

    def check(
        self, target: CallTarget, limit_s: float, tokens: TokenReservation | None = None
    ) -> None:
        """Refuse a call that may take `limit_s`, and these tokens, before it waits, or has an
        instance started.

        Raises OverBudget, BudgetReserved.
        """
        rates = target.rates
        self.budgets.check(
            _subject(target, rates), target, rates, limit_ns=_ns(limit_s), tokens=tokens
        )

    async def load_budgets(self) -> None:
        """Learn what was spent, before calls are served; takes `budget_sync.FIRST_STATES_S` at most
        without a controller."""
        await self._states.load()
        if self._borrower is not None:
            # what our last life had borrowed is free again, what it spent is not
            await self._borrower.beat()

    async def _before_batch(self) -> None:
        await self._states.count_own()

    async def _on_accepted(
        self, states: Mapping[str, BudgetState], records: Sequence[bytes]
    ) -> None:
        await self._states.accepted(states, records)

    def _note_unbilled(self) -> None:
        self.unbilled += 1
        if self._on_unbilled is not None:
            self._on_unbilled()
        now_s = time.monotonic()
        if now_s - self._unbilled_said_at >= UNBILLED_LOG_S:
            self._unbilled_said_at = now_s
            log.error(
                "the journal is full and journal_full is 'serve': calls run unbilled total=%d",
                self.unbilled,
            )

    def lag(self) -> Lag:
        """How far the ledger is behind."""
        return self._shipper.lag()

    async def run(self) -> None:
        """Group commit and shipping, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.journal.run(), name="journal")
            group.create_task(self._shipper.run(), name="usage shipping")
            group.create_task(self._states.run(), name="budget states")
            if self._borrower is not None:
                group.create_task(self._borrower.run(), name="budget allowances")

    async def aclose(self) -> None:
        """Ship what is left, if the ledger takes it soon, and close the journal."""
        with contextlib.suppress(LedgerUnavailable, TimeoutError, OSError):
            async with asyncio.timeout(LAST_FLUSH_S):
                await self._shipper.flush()
        if self._borrower is not None:
            await self._borrower.aclose()
        self.journal.close()
        await self._ledger.aclose()


def _ns(seconds: float) -> int:
    return max(0, int(seconds * 1e9))


def _subject(target: CallTarget, rates: Rates) -> Subject:
    return Subject(target.tenant, target.environment, target.app, target.function, rates.currency)


def _start_of(answer: WorkerResponse) -> str:
    return (answer.body or b"")[:500].decode(errors="replace")


def _states_in(answer: WorkerResponse) -> Mapping[str, BudgetState]:
    try:
        body = json.loads(answer.body or b"{}")
    except ValueError:
        log.error("the controller's answer about budgets is not JSON: %s", _start_of(answer))
        return {}
    return parse_states(body.get("budgets", {}) if isinstance(body, dict) else {})
