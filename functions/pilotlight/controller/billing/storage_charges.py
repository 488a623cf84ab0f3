"""Storage charges: one STORAGE record per tenant, kind and hour, if that kind has a price.

Weights count once per tenant, regardless of their number of names, and chunks of volumes once in
all its volumes, to which keys and values of dicts and queues are added; snapshots count if they are
on the node and valid. A sample counts for its whole
hour; an hour without a sample (the controller was down, the node did not answer) is not billed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from decimal import Decimal

import sqlalchemy as sa

from pilotlight.controller.billing import price_lists, usage_ingestion
from pilotlight.controller.billing.usage_aggregation import HOUR_S
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.settings import ControllerConfig
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import GIB, Rates
from snapshotter.types import SnapshotInfo, SnapshotState

STORAGE = "STORAGE"
WEIGHTS, SNAPSHOTS, VOLUMES = "weights", "snapshots", "volumes"
MONTH_S = 30 * 24 * HOUR_S
"""The length of a month in storage prices."""


def is_priced(config: ControllerConfig) -> bool:
    """Whether any price list charges for storage."""
    return any(
        rates.weights_gib_month or rates.snapshot_gib_month or rates.volumes_gib_month
        for rates in config.prices.lists().values()
    )


def charge_storage(
    write: Write, config: ControllerConfig, *, snapshots: Iterable[SnapshotInfo] | None
) -> int:
    """Charge the current hour once; `snapshots` None: the node did not answer. Returns the number
    of new records."""
    held = {WEIGHTS: _weights(write.sql), VOLUMES: _volumes(write.sql)}
    if snapshots is not None:
        held[SNAPSHOTS] = _snapshots(snapshots)
    rates = price_lists.of_tenants(write.sql, config)
    owners = tables.tenants
    deleted = sa.select(owners.c.id).where(owners.c.deleted_at.is_not(None))
    gone = set(write.sql.execute(deleted).scalars())  # what is left of theirs is being deleted
    records = [
        record
        for kind, sizes in held.items()
        for tenant, size_bytes in sorted(sizes.items())
        if tenant in rates
        and tenant not in gone
        and (
            record := _record(
                rates[tenant], tenant=tenant, kind=kind, size_bytes=size_bytes, now=write.now
            )
        )
    ]
    fresh = _unknown(write.sql, records)
    return usage_ingestion.ingest_usage(write, [record.to_json() for record in fresh])[0].new


def _unknown(sql: sa.Connection, records: list[UsageRecord]) -> list[UsageRecord]:
    """Return the records not charged in this hour yet; a changed size does not change the
    charge."""
    c = tables.usage.c
    known = set(
        sql.execute(sa.select(c.id).where(c.id.in_([record.id for record in records]))).scalars()
    )
    return [record for record in records if record.id not in known]


def _weights(sql: sa.Connection) -> dict[str, int]:
    c = tables.weights.c
    once = (
        sa.select(c.tenant, c.manifest, sa.func.max(c.size_bytes).label("size_bytes"))
        .group_by(c.tenant, c.manifest)
        .subquery()
    )
    query = sa.select(once.c.tenant, sa.func.sum(once.c.size_bytes)).group_by(once.c.tenant)
    return {tenant: int(size_bytes) for tenant, size_bytes in sql.execute(query)}


def _volumes(sql: sa.Connection) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for table in (tables.volume_chunks, tables.collections):
        query = sa.select(table.c.tenant, sa.func.sum(table.c.size_bytes))
        found = sql.execute(query.group_by(table.c.tenant))
        sizes += Counter({tenant: int(size_bytes) for tenant, size_bytes in found})
    return sizes


def _snapshots(found: Iterable[SnapshotInfo]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for info in found:
        if info.state is SnapshotState.READY and (tenant := info.labels.get("tenant")):
            sizes[tenant] = sizes.get(tenant, 0) + info.image_bytes
    return sizes


def _record(
    rates: Rates, *, tenant: str, kind: str, size_bytes: int, now: float
) -> UsageRecord | None:
    per_month = {
        WEIGHTS: rates.weights_gib_month,
        SNAPSHOTS: rates.snapshot_gib_month,
        VOLUMES: rates.volumes_gib_month,
    }[kind]
    if not per_month or not size_bytes:
        return None
    hour = int(now) // HOUR_S
    per_s, billed_ns = Decimal(size_bytes) / GIB * per_month / MONTH_S, HOUR_S * 10**9
    return usage_ingestion.tenant_charge(
        f"storage/{tenant}/{kind}/{hour}",
        STORAGE,
        rates=rates,
        per_s=per_s,
        billed_ns=billed_ns,
        tenant=tenant,
        method=kind,
        started_at=float(hour * HOUR_S),
    )
