"""Tables of prepaid credit."""

from __future__ import annotations

import sqlalchemy as sa

from pilotlight.controller.database.tables.columns import metadata, text, time, whole

credit_accounts = sa.Table(
    "credit_accounts",
    metadata,
    text("id", key=True),
    sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    *(text(name) for name in ("customer", "currency")),
    time("opened_at"),
    time("closed_at", null=True),
    whole("version"),
    *(text(name) for name in ("granted", "spent", "debt")),
    sa.Index(
        "ix_credit_accounts_open",
        *("tenant", "customer", "currency"),
        unique=True,
        sqlite_where=sa.text("closed_at IS NULL"),
        postgresql_where=sa.text("closed_at IS NULL"),
    ),
    sa.Index("ix_credit_accounts_customer", "tenant", "customer"),
)
"""`version`: the number of its entries. Amounts are decimals as text. `granted`: the sum of its
entries; `spent`: of the costs of its customer's records; `debt`: the part of `spent` that no grant
has paid."""

credit_entries = sa.Table(
    "credit_entries",
    metadata,
    text("id", key=True),
    sa.Column("account", sa.Text, sa.ForeignKey("credit_accounts.id"), nullable=False),
    whole("number"),
    *(text(name) for name in ("tenant", "customer", "kind", "amount", "currency")),
    time("expires_at", null=True),
    text("grant", null=True),
    text("note"),
    text("reference", null=True),
    text("actor"),
    time("at"),
    sa.UniqueConstraint("account", "number"),
    sa.UniqueConstraint("tenant", "reference"),
    sa.Index("ix_credit_entries_customer", "tenant", "customer", "at"),
)
"""The ledger of credit: triggers refuse changes."""

credit_grants = sa.Table(
    "credit_grants",
    metadata,
    text("id", sa.ForeignKey("credit_entries.id"), key=True),
    sa.Column("account", sa.Text, sa.ForeignKey("credit_accounts.id"), nullable=False),
    *(text(name) for name in ("tenant", "amount", "used")),
    time("expires_at", null=True),
    sa.Column("is_open", sa.Boolean, nullable=False),
    sa.Index("ix_credit_grants_account", "account", "is_open"),
    sa.Index("ix_credit_grants_expires_at", "is_open", "expires_at"),
    sa.Index("ix_credit_grants_tenant", "tenant", "is_open"),
)
"""What is left of each grant: `amount` is without what was withdrawn. `is_open`: some is unused."""

credit_uses = sa.Table(
    "credit_uses",
    metadata,
    text("account", sa.ForeignKey("credit_accounts.id"), key=True),
    text("month", key=True),
    sa.Column("day", sa.BigInteger, primary_key=True, autoincrement=False),
    *(text(name, key=True) for name in ("environment", "app", "function")),
    whole("high"),
    whole("low"),
)
"""What records used of an account, by the month of their invoice, day and function; money as in
rollups."""
