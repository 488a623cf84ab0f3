"""Prepaid credit of customers: accounts, their ledger, what is left of grants, and what used it."""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

_APPEND_ONLY = {
    "sqlite": [
        """CREATE TRIGGER credit_entries_no_update BEFORE UPDATE ON credit_entries
           BEGIN SELECT RAISE(ABORT, 'credit_entries is append-only'); END""",
        """CREATE TRIGGER credit_entries_no_delete BEFORE DELETE ON credit_entries
           BEGIN SELECT RAISE(ABORT, 'credit_entries is append-only'); END""",
    ],
    "postgresql": [
        """CREATE FUNCTION credit_entries_refuse() RETURNS trigger LANGUAGE plpgsql
           AS $$ BEGIN RAISE EXCEPTION 'credit_entries is append-only'; END $$""",
        """CREATE TRIGGER credit_entries_no_change BEFORE UPDATE OR DELETE ON credit_entries
           FOR EACH ROW EXECUTE FUNCTION credit_entries_refuse()""",
    ],
}


def _text(name: str, *, null: bool = False, key: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=null, primary_key=key)


def _time(name: str, *, null: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double(), nullable=null)


def _account(*, key: bool = False) -> sa.Column[str]:
    of = sa.ForeignKey("credit_accounts.id")
    return sa.Column("account", sa.Text(), of, nullable=False, primary_key=key)


def upgrade() -> None:
    """Create the tables. No customer has prepaid credit before."""
    op.create_table(
        "credit_accounts",
        _text("id", key=True),
        sa.Column("tenant", sa.Text(), sa.ForeignKey("tenants.id"), nullable=False),
        *(_text(name) for name in ("customer", "currency")),
        _time("opened_at"),
        _time("closed_at", null=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        *(_text(name) for name in ("granted", "spent", "debt")),
    )
    op.create_index(
        "ix_credit_accounts_open",
        "credit_accounts",
        ["tenant", "customer", "currency"],
        unique=True,
        sqlite_where=sa.text("closed_at IS NULL"),
        postgresql_where=sa.text("closed_at IS NULL"),
    )
    op.create_index("ix_credit_accounts_customer", "credit_accounts", ["tenant", "customer"])
    op.create_table(
        "credit_entries",
        _text("id", key=True),
        _account(),
        sa.Column("number", sa.BigInteger(), nullable=False),
        *(_text(name) for name in ("tenant", "customer", "kind", "amount", "currency")),
        _time("expires_at", null=True),
        _text("grant", null=True),
        _text("note"),
        _text("reference", null=True),
        _text("actor"),
        _time("at"),
        sa.UniqueConstraint("account", "number"),
        sa.UniqueConstraint("tenant", "reference"),
    )
    op.create_index("ix_credit_entries_customer", "credit_entries", ["tenant", "customer", "at"])
    op.create_table(
        "credit_grants",
        sa.Column("id", sa.Text(), sa.ForeignKey("credit_entries.id"), primary_key=True),
        _account(),
        *(_text(name) for name in ("tenant", "amount", "used")),
        _time("expires_at", null=True),
        sa.Column("is_open", sa.Boolean(), nullable=False),
    )
    op.create_index("ix_credit_grants_account", "credit_grants", ["account", "is_open"])
    op.create_index("ix_credit_grants_expires_at", "credit_grants", ["is_open", "expires_at"])
    op.create_index("ix_credit_grants_tenant", "credit_grants", ["tenant", "is_open"])
    op.create_table(
        "credit_uses",
        _account(key=True),
        _text("month", key=True),
        sa.Column("day", sa.BigInteger(), primary_key=True, autoincrement=False),
        *(_text(name, key=True) for name in ("environment", "app", "function")),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("high", "low")),
    )
    for statement in _APPEND_ONLY[op.get_bind().dialect.name]:
        op.execute(statement)
