"""One instance's account: joins its meter and the journal, so that a call is never measured
without being recorded.

ticket = account.open(call="req-…", attempt=1, key="k-…", method="", start_kind="FORK", …)     # before dispatch
cost = account.close(ticket, status=200, outcome="ok", …)                                       # at the end
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from activator.billing.budgets.applicable import CLOCK_STEP_NS, ApplicableBudgets
from activator.billing.budgets.budgets import Budgets
from activator.billing.errors import JournalFull
from activator.billing.instance_time import BillingTerms, InstanceTime, OnGpuTime
from activator.billing.journal import Journal
from activator.billing.usage_pricing import (
    CALL,
    SHADOW,
    UsageSubject,
    UsageTemplate,
    cost_text,
    marked_tokens,
)
from activator.quotas.token_reservation import TokenReservation
from pilotlight.spec.pricing import BUSY, BUSY_FREE_MS, NOT_RUN, is_free


@dataclass(slots=True)
class OpenRecord:
    """An attempt that is being billed. Opaque to the caller, which passes it to `close`.

    `worst` picounits are reserved in the budgets of `cover` since `turn`. `customer`: "" = none
    was named. `is_billed`: it is recorded in the journal. `tokens`: token usage of a language
    model's call, counted until it is closed."""

    id: str
    call: str
    attempt: int
    start_kind: str
    template: UsageTemplate
    at_ns: int
    queued_ms: int
    start_ms: int
    cover: ApplicableBudgets
    worst: int
    turn: int
    mark: str = ""
    is_shadow: bool = False
    customer: str = ""
    is_billed: bool = True
    tokens: TokenReservation | None = None


@dataclass(slots=True)
class Charge:
    """The result of an attempt: execution in whole ms, its share of the instance's time, its price
    as decimal text and in picounits."""

    exec_ms: int
    billed_ns: int
    cost: str
    picos: int


