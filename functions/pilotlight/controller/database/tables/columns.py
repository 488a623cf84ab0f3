"""The metadata that all tables share, and three kinds of columns."""

from __future__ import annotations

import sqlalchemy as sa

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
}
metadata = sa.MetaData(naming_convention=NAMING)


def text(name: str, *args: sa.ForeignKey, null: bool = False, key: bool = False) -> sa.Column[str]:
    """Define a text column; `null`: it is nullable; `key`: part of the primary key."""
    return sa.Column(name, sa.Text, *args, nullable=null, primary_key=key)


def time(name: str, *, null: bool = False) -> sa.Column[float]:
    """Define a column of seconds since the epoch."""
    return sa.Column(name, sa.Double, nullable=null)


def whole(name: str, *, null: bool = False) -> sa.Column[int]:
    """Define a column of integers."""
    return sa.Column(name, sa.BigInteger, nullable=null)
