"""Corrections: a bill is never changed, it gets a further record that takes back (or adds) what
another one charged wrongly."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace
from decimal import Decimal, InvalidOperation

import sqlalchemy as sa

from pilotlight.controller import audit, intake, ledger, tables
from pilotlight.controller.store import Write
from pilotlight.controller.totals import HALF, money_of
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.pricing import COST_QUANTUM
from pilotlight.protocol import UsageRecord

MAX_NOTE_CHARS = 500
MAX_EXPONENT = 30
"""Of ten, either way: more than the ledger keeps (ledger.py has the exact bound), and little to
compute with."""


def correct(
    write: Write, *, record: str, amount: str, note: str, actor: str, request: str = ""
) -> UsageRecord:
    """Add `amount` (a decimal, negative to give back) to what `record` costs; returns the record
    that says so.

    It stands where the corrected one does (tenant, function, key, time), so that a report over that
    time has both, and is on the first invoice not yet issued. Under a request id that made one
    before it is that one. Raises NotFound; InvalidInput: no decimal, no note, or more given back
    than was charged; Conflict: that request id made another one."""
    picos = _picos(amount)
    if not 0 < len(note.strip()) <= MAX_NOTE_CHARS:
        raise InvalidInput(
            f"note: write why, in 1 to {MAX_NOTE_CHARS} characters", parameter="note"
        )
    original = _find(write.sql, record)
    made = _adjustment(original, picos=picos, note=note.strip(), request=request)
    if known := ledger.find(write.sql, tables.usage.c.id == made.id):
        if (known[0].cost, known[0].note) != (made.cost, made.note):
            raise Conflict(
                f"x-request-id {request!r} made another correction of {record}: {known[0].cost}, "
                f"{known[0].note!r}"
            )
        return known[0]
    charged = _charged(write.sql, original)
    if charged + picos < 0:
        left = format(COST_QUANTUM * charged, "f")
        raise InvalidInput(
            f"amount = {amount}: record {record} has charged {left} {original.currency}, no more "
            f"can be given back"
        )
    intake.take(write, [made.to_json()])
    audit.record(
        write,
        tenant=original.tenant,
        actor=actor,
        action="billing.correct",
        subject=record,
        after=made.to_json(),
        request=request,
    )
    return made


def _find(sql: sa.Connection, record: str) -> UsageRecord:
    found = ledger.find(sql, tables.usage.c.id == record)
    if not found:
        raise NotFound(
            f"there is no record {record}",
            hint="`pilotlight billing export` lists records with their ids.",
        )
    if found[0].kind == ledger.ADJUSTMENT:
        raise InvalidInput(
            f"{record} is a correction itself: correct {found[0].corrects}", parameter="record"
        )
    return found[0]


def _charged(sql: sa.Connection, original: UsageRecord) -> int:
    """Picounits of a record and of its corrections so far."""
    c = tables.usage.c
    # an index finds these
    there = (c.tenant == original.tenant) & (c.started_at == original.started_at)
    theirs = (c.id == original.id) | ((c.corrects == original.id) & (c.kind == ledger.ADJUSTMENT))
    high, low = sql.execute(sa.select(*money_of(tables.usage)).where(there, theirs)).one()
    return int(high) * HALF + int(low)


def _adjustment(original: UsageRecord, *, picos: int, note: str, request: str) -> UsageRecord:
    nonce = hashlib.sha256(request.encode()).hexdigest()[:16] if request else secrets.token_hex(8)
    return replace(
        original,
        id=f"{original.id}/ADJUSTMENT/{nonce}",
        kind=ledger.ADJUSTMENT,
        outcome="span",
        rate_per_s="0",
        cost=format(COST_QUANTUM * picos, "f"),
        corrects=original.id,
        note=note,
        # What was used stays with the record that is corrected.
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
    try:
        value = Decimal(amount)
    except InvalidOperation as e:
        raise InvalidInput(
            f"amount = {amount!r} is not a decimal number", parameter="amount"
        ) from e
    # The exponents first: nothing is computed with a number of a million digits.
    if (
        not value.is_finite()
        or value.adjusted() > MAX_EXPONENT
        or int(value.as_tuple().exponent) < -MAX_EXPONENT
    ):
        raise InvalidInput(
            f"amount = {amount!r} is beyond what a record can cost", parameter="amount"
        )
    picos = value / COST_QUANTUM
    if picos != int(picos) or picos == 0:
        raise InvalidInput(
            f"amount = {amount!r}: write a number other than 0, of whole {COST_QUANTUM}",
            parameter="amount",
        )
    return int(picos)
