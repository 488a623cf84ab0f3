"""Results of calls in a separate column: lists of calls read their records without results."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

AT_ONCE = 500
"""Number of small rows moved together."""
SMALL_BYTES = 65_536
"""Larger rows are read one at a time: a result may have tens of megabytes."""


def upgrade() -> None:
    """Add the column, and move each result into it. The size of a call (`kept_bytes`) is
    unchanged."""
    op.add_column("calls", sa.Column("result", sa.Text(), server_default="", nullable=False))
    calls = sa.table("calls", *(sa.column(name) for name in ("tenant", "id", "record", "result")))
    sql, key = op.get_bind(), (calls.c.tenant, calls.c.id)
    small = sa.case((sa.func.length(calls.c.record) <= SMALL_BYTES, calls.c.record)).label("record")
    page, after = sa.select(*key, small).order_by(*key).limit(AT_ONCE), ("", "")
    this = (calls.c.tenant == sa.bindparam("whose"), calls.c.id == sa.bindparam("call"))
    move = (
        sa.update(calls)
        .where(*this)
        .values(record=sa.bindparam("rest"), result=sa.bindparam("moved"))
    )
    while rows := sql.execute(page.where(sa.tuple_(*key) > after)).all():
        moved = []
        for row in rows:
            named = {"whose": row.tenant, "call": row.id}
            text = (
                row.record
                if row.record is not None
                else sql.execute(sa.select(calls.c.record).where(*this), named).scalar_one()
            )
            record = json.loads(text)
            if result := record.get("result"):
                rest = json.dumps(
                    {**record, "result": ""}, ensure_ascii=False, separators=(",", ":")
                )
                change = {**named, "rest": rest, "moved": result}
                if row.record is None:
                    sql.execute(move, change)
                else:
                    moved.append(change)
        if moved:
            sql.execute(move, moved)
        after = (rows[-1].tenant, rows[-1].id)
