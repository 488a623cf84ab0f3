"""What becomes of each table's rows when a tenant is deleted. Pure.

Every table of the database is in exactly one of three lists: `DELETED`, whose rows of the tenant
are deleted; `KEPT`, whose rows of the tenant stay, with the reason; `OF_PLATFORM`, which has no
rows of tenants. A test reads the schema, and fails for a table that is in none of them.

Rows are deleted in the order of `DELETED`: rows before the rows that they refer to."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from pilotlight.controller.database import tables

Condition = Callable[[str], sa.ColumnElement[bool]]
"""From a tenant's id to the condition for its rows."""


class Step(enum.StrEnum):
    """Steps of a deletion, in their order.

    ACCESS: keys, secrets, quotas, budgets, and the routes of its functions. FUNCTIONS: apps with
    their revisions, releases and observations. CALLS: submitted calls, batches, traces, webhooks.
    INSTANCES: wait until none is left. STORAGE: images, weights, volumes, dicts, queues, blobs.
    OBJECTS: wait until the blob store has deleted their objects. REST: environments; then the
    tenant has no rows in the tables of `DELETED`, or the steps begin again."""

    ACCESS = "access"
    FUNCTIONS = "functions"
    CALLS = "calls"
    INSTANCES = "instances"
    STORAGE = "storage"
    OBJECTS = "objects"
    REST = "rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRows:
    """Rows of one table.

    Attributes:
        step: deletes them.
        where: which are a tenant's.
        is_looked_for: whether rows that come late are looked for. Not where that would read a large
            table whole, and rows end by themselves.
        by_collector: rows with an object in the blob store: their collector deletes the object
            first, then the row; the step only ends their retention.
    """

    table: sa.Table
    step: Step
    where: Condition
    is_looked_for: bool = True
    by_collector: bool = False

    @property
    def name(self) -> str:
        """The table's name."""
        return str(self.table.name)


def _own(
    step: Step, table: sa.Table, *, is_looked_for: bool = True, by_collector: bool = False
) -> TenantRows:
    """Rows with the tenant in their column `tenant`."""
    column = table.c.tenant
    return TenantRows(
        table=table,
        step=step,
        where=lambda tenant: column == tenant,
        is_looked_for=is_looked_for,
        by_collector=by_collector,
    )


def _of(step: Step, column: sa.Column[str], parents: sa.Table) -> TenantRows:
    """Rows whose `column` is the id of a row of `parents`, which is the tenant's."""
    ids = parents.c.id

    def where(tenant: str) -> sa.ColumnElement[bool]:
        return column.in_(sa.select(ids).where(parents.c.tenant == tenant))

    return TenantRows(table=column.table, step=step, where=where)


