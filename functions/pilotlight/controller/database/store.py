"""The database: open, migrate, read and write, with one code for SQLite and PostgreSQL.

Reads run concurrently. Writes of this process run one at a time: an in-process lock costs
microseconds, while SQLite's own waiting polls with growing pauses. A `Write` records whether it
changed the feed; the feed's followers are notified after the commit.

SQLite runs with WAL, foreign keys and `synchronous=FULL`: acknowledged data (above all usage
records) survives a power failure."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite

from pilotlight.errors import StorageFull, Unavailable

BUSY_TIMEOUT_MS = 10_000
"""How long a write waits for another process (`pilotlight state backup`, a bootstrap); the longest
holds the lock for some seconds."""
MIGRATION_LOCK = 0x70696C6F
"""Key of PostgreSQL's advisory lock around migrations: "pilo"."""
WRITE_LOCK = 0x70696C77
"""Key of PostgreSQL's advisory lock around every write: "pilw"."""
MAX_CONNECTIONS = 48
"""Connections of one process: one for each thread that may query (`threads`), the framework's 40
and 8 that look up keys."""
KEPT_CONNECTIONS = 8
"""Connections that stay open when idle."""
CLOSED_RETRY_S = 2.0
"""When to try again what a closed store refuses: the supervisor restarts the controller within
this."""
_WRITING = {"pilotlight_writing": True}
_MIGRATIONS = Path(__file__).parent / "migrations"
_VERSION = sa.table("alembic_version", sa.column("version_num"))
"""Alembic's table."""


def newest_schema_revision() -> str:
    """Return the revision of the newest migration; file names of migrations begin with it."""
    return max(path.name.partition("_")[0] for path in (_MIGRATIONS / "versions").glob("[0-9]*.py"))


