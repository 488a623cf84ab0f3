"""Billing of an instance's time outside calls: its start, idle, reserved and suspended time, the
time of its GPUs, and CPU time that calls do not pay.

`instance_account.InstanceAccount` adds the calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from activator.billing.budgets.applicable import Subject
from activator.billing.budgets.budgets import Budgets
from activator.billing.cpu import PauseCpuMeter
from activator.billing.instance_meter import IdleKind, InstanceMeter
from activator.billing.journal import Journal
from activator.billing.usage_pricing import CPU, UsageSubject, UsageTemplate, cost_text
from pilotlight.spec.pricing import (
    FREE_START,
    GPU_STATES,
    ONE_CORE,
    Footprint,
    GpuState,
    Rates,
    kind_factor,
)

NO_LIMIT_NS = 7 * 86_400 * 10**9
"""Limit for an account without an execution clock: the longest that is allowed
(`spec.function.Clocks`)."""


OnGpuTime = Callable[[UsageSubject, str, GpuState, float], None]
"""Called with each record of an instance with GPUs: whose it is, the granted kind, the state that
was recorded, and GPU seconds (time of each of them)."""

LEAST_CPU_NS = 1_000_000
"""CPU time below this is not recorded until more has accumulated or the instance ends, so that a
worker's own timers do not cause a record each."""


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


class InstanceTime:
    """What is billed of one instance outside calls. `now_ns` is monotonic time, `at_ns` wall
    time."""

    __slots__ = (
        "_budgets",
        "_cover",
        "_cpu",
        "_cpu_kept_ns",
        "_cpu_since_ns",
        "_footprint",
        "_is_free",
        "_journal",
        "_on_gpu_time",
        "_paid_ns",
        "_rates",
        "_subject",
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
        on_gpu_time: OnGpuTime | None = None,
    ) -> None:
        """`subject` without key and method. Raises KeyError when a GPU kind has no price."""
        footprint = terms.footprint
        self._journal = journal
        self._subject = subject
        self._footprint = footprint
        self._rates = terms.rates
        self._is_free = terms.is_free
        self._on_gpu_time = on_gpu_time if footprint.gpu else None
        self._budgets = budgets if budgets is not None else Budgets()
        self._cover = self._budgets.cover(
            Subject(
                subject.tenant,
                subject.environment,
                subject.app,
                subject.function,
                terms.rates.currency,
            )
        )
        self.meter = InstanceMeter(
            started_ns, free_ns=terms.free_ns, counts_all=footprint.gpu is not None
        )
        self._cpu: PauseCpuMeter | None = None
        self._cpu_kept_ns = self._cpu_since_ns = self._paid_ns = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._subject.instance} {self.meter!r}>"

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

    def _drop_free(self, now_ns: int, at_ns: int) -> None:
        """Start billing at the first real call. Earlier usage stays free."""
        self._record_idle(now_ns=now_ns, at_ns=at_ns)
        if self._cpu is not None:
            self._cpu.consume()
            self._cpu_since_ns = at_ns
        self._is_free = False

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
