"""Plugin: what SQLAlchemy compiles for one database serves all databases of the same kind.

Each test of the controller opens a database of its own, and SQLAlchemy keeps compiled statements
for each engine: every test would compile every statement again. A controller has one engine for its
life."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import event


class _Compiled(dict[Any, Any]):
    """The execution option `compiled_cache`, whose keys begin with the dialect: here with its name,
    since each engine has another."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_shared(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_shared(key), value)


def _shared(key: Any) -> Any:
    dialect, *rest = key
    return (dialect.name, dialect.driver, *rest)


def pytest_configure() -> None:
    """Every connection, of whichever engine, looks in the same place."""
    compiled = _Compiled()

    @event.listens_for(sa.Engine, "engine_connect")
    def _share(connection: sa.Connection) -> None:
        connection.execution_options(compiled_cache=compiled)
