"""Billing corrections: usage records are never changed; an additional record credits or charges the
difference."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace

import sqlalchemy as sa

from pilotlight.controller.billing import ledger, usage_ingestion
from pilotlight.controller.billing.budget_definition import parse_decimal
from pilotlight.controller.billing.ledger_totals import money_sums, picos_of
from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import COST_QUANTUM, picos_text

MAX_NOTE_CHARS = 500
MAX_EXPONENT = 30
"""Decimal exponents of an amount, positive or negative: beyond what the ledger stores (ledger.py
has the exact limit), and cheap to compute with."""


def correct(
    write: Write, *, record: str, amount: str, note: str, actor: str, request: str = ""
) -> UsageRecord:
    """Add `amount` (a decimal; negative to credit) to the cost of `record`. Returns the
    correction's record.

    The correction has the tenant, function, key and time of the corrected record, so that a report
    over that time includes both. It is on the first invoice that is not yet issued. A repeat with
    the same request id returns the existing correction. Raises NotFound; InvalidInput: not a
    decimal, no note, or a credit above what was charged; Conflict: the request id was used for
    another correction."""
    picos = _picos(amount)
    if not 0 < len(note.strip()) <= MAX_NOTE_CHARS:
        raise InvalidInput(
            f"note: give the reason in 1 to {MAX_NOTE_CHARS} characters", parameter="note"
        )
    original = _find(write.sql, record)
    adjustment = _adjustment(original, picos=picos, note=note.strip(), request=request)
    if known := ledger.find(write.sql, tables.usage.c.id == adjustment.id):
        if (known[0].cost, known[0].note) != (adjustment.cost, adjustment.note):
            raise Conflict(
                f"x-request-id {request!r} was used for another correction of {record}: "
                f"{known[0].cost}, {known[0].note!r}"
            )
        return known[0]
    charged = _charged(write.sql, original)
    if charged + picos < 0:
        left = picos_text(charged)
        raise InvalidInput(
            f"amount = {amount}: record {record} has charged {left} {original.currency}; the "
            f"credit cannot exceed that"
        )
    usage_ingestion.ingest_usage(write, [adjustment.to_json()])
    audit_trail.record(
        write,
        tenant=original.tenant,
        actor=actor,
        action="billing.correct",
        subject=record,
        after=adjustment.to_json(),
        request=request,
    )
    return adjustment


def _find(sql: sa.Connection, record: str) -> UsageRecord:
    found = ledger.find(sql, tables.usage.c.id == record)
    if not found:
        raise NotFound(
            f"there is no record {record}",
            hint="`pilotlight billing export` lists records with their ids.",
        )
    if found[0].kind == ledger.ADJUSTMENT:
        raise InvalidInput(
            f"{record} is itself a correction: correct record {found[0].corrects} instead",
            parameter="record",
        )
    return found[0]


def _charged(sql: sa.Connection, original: UsageRecord) -> int:
    """Return the picounits of a record and of its corrections so far."""
    c = tables.usage.c
    # an index covers these columns
    indexed = (c.tenant == original.tenant) & (c.started_at == original.started_at)
    related = (c.id == original.id) | ((c.corrects == original.id) & (c.kind == ledger.ADJUSTMENT))
    high, low = sql.execute(sa.select(*money_sums(tables.usage)).where(indexed, related)).one()
    return picos_of(high, low)


def _adjustment(original: UsageRecord, *, picos: int, note: str, request: str) -> UsageRecord:
    nonce = hashlib.sha256(request.encode()).hexdigest()[:16] if request else secrets.token_hex(8)
    return replace(
        original,
        id=f"{original.id}/ADJUSTMENT/{nonce}",
        kind=ledger.ADJUSTMENT,
        outcome="span",
        rate_per_s="0",
        cost=picos_text(picos),
        corrects=original.id,
        note=note,
        # The usage is counted by the corrected record only.
        queued_ms=0,
        start_ms=0,
        exec_ms=0,
        billed_ns=0,
        tokens_in=0,
        tokens_out=0,
        bytes_in=0,
        bytes_out=0,
        status=0,
    )


def _picos(amount: str) -> int:
    value = parse_decimal(amount)
    if value.adjusted() > MAX_EXPONENT or int(value.as_tuple().exponent) < -MAX_EXPONENT:
        raise InvalidInput(
            f"amount = {amount!r} is outside the range of a record's cost", parameter="amount"
        )
    picos = value / COST_QUANTUM
    if picos != int(picos) or picos == 0:
        raise InvalidInput(
            f"amount = {amount!r}: must be a nonzero multiple of {COST_QUANTUM}",
            parameter="amount",
        )
    return int(picos)
