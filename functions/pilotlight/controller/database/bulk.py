"""Statements and conditions for many rows: as text where SQLAlchemy's handling of expressions and
parameters costs more than the database's work."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

_POSTGRESQL = "postgresql"
MAX_VALUES = 500
"""Values of one statement: databases limit its parameters, old versions of SQLite to 999
(SQLITE_MAX_VARIABLE_NUMBER)."""
T = TypeVar("T")


def parts(values: Iterable[T]) -> Iterator[list[T]]:
    """Yield the values in lists that fit into a statement."""
    rest = list(values)
    for begin in range(0, len(rest), MAX_VALUES):
        yield rest[begin : begin + MAX_VALUES]


def select_in(
    sql: sa.Connection, query: str, values: Collection[str], *more: str
) -> list[tuple[Any, ...]]:
    """Return the rows of a query that has `{in}` after the column that must have one of `values`,
    and after that `{}` for each of `more`."""
    if sql.dialect.name == _POSTGRESQL:
        text, of = query.replace("{in}", "= ANY(%s)").replace("{}", "%s"), list(values)
        return [tuple(row) for row in sql.exec_driver_sql(text, (of, *more))]
    text = query.replace("{in}", "IN (SELECT value FROM json_each(?))").replace("{}", "?")
    return [tuple(row) for row in sql.exec_driver_sql(text, (json.dumps(list(values)), *more))]


def is_one_of(
    sql: sa.Connection, columns: Sequence[sa.Column[Any]], keys: Iterable[Sequence[Any]]
) -> sa.ColumnElement[bool]:
    """Return the condition for rows with one of these values of `columns`, such that databases use
    the index of `columns`. SQLite would read the whole table for a list of tuples."""
    values = [tuple(key) for key in keys]
    if sql.dialect.name == _POSTGRESQL:
        return sa.tuple_(*columns).in_(values)
    each = sa.func.json_each(json.dumps(values)).table_valued("value")
    parts = (sa.func.json_extract(each.c.value, f"$[{n}]") for n in range(len(columns)))
    return sa.tuple_(*columns).in_(sa.select(*parts))


def insert(
    sql: sa.Connection,
    table: str,
    columns: tuple[str, ...],
    rows: Sequence[tuple[Any, ...]],
    on_conflict: str,
) -> int:
    """Insert rows by one prepared statement; return how many were inserted or updated."""
    text = _insertion(sql.dialect.name, table, columns, on_conflict)
    return int(sql.exec_driver_sql(text, list(rows), {"preserve_rowcount": True}).rowcount)


def delete(
    sql: sa.Connection, table: str, columns: tuple[str, ...], keys: Sequence[Sequence[Any]]
) -> int:
    """Delete the rows with these values of `columns`, the primary key, by one prepared statement;
    return how many there were. SQLite would read the whole table for a list of tuples."""
    if not keys:
        return 0
    text = _deletion(sql.dialect.name, table, columns)
    rows = [tuple(key) for key in keys]
    return int(sql.exec_driver_sql(text, rows, {"preserve_rowcount": True}).rowcount)


@functools.cache
def _deletion(dialect: str, table: str, columns: tuple[str, ...]) -> str:
    place = "%s" if dialect == _POSTGRESQL else "?"
    return f"DELETE FROM {table} WHERE " + " AND ".join(f'"{name}" = {place}' for name in columns)


@functools.cache
def _insertion(dialect: str, table: str, columns: tuple[str, ...], on_conflict: str) -> str:
    places = ", ".join(["%s" if dialect == _POSTGRESQL else "?"] * len(columns))
    return f"INSERT INTO {table} ({quoted(columns)}) VALUES ({places}) {on_conflict}"


def quoted(names: Collection[str]) -> str:
    """Return column names for a statement."""
    return ", ".join(f'"{name}"' for name in names)
