"""Bills calls that the response cache answers: a record of kind CALL whose start kind is CACHED, at
the price `cache_hit`.

Nothing runs, so there is nothing to open and close: the complete record is written before the
answer is sent. `kill -9` before that loses neither record nor answer, and after it the record
reaches the ledger like all others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from activator.billing.budgets.applicable import Subject
from activator.billing.budgets.budgets import Budgets
from activator.billing.errors import JournalFull
from activator.billing.instance_account import Charge
from activator.billing.journal import Journal
from activator.billing.usage_pricing import UsageSubject, UsageTemplate, cost_text
from activator.routing.call_target import CallTarget
from pilotlight.spec.pricing import CACHED, Footprint

NO_RESOURCES = Footprint(cpu=0, memory_bytes=0)
MAX_TEMPLATES = 4096
"""Most kept templates: one for each revision, key, method and tenant of callers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHit:
    """A call that was answered. Its first fields are those of `UsageRecord`.

    Attributes:
        at_ns: when it was admitted: wall clock.
        mark: `Call.mark`."""

    call: str
    attempt: int
    key: str
    method: str
    caller: str
    at_ns: int
    queued_ms: int
    status: int
    bytes_in: int
    bytes_out: int
    mark: str = ""
    customer: str = ""


class CacheHitAccount:
    """Writes the records of such calls. Owner: the event loop."""

    def __init__(
        self,
        journal: Journal,
        budgets: Budgets,
        *,
        on_unbilled: Callable[[], None] | None = None,
    ) -> None:
        """`on_unbilled`: as for `InstanceAccount`."""
        self._journal = journal
        self._budgets = budgets
        self._on_unbilled = on_unbilled
        self._templates: dict[tuple[str, str, str, str, str], UsageTemplate] = {}

    def __repr__(self) -> str:
        return f"<CacheHitAccount {len(self._templates)} templates>"

    def charge(self, target: CallTarget, hit: CacheHit) -> Charge:
        """Charge a call and write its record. Raises JournalFull, OverBudget, BudgetReserved,
        AllowanceNeeded; it must then not be answered."""
        template, budgets = self._template(target, hit), self._budgets
        picos = template.picos(0)
        cover = budgets.cover(
            Subject(
                target.tenant,
                target.environment,
                target.app,
                target.function,
                target.rates.currency,
            )
        )
        if hit.customer:
            cover = budgets.cover_customer(cover, hit.customer)
        name = f"{hit.call}/{hit.attempt}"
        turn = cover.reserve(name, picos, at_ns=hit.at_ns, ends_ns=hit.at_ns)
        try:
            self._journal.append_call(_record(template, hit, name, picos), at_ns=hit.at_ns)
        except JournalFull:
            cover.release(name, picos, turn=turn)
            if self._on_unbilled is None:
                raise
            self._on_unbilled()
            return Charge(0, 0, "0", 0)
        cover.settle(name, picos, picos, turn=turn, at_ns=hit.at_ns, customer=hit.customer)
        return Charge(0, 0, cost_text(picos), picos)

    def _template(self, target: CallTarget, hit: CacheHit) -> UsageTemplate:
        known = (target.key, target.rates.version, hit.key, hit.method, hit.caller)
        found = self._templates.get(known)
        if found is None:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            found = self._templates[known] = _make_template(target, hit)
        return found


def _make_template(target: CallTarget, hit: CacheHit) -> UsageTemplate:
    subject = UsageSubject(
        tenant=target.tenant,
        environment=target.environment,
        app=target.app,
        function=target.function,
        function_id=target.function_id,
        method=hit.method,
        revision=target.revision,
        instance="",
        key=hit.key,
        caller=hit.caller,
    )
    rates = replace(target.rates, request=target.rates.cache_hit, minimum_ms=0, rounding_ms=0)
    return UsageTemplate(subject, footprint=NO_RESOURCES, rates=rates)


def _record(template: UsageTemplate, hit: CacheHit, name: str, picos: int) -> bytes:
    return template.record(
        id=name,
        call=hit.call,
        attempt=hit.attempt,
        start_kind=CACHED,
        started_ns=hit.at_ns,
        queued_ms=hit.queued_ms,
        start_ms=0,
        exec_ms=0,
        billed_ns=0,
        cost=cost_text(picos),
        status=hit.status,
        outcome="ok",
        bytes_in=hit.bytes_in,
        bytes_out=hit.bytes_out,
        mark=hit.mark,
    )