class InstanceAccount(InstanceTime):
    """Account of one instance, owned by the pool that leases it: its time, and its calls. `now_ns`
    is monotonic time, `at_ns` wall time.

    Close every ticket, on every path: an attempt that stays open is recorded as lost."""

    __slots__ = (
        "_busy_left_ms",
        "_limit_ns",
        "_on_unbilled",
        "_revision",
        "_templates",
        "_worst",
        "_worst_template",
    )

    def __init__(
        self,
        journal: Journal,
        *,
        subject: UsageSubject,
        terms: BillingTerms,
        started_ns: int,
        budgets: Budgets | None = None,
        on_unbilled: Callable[[], None] | None = None,
        on_gpu_time: OnGpuTime | None = None,
    ) -> None:
        """`subject` without key and method. `on_unbilled`: called when a call is served although
        the journal has no room for it. None: such a call is refused.

        Raises KeyError when a GPU kind has no price."""
        super().__init__(
            journal,
            subject=subject,
            terms=terms,
            started_ns=started_ns,
            budgets=budgets,
            on_gpu_time=on_gpu_time,
        )
        self._templates: dict[tuple[str, str, str, bool], UsageTemplate] = {}
        self._limit_ns = terms.limit_ns
        self._on_unbilled = on_unbilled
        self._revision = f"{subject.function_id}@{subject.revision}"
        self._worst_template = UsageTemplate(
            subject, footprint=terms.worst or terms.footprint, rates=terms.rates
        )
        self._worst = self._worst_template.picos(terms.limit_ns + CLOCK_STEP_NS)
        self._busy_left_ms = BUSY_FREE_MS

    def open(
        self,
        *,
        call: str,
        attempt: int,
        key: str,
        method: str,
        start_kind: str,
        queued_ms: int,
        start_ms: int,
        now_ns: int,
        at_ns: int,
        caller: str = "",
        limit_ns: int | None = None,
        mark: str = "",
        is_shadow: bool = False,
        customer: str = "",
        tokens: TokenReservation | None = None,
    ) -> OpenRecord:
        """Reserve the worst case, write the attempt to the journal and start metering it.
        `limit_ns`: a limit below the execution clock, where known.

        `mark`: rarely used fields (`usage_pricing.encode_optional_fields`). `is_shadow`: a mirrored
        call, which costs nothing and needs no budget. `customer`: it falls under the budgets of
        this one, too. `tokens`: the token limits of a language model's call, which are part of its
        worst case.

        Raises JournalFull, Conflict, OverBudget, BudgetReserved, AllowanceNeeded; the attempt must
        then not be dispatched."""
        if self._is_free and not is_shadow:
            self._drop_free(now_ns, at_ns)
        template = self._templates.get((key, method, caller, is_shadow)) or self._make_template(
            key, method, caller, is_shadow=is_shadow
        )
        name = f"{call}/{attempt}"
        cover = self._cover
        if cover.generation != self._budgets.generation:
            cover = self._cover = self._budgets.cover(cover.subject)
        if customer:
            cover = self._budgets.cover_customer(cover, customer)
        worst, turn = 0, self._budgets.turn
        if cover.balances and not is_shadow:
            ends_ns = self._limit_ns if limit_ns is None else min(limit_ns, self._limit_ns)
            worst = self._worst_of(limit_ns, tokens)
            turn = cover.reserve(name, worst, at_ns=at_ns, ends_ns=at_ns + ends_ns)
        ticket = OpenRecord(
            name,
            call,
            attempt,
            start_kind,
            template,
            at_ns,
            queued_ms,
            start_ms,
            cover,
            worst,
            turn,
            mark,
            is_shadow,
            customer,
        )
        if tokens is not None:
            tokens.begin(self._revision)
            ticket.tokens = tokens
        is_metered = False
        try:
            virtual_ns = self.meter.begin(name, now_ns)
            is_metered = True
            if self._cpu is not None and self.meter.in_flight == 1:
                self._cpu.calls_begin()
            self._journal.open_call(
                template,
                call=call,
                attempt=attempt,
                start_kind=start_kind,
                at_ns=at_ns,
                queued_ms=queued_ms,
                start_ms=start_ms,
                virtual_ns=virtual_ns,
                mark=mark,
            )
        except BaseException as e:
            if not self._runs_unbilled(ticket, e):
                if is_metered:
                    self._end(name, now_ns)
                raise
        return ticket

    def _runs_unbilled(self, ticket: OpenRecord, error: BaseException) -> bool:
        """Return the reservation of an attempt that could not be recorded. Returns whether it runs
        nevertheless: the journal is full, and such calls are served."""
        if not ticket.is_shadow:
            ticket.cover.release(ticket.id, ticket.worst, turn=ticket.turn)
        if not isinstance(error, JournalFull) or self._on_unbilled is None:
            return False
        self._on_unbilled()
        ticket.is_billed = False
        return True

    def close(
        self,
        ticket: OpenRecord,
        *,
        status: int,
        outcome: str,
        now_ns: int,
        at_ns: int,
        bytes_in: int = 0,
        bytes_out: int = 0,
    ) -> Charge:
        """Stop metering, write the complete record and settle the reservation. Raises KeyError when
        the ticket was closed before."""
        meter, template, cover = self.meter, ticket.template, ticket.cover
        billed_ns = self._end(ticket.id, now_ns)
        tokens, mark = ticket.tokens, ticket.mark
        if tokens is None:
            tokens_in = tokens_out = 0
        else:
            tokens.close(status=status, outcome=outcome)
            tokens_in, tokens_out = tokens.tokens_in, tokens.tokens_out
            mark += _mark_of(tokens)
        if self._on_gpu_time is not None:
            self._count_gpu_time(CALL, billed_ns)
        exec_ms = (at_ns - ticket.at_ns) // 1_000_000 if at_ns > ticket.at_ns else 0
        if not ticket.is_billed:
            return Charge(exec_ms, billed_ns, "0", 0)
        unpaid = outcome in NOT_RUN and is_free(outcome, exec_ms, self._busy_left_ms)
        if unpaid and outcome == BUSY:
            self._busy_left_ms -= max(1, exec_ms)
        picos = 0 if unpaid else template.picos(billed_ns, tokens_in, tokens_out)
        cost = cost_text(picos)
        record = template.record(
            id=ticket.id,
            call=ticket.call,
            attempt=ticket.attempt,
            start_kind=ticket.start_kind,
            started_ns=ticket.at_ns,
            queued_ms=ticket.queued_ms,
            start_ms=ticket.start_ms,
            exec_ms=exec_ms,
            billed_ns=billed_ns,
            cost=cost,
            status=status,
            outcome=outcome,
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            mark=mark,
        )
        if (
            cover.balances or cover.generation != self._budgets.generation
        ) and not ticket.is_shadow:
            cover.settle(
                ticket.id,
                ticket.worst,
                picos,
                turn=ticket.turn,
                at_ns=ticket.at_ns,
                customer=ticket.customer,
            )
        self._journal.close_call(
            ticket.id, record, at_ns=at_ns, virtual_ns=meter.virtual_at_last_ns
        )
        return Charge(exec_ms, billed_ns, cost, picos)

    def _worst_of(self, limit_ns: int | None, tokens: TokenReservation | None) -> int:
        """The worst case of a call with this limit, below the execution clock where it is known."""
        if limit_ns is None and tokens is None:
            return self._worst
        ends_ns = self._limit_ns if limit_ns is None else min(limit_ns, self._limit_ns)
        ends_ns += CLOCK_STEP_NS
        if tokens is None:
            return self._worst_template.picos(ends_ns)
        return self._worst_template.picos(ends_ns, tokens.estimated_in, tokens.max_out)

    def _end(self, name: str, now_ns: int) -> int:
        billed_ns = self.meter.end(name, now_ns)
        if self._cpu is not None and not self.meter.in_flight:
            self._cpu.calls_ended()
        return billed_ns

    def _make_template(
        self, key: str, method: str, caller: str, *, is_shadow: bool
    ) -> UsageTemplate:
        subject = replace(self._subject, key=key, method=method, caller=caller)
        kind = SHADOW if is_shadow else CALL
        template = UsageTemplate(subject, footprint=self._footprint, rates=self._rates, kind=kind)
        self._templates[key, method, caller, is_shadow] = template
        return template


def _mark_of(tokens: TokenReservation) -> str:
    return marked_tokens(
        cached=tokens.tokens_cached, finish=tokens.finish, first_token_ms=tokens.first_token_ms
    )