@dataclass(slots=True)
class Write:
    """A writing transaction. Owner: the thread inside `Store.write`. `fed`: whether the feed
    changed."""

    sql: sa.Connection
    now: float
    fed: bool = False

    def insert(self, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
        """Return the dialect's INSERT, which has `on_conflict_do_nothing` and
        `on_conflict_do_update`."""
        return (
            postgresql.insert(table)
            if self.sql.dialect.name == "postgresql"
            else sqlite.insert(table)
        )


transaction_hook: ContextVar[Callable[[Write], None] | None] = ContextVar(
    "written with every change", default=None
)
"""Called in each transaction that the current request commits, to write more rows
(`idempotency`)."""


class Store:
    """The open database. Safe to use from many threads; `close()` closes it.

    A cancelled task leaves its thread behind, which may hold a connection when the controller
    closes the store, or ask for one later. The engine would not close the former (`dispose` forgets
    connections in use) and would open the latter, so the store counts them."""

    def __init__(
        self, url: str, *, clock: Callable[[], float], on_fed: Callable[[], None] = lambda: None
    ) -> None:
        self._clock = clock
        self._on_fed = on_fed
        self._writing = threading.Lock()
        self._state = threading.Lock()
        """Guards the two below."""
        self._in_use = 0
        self._is_closed = False
        self.engine = _engine(url)
        # A read must be consistent across statements; on SQLite it always is.
        is_postgresql = self.engine.dialect.name == "postgresql"
        self._reader = (
            self.engine.execution_options(isolation_level="REPEATABLE READ")
            if is_postgresql
            else self.engine
        )

    def __repr__(self) -> str:
        return f"<Store {self.engine.url.render_as_string(hide_password=True)}>"

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a consistent read-only view. Raises Unavailable once the store is closed."""
        with self._connect(self._reader) as connection:
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Write]:
        """Open a transaction; it is committed at the end of the block and rolled back on an
        exception. Raises StorageFull, and Unavailable once the store is closed."""
        with (
            self._writing,
            _disk_errors(),
            self._connect(self.engine) as connection,
            connection.execution_options(**_WRITING).begin(),
        ):
            # as BEGIN IMMEDIATE on SQLite: one writer among all processes
            if connection.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(WRITE_LOCK)))
            write = Write(sql=connection, now=self._clock())
            yield write
            if (rider := transaction_hook.get()) is not None:
                rider(write)
        if write.fed:
            self._on_fed()

    def ping(self) -> None:
        """Return once the database has answered. Raises SQLAlchemyError, and Unavailable once the
        store is closed."""
        with self._connect(self.engine) as connection:
            connection.execute(sa.select(1))

    def migrate(self) -> None:
        """Bring the schema up to date. Idempotent; of two concurrent callers one migrates while the
        other waits."""
        if self._is_current():
            return
        from alembic import command  # takes 0.3 s to import, which most starts do not need
        from alembic.config import Config

        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS))
        with self._writing, self._connect(self.engine) as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(MIGRATION_LOCK)))
            else:
                connection = connection.execution_options(**_WRITING)
                connection.begin()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.commit()

    def _is_current(self) -> bool:
        with self._connect(self.engine) as connection:
            if not sa.inspect(connection).has_table(_VERSION.name):
                return False
            return list(connection.scalars(sa.select(_VERSION.c.version_num))) == [
                newest_schema_revision()
            ]

    @contextlib.contextmanager
    def _connect(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        with self._state:
            if self._is_closed:
                raise Unavailable(
                    "the control plane is shutting down: nothing was changed",
                    retry_after_s=CLOSED_RETRY_S,
                )
            self._in_use += 1
        try:
            with engine.connect() as connection:
                yield connection
        finally:
            with self._state:
                self._in_use -= 1
                is_last = self._is_closed and not self._in_use
            if is_last:
                self.engine.dispose()

    def close(self) -> None:
        """Close every connection: at once, or, while some are in use, when the last of these is
        returned. Idempotent."""
        with self._state:
            self._is_closed = True
            is_idle = not self._in_use
        if is_idle:
            self.engine.dispose()


def _engine(url: str) -> sa.Engine:
    more = MAX_CONNECTIONS - KEPT_CONNECTIONS
    if not url.startswith("sqlite:"):
        return sa.create_engine(
            url, pool_size=KEPT_CONNECTIONS, max_overflow=more, pool_pre_ping=True
        )
    engine = sa.create_engine(
        url,
        pool_size=KEPT_CONNECTIONS,
        max_overflow=more,
        connect_args={"timeout": BUSY_TIMEOUT_MS / 1000},
    )
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(raw: sqlite3.Connection, _record: Any) -> None:
    # the driver's implicit BEGIN would be deferred and exclude DDL
    raw.isolation_level = None
    _write_ahead(raw)
    for pragma in ("synchronous=FULL", "foreign_keys=ON", f"busy_timeout={BUSY_TIMEOUT_MS}"):
        raw.execute(f"PRAGMA {pragma}").close()


def _write_ahead(raw: sqlite3.Connection) -> None:
    """Enable the write-ahead log. Of two processes that open a new file at once, one gets "locked"
    without the wait of `busy_timeout`, so retry."""
    until = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            raw.execute("PRAGMA journal_mode=WAL").close()
            return
        except sqlite3.OperationalError as e:
            if "locked" not in str(e) or time.monotonic() > until:
                raise
            time.sleep(0.005)


def _begin_sqlite(connection: sa.Connection) -> None:
    # IMMEDIATE acquires the write lock at once: a deferred transaction that upgrades later fails
    # instead of waiting.
    writing = connection.get_execution_options().get("pilotlight_writing", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except sa.exc.OperationalError as e:
        if "full" in str(e.orig).lower() or "no space" in str(e.orig).lower():
            raise StorageFull(
                f"the control plane's database cannot grow: {e.orig}. Free some space; nothing was "
                "changed."
            ) from e
        raise
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"the disk is full: {e.strerror}. Free some space; nothing was changed."
            ) from e
        raise
