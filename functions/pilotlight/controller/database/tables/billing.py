"""Tables of usage, costs and budgets."""

from __future__ import annotations

import sqlalchemy as sa

from pilotlight.controller.database.tables.columns import metadata, text, time, whole

budgets = sa.Table(
    "budgets",
    metadata,
    text("id", key=True),
    sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    *(text(name) for name in ("environment", "app", "function", "period", "amount", "currency")),
    sa.Column("hard", sa.Boolean, nullable=False),
    text("alerts"),
    text("webhook", null=True),
    text("sealed_secret", null=True),
    time("created_at"),
    time("updated_at"),
    sa.Column("customer", sa.Text, nullable=False, server_default=""),
    text("parent", null=True),
    sa.Index(
        "ix_budgets_reach",
        *("tenant", "customer", "environment", "app", "function", "period", "currency"),
        unique=True,
    ),
    sa.Index("ix_budgets_parent", "parent"),
)
"""`parent`: the budget for each customer from which this customer has it; null for others."""

budget_alerts = sa.Table(
    "budget_alerts",
    metadata,
    text("id", key=True),
    sa.Column("budget", sa.Text, sa.ForeignKey("budgets.id", ondelete="CASCADE"), nullable=False),
    text("tenant"),
    text("period"),
    whole("percent"),
    text("spent"),
    time("at"),
    time("delivered_at", null=True),
    time("next_attempt_at", null=True),
    whole("attempts"),
    text("error", null=True),
    sa.UniqueConstraint("budget", "period", "percent"),
    sa.Index("ix_budget_alerts_next_attempt_at", "next_attempt_at"),
)

usage = sa.Table(
    "usage",
    metadata,
    text("id", key=True),
    *(
        text(name)
        for name in (
            "kind",
            "call",
            "tenant",
            "environment",
            "app",
            "function",
            "function_id",
            "method",
            "revision",
        )
    ),
    *(
        text(name)
        for name in (
            "instance",
            "key",
            "start_kind",
            "outcome",
            "price_version",
            "currency",
            "rate_per_s",
            "cost",
        )
    ),
    text("gpu", null=True),
    *(
        whole(name)
        for name in (
            "attempt",
            "queued_ms",
            "start_ms",
            "exec_ms",
            "billed_ns",
            "memory_bytes",
            "gpu_count",
        )
    ),
    *(whole(name) for name in ("tokens_in", "tokens_out", "bytes_in", "bytes_out", "status")),
    *(time(name) for name in ("cpu", "started_at", "received_at")),
    whole("cost_picos"),
    whole("day"),
    *(
        sa.Column(name, sa.Text, nullable=False, server_default="")
        for name in ("caller", "corrects", "note", "month")
    ),
    *(
        sa.Column(name, sa.Text, nullable=False, server_default="")
        for name in ("experiment", "arm", "unit", "degraded", "finish", "parent", "customer")
    ),
    *(
        sa.Column(name, sa.BigInteger, nullable=False, server_default="0")
        for name in ("tokens_cached", "first_token_ms")
    ),
    sa.Index("ix_usage_tenant_started_at", "tenant", "started_at"),
    sa.Index("ix_usage_tenant_call", "tenant", "call"),
    sa.Index(
        "ix_usage_tenant_customer",
        *("tenant", "customer", "started_at", "id"),
        sqlite_where=sa.text("customer <> ''"),
        postgresql_where=sa.text("customer <> ''"),
    ),
)
"""`month` is the month ("2026-11", UTC) whose invoice has the record: that of `started_at`, or the
first one not yet issued."""


ROLLUP_GROUPS = (
    "environment",
    "app",
    "function",
    "function_id",
    "revision",
    "key",
    "caller",
    "kind",
    "start_kind",
    "price_version",
    "currency",
    "month",
    "gpu",
)
"""`gpu`: the kind of GPU that was granted; "" without."""
ROLLUP_SUMS = (
    "records",
    "errors",
    "queued_ms",
    "start_ms",
    "exec_ms",
    "billed_ns",
    "tokens_in",
    "tokens_out",
    "bytes_in",
    "bytes_out",
    "high",
    "low",
)
"""`high` and `low`: the cost in picounits above 10**9 and the rest, summed separately. `errors`:
calls answered with 500 or above."""
ROLLUP_FLOATS = ("cpu_core_s", "memory_byte_s", "gpu_s")


