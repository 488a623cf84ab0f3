"""The controller's database, empty and up to date: migrated once per run and copied, because migrating takes longer than most tests."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg

from pilotlight.controller.store import Store

_TEMPLATE = "migrated"


def empty_sqlite(path: Path) -> str:
    """Make one at `path`; its URL."""
    path.write_bytes(empty_bytes())
    return f"sqlite:///{path}"


@functools.cache
def empty_bytes() -> bytes:
    """What is in such a file."""
    with tempfile.TemporaryDirectory(prefix="pldb") as directory:
        path = Path(directory) / "controller.db"
        store = Store(f"sqlite:///{path}", clock=lambda: 0.0)
        store.migrate()
        with store.engine.connect() as connection:
            connection.exec_driver_sql("ROLLBACK")
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        store.close()
        return path.read_bytes()


@contextlib.contextmanager
def empty_postgres(server: str) -> Iterator[str]:
    """One in the cluster whose maintenance database is at `server`, for as long as the block lasts; its URL."""
    name = f"m{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server, autocommit=True) as connection:
        if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (_TEMPLATE,)).fetchone() is None:
            connection.execute(f"CREATE DATABASE {_TEMPLATE}".encode())
            store = Store(_url(server, _TEMPLATE), clock=lambda: 0.0)
            store.migrate()
            store.close()
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE}".encode())
        yield _url(server, name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def _url(server: str, name: str) -> str:
    return server.replace("postgresql://", "postgresql+psycopg://").replace("/postgres?", f"/{name}?")
