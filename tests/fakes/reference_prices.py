"""The price of a usage record, computed from its measurements: what is billed is compared with it."""

from __future__ import annotations

from decimal import Decimal

from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import (
    Footprint,
    Rates,
    billable_ns,
    is_free,
    kind_factor,
    price_duration,
    rate_per_s,
)


def price_usage(record: UsageRecord, rates: Rates) -> Decimal:
    """Compute the cost of a record from its measurements by `rates`, the list of its
    `price_version`. Records are priced where they are made, in `activator.billing.usage_pricing`
    and `controller.billing`.

    STORAGE is priced by the rate in the record, which does not contain the stored size; an
    ADJUSTMENT by its stated cost. Raises KeyError if the accelerator has no price."""
    if record.kind == "ADJUSTMENT":
        return Decimal(record.cost)
    if record.kind == "STORAGE":
        return price_duration(record.billed_ns, Decimal(record.rate_per_s))
    footprint = Footprint(
        cpu=record.cpu, memory_bytes=record.memory_bytes, gpu=record.gpu, gpu_count=record.gpu_count
    )
    per_s = rate_per_s(footprint, rates) * kind_factor(record.kind, rates)
    if is_free(record.outcome, record.exec_ms):
        return Decimal(0)
    if record.kind != "CALL":
        return price_duration(record.billed_ns, per_s)
    tokens = record.tokens_in * rates.token_in + record.tokens_out * rates.token_out
    return price_duration(billable_ns(record.billed_ns, rates), per_s, rates.request + tokens)