def _rollup(name: str, unit: str, *indexes: sa.Index) -> sa.Table:
    """Define sums of records by all columns that bills and pages group by; `unit` is the whole hour
    or day since the epoch."""
    return sa.Table(
        name,
        metadata,
        text("tenant", key=True),
        sa.Column(unit, sa.BigInteger, primary_key=True, autoincrement=False),
        *(text(part, key=True) for part in ROLLUP_GROUPS),
        *(whole(part) for part in ROLLUP_SUMS),
        *(time(part) for part in ROLLUP_FLOATS),
        *indexes,
    )


def _customer_rollup(name: str, unit: str) -> sa.Table:
    """Define the same sums by customer, of the records that name one. They are apart because
    callers may name any number of customers, and budgets and pages read all rows of a tenant."""
    groups = (unit, *ROLLUP_GROUPS)
    return sa.Table(
        name,
        metadata,
        text("tenant"),
        whole(unit),
        *(text(part) for part in ("customer", *ROLLUP_GROUPS)),
        *(whole(part) for part in ROLLUP_SUMS),
        *(time(part) for part in ROLLUP_FLOATS),
        sa.PrimaryKeyConstraint("tenant", "customer", *groups),
        sa.Index(f"ix_{name}_tenant", "tenant", unit),
    )


usage_hours = _rollup("usage_hours", "hour")
usage_days = _rollup("usage_days", "day", sa.Index("ix_usage_days_tenant_month", "tenant", "month"))
customer_hours = _customer_rollup("customer_hours", "hour")
customer_days = _customer_rollup("customer_days", "day")

latency_hours = sa.Table(
    "latency_hours",
    metadata,
    text("tenant", key=True),
    sa.Column("hour", sa.BigInteger, primary_key=True, autoincrement=False),
    *(text(name, key=True) for name in ("environment", "function_id", "start_kind", "clock")),
    sa.Column("bucket", sa.BigInteger, primary_key=True, autoincrement=False),
    whole("calls"),
)
"""A histogram of each clock (`total`, `queue`, `start`, `exec`) in buckets that grow by a tenth:
bucket b holds up to 1.1**b ms."""

invoices = sa.Table(
    "invoices",
    metadata,
    text("id", key=True),
    sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    *(text(name) for name in ("month", "currency", "total", "document")),
    time("issued_at"),
    sa.UniqueConstraint("tenant", "month", "currency"),
)

prices = sa.Table(
    "prices", metadata, text("version", key=True), text("document"), time("first_seen_at")
)

usage_archives = sa.Table(
    "usage_archives",
    metadata,
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    *(text(name) for name in ("sha256", "previous", "state")),
    whole("records"),
    time("created_at"),
    time("removed_at", null=True),
)
"""Files of records that left `usage` (`controller.usage_archive`). `sha256` of its content;
`previous`: that of the archive before. `state` `written`: its records are being removed."""

usage_archive_days = sa.Table(
    "usage_archive_days",
    metadata,
    sa.Column("archive", sa.BigInteger, sa.ForeignKey("usage_archives.number"), primary_key=True),
    text("tenant", key=True),
    sa.Column("day", sa.BigInteger, primary_key=True, autoincrement=False),
    *(text(name, key=True) for name in ("month", "currency")),
    sa.Column("has_customer", sa.Boolean, primary_key=True),
    *(whole(name) for name in ("records", "high", "low")),
    sa.Index("ix_usage_archive_days_tenant_day", "tenant", "day"),
)
"""Sums of the records that were removed from `usage`, grown in the transactions that remove them;
`high`, `low`: as in rollups."""
