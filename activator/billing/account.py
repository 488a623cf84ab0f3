"""One instance's account: its meter and the journal kept together, so that a call is never measured without being written down.

ticket = account.open(call="req-…", attempt=1, key="k-…", method="", start_kind="FORK", …)     # before dispatch
cost = account.close(ticket, status=200, outcome="ok", …)                                       # at the end
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from activator.billing.journal import Journal
from activator.billing.meter import InstanceMeter
from activator.billing.usage import UsageSubject, UsageTemplate
from pilotlight.pricing import Footprint, Rates


@dataclass(slots=True)
class Ticket:
    """An attempt that is being billed. Opaque to the caller, who gives it back to `close`."""

    id: str
    call: str
    attempt: int
    start_kind: str
    template: UsageTemplate
    at_ns: int
    queued_ms: int
    start_ms: int


@dataclass(frozen=True, slots=True)
class Bill:
    """What an attempt came to: execution in whole milliseconds, its share of the instance, its price as decimal text."""

    exec_ms: int
    billed_ns: int
    cost: str


class InstanceAccount:
    """Owned by the pool that leases the instance. `now_ns` is monotonic time, `at_ns` wall time.

    Close every ticket, on every path: an attempt that stays open is a lost one.
    """

    __slots__ = ("_footprint", "_journal", "_rates", "_subject", "_templates", "meter")

    def __init__(
        self,
        journal: Journal,
        *,
        subject: UsageSubject,
        footprint: Footprint,
        rates: Rates,
        started_ns: int,
        free_ns: int,
        is_reserved: bool = False,
    ) -> None:
        """`subject` without key and method; `free_ns` is the idle time that the platform gives away."""
        self._journal = journal
        self._subject = subject
        self._footprint = footprint
        self._rates = rates
        self._templates: dict[tuple[str, str], UsageTemplate] = {}
        self.meter = InstanceMeter(started_ns, free_ns=free_ns, is_reserved=is_reserved)

    def __repr__(self) -> str:
        return f"<InstanceAccount {self._subject.instance} {self.meter!r}>"

    def open(
        self, *, call: str, attempt: int, key: str, method: str, start_kind: str, queued_ms: int, start_ms: int, now_ns: int, at_ns: int
    ) -> Ticket:
        """Write the attempt down and start metering it. Raises JournalFull or Conflict: then it must not be dispatched."""
        template = self._templates.get((key, method)) or self._make_template(key, method)
        name = f"{call}/{attempt}"
        virtual_ns = self.meter.begin(name, now_ns)
        try:
            self._journal.open_call(
                template, call=call, attempt=attempt, start_kind=start_kind, at_ns=at_ns,
                queued_ms=queued_ms, start_ms=start_ms, virtual_ns=virtual_ns,
            )  # fmt: skip
        except BaseException:
            self.meter.end(name, now_ns)
            raise
        return Ticket(name, call, attempt, start_kind, template, at_ns, queued_ms, start_ms)

    def close(
        self,
        ticket: Ticket,
        *,
        status: int,
        outcome: str,
        now_ns: int,
        at_ns: int,
        bytes_in: int = 0,
        bytes_out: int = 0,
        tokens_in: int = 0,
        tokens_out: int = 0,
    ) -> Bill:
        """Stop metering and write the complete record. Raises KeyError when the ticket was closed before."""
        meter, template = self.meter, ticket.template
        billed_ns = meter.end(ticket.id, now_ns)
        exec_ms = max(0, at_ns - ticket.at_ns) // 1_000_000
        cost = template.cost(billed_ns)
        record = template.record(
            id=ticket.id, call=ticket.call, attempt=ticket.attempt, start_kind=ticket.start_kind, started_ns=ticket.at_ns,
            queued_ms=ticket.queued_ms, start_ms=ticket.start_ms, exec_ms=exec_ms, billed_ns=billed_ns, cost=cost, status=status,
            outcome=outcome, tokens_in=tokens_in, tokens_out=tokens_out, bytes_in=bytes_in, bytes_out=bytes_out,
        )  # fmt: skip
        self._journal.close_call(ticket.id, record, at_ns=at_ns, virtual_ns=meter.virtual_at_last_ns)
        return Bill(exec_ms, billed_ns, cost)

    def reserve(self, *, is_reserved: bool, now_ns: int) -> None:
        """The instance is (no longer) held by min_instances."""
        self.meter.reserve(now_ns, is_reserved=is_reserved)

    def settle_idle(self, *, now_ns: int, at_ns: int) -> int:
        """Write the idle time up to now down, as IDLE and RESERVED records; returns how many. Call it each minute and at the end."""
        spans = self.meter.take_idle(now_ns)
        for span in spans:
            template = UsageTemplate(self._subject, footprint=self._footprint, rates=self._rates, kind=span.kind.value)
            started_ns = at_ns - (now_ns - span.started_ns)
            record = template.record(
                id=f"{self._subject.instance}/{span.kind.value}/{started_ns // 1000}", call="", attempt=0, start_kind="",
                started_ns=started_ns, queued_ms=0, start_ms=0, exec_ms=span.billed_ns // 1_000_000, billed_ns=span.billed_ns,
                cost=template.cost(span.billed_ns), status=0, outcome="span",
            )  # fmt: skip
            self._journal.append_record(record, at_ns=at_ns)
        return len(spans)

    def _make_template(self, key: str, method: str) -> UsageTemplate:
        subject = replace(self._subject, key=key, method=method)
        template = self._templates[key, method] = UsageTemplate(subject, footprint=self._footprint, rates=self._rates)
        return template
