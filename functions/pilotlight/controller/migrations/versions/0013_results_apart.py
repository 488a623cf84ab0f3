"""Results of calls in a column of their own: lists of calls read their records, not their results."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

AT_ONCE = 500
"""Rows that are looked at in one query; a result is tens of megabytes at most, and one is read at a time."""


def upgrade() -> None:
    """Add the column, and move each result into it. What a call takes (`kept_bytes`) stays as it is."""
    op.add_column("calls", sa.Column("result", sa.Text(), server_default="", nullable=False))
    calls = sa.table("calls", *(sa.column(name) for name in ("tenant", "id", "record", "result")))
    sql, key = op.get_bind(), (calls.c.tenant, calls.c.id)
    names, after = sa.select(*key).order_by(*key).limit(AT_ONCE), ("", "")
    while rows := sql.execute(names.where(sa.tuple_(*key) > after)).all():
        for row in rows:
            this = (calls.c.tenant == row.tenant, calls.c.id == row.id)
            record = json.loads(sql.execute(sa.select(calls.c.record).where(*this)).scalar_one())
            if result := record.get("result"):
                text = json.dumps({**record, "result": ""}, ensure_ascii=False, separators=(",", ":"))
                sql.execute(sa.update(calls).where(*this).values(record=text, result=result))
        after = tuple(rows[-1])
