"""One instance's account: joins its meter and the journal, so that a call is never measured
without being recorded.

ticket = account.open(call="req-…", attempt=1, key="k-…", method="", start_kind="FORK", …)     # before dispatch
cost = account.close(ticket, status=200, outcome="ok", …)                                       # at the end
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from activator.billing.budgets.applicable import CLOCK_STEP_NS, ApplicableBudgets, Subject
from activator.billing.budgets.budgets import Budgets
from activator.billing.cpu import PauseCpuMeter
from activator.billing.errors import JournalFull
from activator.billing.instance_meter import IdleKind, InstanceMeter
from activator.billing.journal import Journal
from activator.billing.usage_pricing import (
    CALL,
    CPU,
    SHADOW,
    UsageSubject,
    UsageTemplate,
    cost_text,
    marked_tokens,
)
from activator.quotas.token_reservation import TokenReservation
from pilotlight.spec.pricing import (
    BUSY,
    BUSY_FREE_MS,
    FREE_START,
    GPU_STATES,
    NOT_RUN,
    ONE_CORE,
    Footprint,
    GpuState,
    Rates,
    is_free,
    kind_factor,
)

NO_LIMIT_NS = 7 * 86_400 * 10**9
"""Limit for an account without an execution clock: the longest that is allowed
(`spec.function.Clocks`)."""


OnGpuTime = Callable[[UsageSubject, str, GpuState, float], None]
"""Called with each record of an instance with GPUs: whose it is, the granted kind, the state that
was recorded, and GPU seconds (time of each of them)."""


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


LEAST_CPU_NS = 1_000_000
"""CPU time below this is not recorded until more has accumulated or the instance ends, so that a
worker's own timers do not cause a record each."""


@dataclass(slots=True)
class Charge:
    """The result of an attempt: execution in whole ms, its share of the instance's time, its price
    as decimal text and in picounits."""

    exec_ms: int
    billed_ns: int
    cost: str
    picos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BillingTerms:
    """How an instance is billed.

    Attributes:
        footprint: with the GPUs that were granted.
        free_ns: idle time that is not billed.
        limit_ns: the execution clock.
        worst: what budgets reserve a call at: the dearest footprint that the revision accepts;
            None = `footprint`.
        is_free: the instance was started for mirrored calls. Neither its start nor its idle time is
            billed until it serves a real call.
    """

    footprint: Footprint
    rates: Rates
    free_ns: int
    limit_ns: int = NO_LIMIT_NS
    worst: Footprint | None = None
    is_free: bool = False