_BY_FUNCTION: Final = (
    tables.observation_minute_buckets,
    tables.observation_hour_buckets,
    tables.observation_minutes,
    tables.observation_hours,
    tables.drift_sketches,
)
"""Large tables with an index by function."""
_OF_REMOVED: Final = (
    tables.observation_minutes,
    tables.observation_hours,
    tables.drift_sketches,
)
"""Those of them that have rows of functions that were removed before."""
DELETED: Final[tuple[TenantRows, ...]] = (
    _of(Step.ACCESS, tables.ended_sessions.c.key, tables.api_keys),
    _own(Step.ACCESS, tables.api_keys),
    _own(Step.ACCESS, tables.secrets),
    _own(Step.ACCESS, tables.function_quotas),
    _own(Step.ACCESS, tables.customer_quotas),
    _own(Step.ACCESS, tables.budget_alerts),
    _own(Step.ACCESS, tables.budgets),
    _of(Step.FUNCTIONS, tables.rollout_decisions.c.rollout, tables.rollouts),
    _own(Step.FUNCTIONS, tables.rollouts),
    _of(Step.FUNCTIONS, tables.exposures.c.experiment, tables.experiments),
    _of(Step.FUNCTIONS, tables.exposure_latency.c.experiment, tables.experiments),
    _own(Step.FUNCTIONS, tables.experiments),
    _own(Step.FUNCTIONS, tables.slo_alerts),
    _own(Step.FUNCTIONS, tables.schedules),
    *(_of(Step.FUNCTIONS, table.c.function_id, tables.functions) for table in _BY_FUNCTION),
    *(_own(Step.FUNCTIONS, table, is_looked_for=False) for table in _OF_REMOVED),
    _own(Step.FUNCTIONS, tables.feedback),
    _own(Step.FUNCTIONS, tables.drift_references),
    _own(Step.FUNCTIONS, tables.drift_reports),
    _own(Step.FUNCTIONS, tables.drift_scores),
    _of(Step.FUNCTIONS, tables.aliases.c.function, tables.functions),
    _of(Step.FUNCTIONS, tables.approvals.c.function, tables.functions),
    _of(Step.FUNCTIONS, tables.traffic.c.function, tables.functions),
    _of(Step.FUNCTIONS, tables.revisions.c.function, tables.functions),
    _own(Step.FUNCTIONS, tables.functions),
    _own(Step.FUNCTIONS, tables.deployments),
    _own(Step.FUNCTIONS, tables.apps),
    _own(Step.CALLS, tables.due_calls),
    _own(Step.CALLS, tables.calls),
    _own(Step.CALLS, tables.kept_calls),
    _of(Step.CALLS, tables.batch_lines.c.batch, tables.batches),
    _own(Step.CALLS, tables.batches),
    _own(Step.CALLS, tables.traces),
    _own(Step.CALLS, tables.idempotency_keys),
    _own(Step.CALLS, tables.deliveries),
    _own(Step.CALLS, tables.webhooks),
    _own(Step.CALLS, tables.latency_hours),
    _own(Step.STORAGE, tables.container_images),
    _own(Step.STORAGE, tables.images),
    _own(Step.STORAGE, tables.weights),
    _of(Step.STORAGE, tables.volume_entries.c.volume, tables.volumes),
    _own(Step.STORAGE, tables.volumes),
    _of(Step.STORAGE, tables.collection_values.c.collection, tables.collections),
    _of(Step.STORAGE, tables.collection_operations.c.collection, tables.collections),
    _own(Step.STORAGE, tables.collections),
    _own(Step.STORAGE, tables.blob_owners),
    _own(Step.OBJECTS, tables.batch_files, by_collector=True),
    _own(Step.OBJECTS, tables.prediction_files, by_collector=True),
    _own(Step.OBJECTS, tables.volume_chunks, by_collector=True),
    _own(Step.REST, tables.environments),
)

_BILLS: Final = "invoices and statements are sums of it, and can be checked as long as it is kept"
_CREDIT: Final = "append-only: what its customers have paid for"
KEPT: Final[Mapping[str, str]] = {
    "tenants": "its name is on its invoices, and its uid may be on files of nodes: no other tenant "
    "gets them",
    "tenant_deletions": "who deleted it, when, and what",
    "invoices": "what it owes",
    "usage": _BILLS,
    "usage_hours": _BILLS,
    "usage_days": _BILLS,
    "usage_archive_days": _BILLS,
    "customer_hours": _BILLS,
    "customer_days": _BILLS,
    "credit_accounts": _CREDIT,
    "credit_entries": _CREDIT,
    "credit_grants": _CREDIT,
    "credit_uses": _CREDIT,
    "audit": "append-only: who changed what",
}
"""Tables whose rows of a deleted tenant stay, and why."""
OF_PLATFORM: Final[Mapping[str, str]] = {
    "platform": "the platform's id",
    "adopted_platforms": "ids of platforms",
    "prices": "price lists, which invoices name",
    "feed": "removed by key with what it publishes; that the tenant is deleted stays published, "
    "for activators that were away",
    "feed_state": "positions",
    "usage_archives": "files of usage records of all tenants",
    "blobs": "shared by content: deleted when no tenant owns one (`controller.weights.blob_gc`)",
    "node_snapshots": "orders for nodes to delete snapshots of removed functions; deleted after 30 "
    "days",
    "observers": "the last post of each activator",
    "alembic_version": "version of the schema",
}
"""Tables without rows of tenants."""


def of_step(step: Step) -> tuple[TenantRows, ...]:
    """The rows that a step deletes."""
    return tuple(rows for rows in DELETED if rows.step is step)
