"""Drift: sketches, scores, references and reports."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def _text(name: str, *, null: bool = False, key: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=null, primary_key=key)


def _whole(name: str, *, key: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False, primary_key=key, autoincrement=False)


def _double(name: str, *, null: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double(), nullable=null)


def upgrade() -> None:
    """Add the tables, and mark the files whose sketches were counted."""
    op.add_column(
        "prediction_files",
        sa.Column("is_sketched", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.create_table(
        "drift_sketches",
        *(_text(name, key=True) for name in ("function_id", "revision")),
        _whole("hour", key=True),
        _text("tenant"),
        _whole("rows"),
        _text("features"),
        _double("expires_at"),
    )
    op.create_index("ix_drift_sketches_expires_at", "drift_sketches", ["expires_at"])
    op.create_index("ix_drift_sketches_hour", "drift_sketches", ["hour"])
    op.create_table(
        "drift_scores",
        *(_text(name, key=True) for name in ("tenant", "call")),
        *(_text(name) for name in ("function_id", "revision")),
        _double("at"),
        _double("score", null=True),
        _text("label", null=True),
        _text("slices"),
        _double("expires_at"),
    )
    op.create_index("ix_drift_scores_at", "drift_scores", ["function_id", "at"])
    op.create_index("ix_drift_scores_expires_at", "drift_scores", ["expires_at"])
    op.create_table(
        "drift_references",
        _text("function_id", key=True),
        _text("tenant"),
        _whole("rows"),
        *(_text(name) for name in ("features", "source", "created_by")),
        _double("created_at"),
    )
    op.create_table(
        "drift_reports",
        _text("function_id", key=True),
        _whole("until", key=True),
        *(_text(name) for name in ("tenant", "status", "report")),
        _double("created_at"),
    )
    op.create_index("ix_feedback_at", "feedback", ["function_id", "metric", "at"])
    op.create_index("ix_drift_reports_created_at", "drift_reports", ["created_at"])