class InstanceAccount:
    """Account of one instance, owned by the pool that leases it. `now_ns` is monotonic time,
    `at_ns` wall time.

    Close every ticket, on every path: an attempt that stays open is recorded as lost."""

    __slots__ = (
        "_budgets",
        "_busy_left_ms",
        "_cover",
        "_cpu",
        "_cpu_kept_ns",
        "_cpu_since_ns",
        "_footprint",
        "_is_free",
        "_journal",
        "_limit_ns",
        "_on_gpu_time",
        "_on_unbilled",
        "_paid_ns",
        "_rates",
        "_revision",
        "_subject",
        "_templates",
        "_worst",
        "_worst_template",
        "meter",
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
        footprint, rates, limit_ns = terms.footprint, terms.rates, terms.limit_ns
        self._journal = journal
        self._subject = subject
        self._footprint = footprint
        self._rates = rates
        self._templates: dict[tuple[str, str, str, bool], UsageTemplate] = {}
        self._budgets = budgets if budgets is not None else Budgets()
        self._limit_ns = limit_ns
        self._on_unbilled = on_unbilled
        self._on_gpu_time = on_gpu_time if footprint.gpu else None
        self._is_free = terms.is_free
        self._revision = f"{subject.function_id}@{subject.revision}"
        self._cover = self._budgets.cover(
            Subject(
                subject.tenant, subject.environment, subject.app, subject.function, rates.currency
            )
        )
        self._worst_template = UsageTemplate(
            subject, footprint=terms.worst or footprint, rates=rates
        )
        self._worst = self._worst_template.picos(limit_ns + CLOCK_STEP_NS)
        self.meter = InstanceMeter(
            started_ns, free_ns=terms.free_ns, counts_all=footprint.gpu is not None
        )
        self._busy_left_ms = BUSY_FREE_MS
        self._cpu: PauseCpuMeter | None = None
        self._cpu_kept_ns = self._cpu_since_ns = self._paid_ns = 0

    def __repr__(self) -> str:
        return f"<InstanceAccount {self._subject.instance} {self.meter!r}>"

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

    def started(self, *, start_kind: str, billed_ns: int, at_ns: int) -> None:
        """Record the start of the instance, which ended at `at_ns`, as a START record. `billed_ns`
        excludes the time it was queued."""
        if self._is_free and self._footprint.gpu is None:
            return
        self._span(
            FREE_START if self._is_free else "START",
            billed_ns=billed_ns,
            started_ns=at_ns - billed_ns,
            at_ns=at_ns,
            start_kind=start_kind,
        )

    def meter_cpu(self, cpu: PauseCpuMeter, *, at_ns: int) -> None:
        """Charge the CPU time that the instance uses outside calls, from now on."""
        self._cpu = cpu
        self._cpu_since_ns = at_ns
        if self.meter.in_flight:
            cpu.calls_begin()

    def start_failed(self, *, cpu_ns: int, at_ns: int) -> None:
        """Charge the CPU time of a start that failed."""
        if not self._is_free:
            self._cpu_since_ns = at_ns - cpu_ns
            self._charge_cpu(cpu_ns, at_ns=at_ns, is_last=True)

    def end(self, *, cpu_ns: int | None, now_ns: int, at_ns: int) -> None:
        """Record what the ended instance still owes. `cpu_ns`: last reading of its CPU counter;
        None = unknown."""
        self.settle_idle(now_ns=now_ns, at_ns=at_ns, is_last=True, last_cpu_ns=cpu_ns)

    def suspend(self, *, now_ns: int) -> None:
        """The instance is being suspended, and was settled: its time is ASLEEP from now on."""
        self.meter.end_service(now_ns, IdleKind.ASLEEP)

    def resume(self, *, now_ns: int) -> None:
        """The suspended instance is being resumed. What follows is recorded as its next start."""
        self.meter.end_service(now_ns, None)

    def stop(self, *, now_ns: int) -> None:
        """The instance is being stopped, and was settled: its time is not paid from now on."""
        self.meter.end_service(now_ns, IdleKind.FREE)

    def settle_gpus(self, *, now_ns: int, at_ns: int) -> None:
        """Record the time of its GPUs up to now, of an instance that takes no calls."""
        self._record_idle(now_ns=now_ns, at_ns=at_ns)

    def finish(self, *, cpu_ns: int | None, now_ns: int, at_ns: int) -> None:
        """Record the CPU time, and the time of its GPUs, since the settlement at its stop or
        suspension, once it has ended or resumed. Idempotent."""
        was_serving = self.meter.is_serving
        self.meter.end_service(now_ns, None)
        if was_serving:  # neither stopped nor suspended: it was settled for the last time
            self.meter.consume_idle(now_ns)
        else:
            self._record_idle(now_ns=now_ns, at_ns=at_ns)
        if self._cpu is None:
            return
        used = self._cpu.end(cpu_ns)
        if not self._is_free:
            self._charge_cpu(used, at_ns=at_ns, is_last=True)

    def reserve(self, *, is_reserved: bool, now_ns: int) -> None:
        """Set whether min_instances reserves the instance."""
        self.meter.reserve(now_ns, is_reserved=is_reserved)

    def settle_idle(
        self, *, now_ns: int, at_ns: int, is_last: bool = False, last_cpu_ns: int | None = None
    ) -> int:
        """Record the idle time up to now as IDLE and RESERVED records, unpaid time of GPUs as
        FREE_IDLE and ASLEEP records, and the CPU time outside calls as a CPU record. Returns the
        number of records. Call it each minute, and `end` at the end."""
        cpu_ns = 0
        if self._cpu is not None:
            cpu_ns = self._cpu.end(last_cpu_ns) if is_last else self._cpu.consume()
        records = self._record_idle(now_ns=now_ns, at_ns=at_ns)
        if self._is_free:
            return records
        return records + self._charge_cpu(cpu_ns, at_ns=at_ns, is_last=is_last)

    def _record_idle(self, *, now_ns: int, at_ns: int) -> int:
        """Write the records of the idle time that was not recorded; return their number. While the
        instance is free, only the time of its GPUs is recorded, as unpaid."""
        spans = self.meter.consume_idle(now_ns)
        if self._is_free and self._footprint.gpu is None:
            return 0
        for span in spans:
            is_unpaid = self._is_free and span.kind is not IdleKind.ASLEEP
            self._span(
                IdleKind.FREE.value if is_unpaid else span.kind.value,
                billed_ns=span.billed_ns,
                started_ns=at_ns - (now_ns - span.started_ns),
                at_ns=at_ns,
            )
        return len(spans)

    def _charge_cpu(self, cpu_ns: int, *, at_ns: int, is_last: bool) -> bool:
        """Write a CPU record of what the START, IDLE and RESERVED records since the last settlement
        do not cover. Returns False when there is none."""
        self._cpu_kept_ns += max(0, cpu_ns - self._paid_ns)
        self._paid_ns = 0
        owed = self._cpu_kept_ns
        if not owed or (owed < LEAST_CPU_NS and not is_last):
            return False
        self._cpu_kept_ns, since_ns = 0, self._cpu_since_ns
        self._cpu_since_ns = at_ns
        self._span(CPU, billed_ns=owed, started_ns=since_ns, at_ns=at_ns)
        return True

    def _worst_of(self, limit_ns: int | None, tokens: TokenReservation | None) -> int:
        """The worst case of a call with this limit, below the execution clock where it is known."""
        if limit_ns is None and tokens is None:
            return self._worst
        ends_ns = self._limit_ns if limit_ns is None else min(limit_ns, self._limit_ns)
        ends_ns += CLOCK_STEP_NS
        if tokens is None:
            return self._worst_template.picos(ends_ns)
        return self._worst_template.picos(ends_ns, tokens.estimated_in, tokens.max_out)

    def _drop_free(self, now_ns: int, at_ns: int) -> None:
        """Start billing at the first real call. Earlier usage stays free."""
        self._record_idle(now_ns=now_ns, at_ns=at_ns)
        if self._cpu is not None:
            self._cpu.consume()
            self._cpu_since_ns = at_ns
        self._is_free = False

    def _end(self, name: str, now_ns: int) -> int:
        billed_ns = self.meter.end(name, now_ns)
        if self._cpu is not None and not self.meter.in_flight:
            self._cpu.calls_ended()
        return billed_ns

    def _span(
        self, kind: str, *, billed_ns: int, started_ns: int, at_ns: int, start_kind: str = ""
    ) -> None:
        footprint = ONE_CORE if kind == CPU else self._footprint
        if kind != CPU:
            self._paid_ns += int(
                billed_ns * self._footprint.cpu * min(1.0, float(kind_factor(kind, self._rates)))
            )
        if self._on_gpu_time is not None:
            self._count_gpu_time(kind, billed_ns)
        template = UsageTemplate(self._subject, footprint=footprint, rates=self._rates, kind=kind)
        picos = template.picos(billed_ns)
        record = template.record(
            id=f"{self._subject.instance}/{kind}/{started_ns // 1000}",
            call="",
            attempt=0,
            start_kind=start_kind,
            started_ns=started_ns,
            queued_ms=0,
            start_ms=0,
            exec_ms=billed_ns // 1_000_000,
            billed_ns=billed_ns,
            cost=cost_text(picos),
            status=0,
            outcome="span",
        )
        self._budgets.cover(self._cover.subject).charge(picos, started_ns)
        self._journal.append_record(record, at_ns=at_ns)

    def _count_gpu_time(self, kind: str, billed_ns: int) -> None:
        state, gpu = GPU_STATES.get(kind), self._footprint.gpu
        if state is not None and gpu is not None and self._on_gpu_time is not None:
            seconds = billed_ns * self._footprint.gpu_count / 1e9
            self._on_gpu_time(self._subject, gpu, state, seconds)

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
