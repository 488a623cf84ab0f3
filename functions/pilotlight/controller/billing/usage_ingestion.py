"""Ingestion of usage records: into the ledger, the budget alerts, prepaid credit and the experiment
exposures, in one transaction; and the records of what no instance of a function used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from pilotlight.controller.billing import experiment_exposures, ledger
from pilotlight.controller.billing.budgets import spending
from pilotlight.controller.billing.credits import consumption
from pilotlight.controller.billing.ledger import LedgerInsert, UsageValues
from pilotlight.controller.database.store import Write
from pilotlight.protocol import BudgetState, UsageRecord
from pilotlight.spec.pricing import Rates, price_duration


def ingest_usage(
    write: Write, rows: Sequence[Mapping[str, Any]]
) -> tuple[LedgerInsert, dict[str, BudgetState]]:
    """Add records given as JSON values (see `ledger.convert_records`). Also returns the state
    of each budget and credit that covers some of them."""
    return ingest_values(write, ledger.convert_records(rows))


def ingest_values(
    write: Write, records: Sequence[UsageValues]
) -> tuple[LedgerInsert, dict[str, BudgetState]]:
    """Add decoded records, as `ingest_usage` does."""
    added = ledger.add_values(write, records)
    if added.in_experiments:
        experiment_exposures.record_exposures(write, added.in_experiments)
    states = spending.after_usage(write, new=added.spent, batch=added.batch)
    return added, states | consumption.consume(write, added)


def tenant_charge(
    id: str,
    kind: str,
    *,
    rates: Rates,
    per_s: Decimal,
    billed_ns: int,
    tenant: str,
    method: str,
    started_at: float,
    instance: str = "",
    key: str = "",
    exec_ms: int = 0,
    cpu: float = 0.0,
) -> UsageRecord:
    """The record of `billed_ns` at the rate `per_s`. `method`: what was used."""
    return UsageRecord(
        id=id,
        kind=kind,
        call="",
        attempt=0,
        tenant=tenant,
        environment="",
        app="",
        function="",
        function_id="",
        method=method,
        revision="",
        instance=instance,
        key=key,
        start_kind="",
        started_at=started_at,
        queued_ms=0,
        start_ms=0,
        exec_ms=exec_ms,
        billed_ns=billed_ns,
        cpu=cpu,
        memory_bytes=0,
        gpu=None,
        gpu_count=0,
        outcome="span",
        price_version=rates.version,
        currency=rates.currency,
        rate_per_s=str(per_s),
        cost=format(price_duration(billed_ns, per_s), "f"),
    )
