"""The controller's database, up to date, empty or with its first tenant: made once per process and
copied, which is faster."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import sqlalchemy as sa

from pilotlight.controller.database.store import Store
from pilotlight.controller.server import bootstrap

_TEMPLATE = "migrated"
FAST_COPY = "STRATEGY file_copy"
"""How PostgreSQL copies a template: its files, instead of each block through the log."""


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
        _write_back(store)
        return path.read_bytes()


def owned_sqlite(path: Path, *, now: float) -> tuple[str, str]:
    """Make one with its first tenant and admin key, as `bootstrap.ensure_admin` made them at `now`;
    its URL and the key."""
    content, key = owned_bytes(now)
    path.write_bytes(content)
    return f"sqlite:///{path}", key


@functools.cache
def owned_bytes(now: float) -> tuple[bytes, str]:
    """What is in such a file, and the key."""
    with tempfile.TemporaryDirectory(prefix="pldb") as directory:
        path = Path(directory) / "controller.db"
        store = Store(empty_sqlite(path), clock=lambda: now)
        key = bootstrap.ensure_admin(store, uid_base=20_000)
        assert key is not None
        _write_back(store)
        return path.read_bytes(), key


def _write_back(store: Store) -> None:
    with store.engine.connect() as connection:
        connection.exec_driver_sql("ROLLBACK")
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()


@contextlib.contextmanager
def empty_postgres(server: str) -> Iterator[str]:
    """One in the cluster whose maintenance database is at `server`, for as long as the block lasts;
    its URL."""
    name = f"m{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server, autocommit=True) as connection:
        if (
            connection.execute(
                "SELECT 1 FROM pg_database WHERE datname = %s", (_TEMPLATE,)
            ).fetchone()
            is None
        ):
            connection.execute(f"CREATE DATABASE {_TEMPLATE}".encode())
            store = Store(_url(server, _TEMPLATE), clock=lambda: 0.0)
            store.migrate()
            store.close()
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE} {FAST_COPY}".encode())
        yield _url(server, name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def _url(server: str, name: str) -> str:
    return server.replace("postgresql://", "postgresql+psycopg://").replace(
        "/postgres?", f"/{name}?"
    )


def without_customers(sql: sa.Connection) -> None:
    """Undo what version 0028 and later ones added to tables that were there, for tests of upgrades
    from earlier versions."""
    changes = [f"DROP INDEX ix_{name}" for name in ("usage_tenant_customer", "budgets_reach")]
    changes += ["DROP INDEX ix_budgets_parent", "ALTER TABLE budgets DROP COLUMN parent"]
    changes += [
        f"ALTER TABLE {name} DROP COLUMN customer" for name in ("usage", "api_keys", "budgets")
    ]
    changes += [f"DROP TABLE customer_{name}" for name in ("hours", "days", "quotas")]
    later = ("tenant_deletions", "usage_archive_days", "usage_archives")
    changes += [f"DROP TABLE {name}" for name in later]
    changes.append("ALTER TABLE tenants DROP COLUMN deleted_at")
    changes += [f"DROP TABLE credit_{name}" for name in ("uses", "grants", "entries", "accounts")]
    if sql.dialect.name == "postgresql":
        changes.append("DROP FUNCTION credit_entries_refuse")
        reach = "tenant, environment, app, function, period, currency"
        changes.append(f"ALTER TABLE budgets ADD UNIQUE ({reach})")
    for change in changes:
        sql.execute(sa.text(change))
