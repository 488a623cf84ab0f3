"""The lock that allows one controller per database. It is held for the life of the process, and the
kernel releases it however the process ends."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import sqlalchemy as sa

_ADVISORY_LOCK = 0x70696C6F74
"""Key of the PostgreSQL session lock: "pilot"."""
_SESSION_END_S = 1.0
"""How long PostgreSQL may take to end the session of a controller that has ended, which releases
its lock."""
_RETRY_S = 0.02


class AlreadyRunning(Exception):
    """Raised when another controller holds the lock; the message identifies it."""


class ControllerLock:
    """The controller's lock: a file lock (flock(2)) in <home>, and a session lock if the database
    is PostgreSQL."""

    def __init__(
        self, file: Path, engine: sa.Engine | None = None, *, descriptor: int = -1
    ) -> None:
        """`descriptor`: of the file, if this process has locked it already (`acquire_lock_file`);
        -1 = it has not."""
        self._file = file
        self._engine = (
            engine if engine is not None and engine.dialect.name == "postgresql" else None
        )
        self._descriptor = descriptor
        self._session: sa.Connection | None = None

    @property
    def is_in_database(self) -> bool:
        """Whether the lock is also held in the database, which may lose it."""
        return self._session is not None

    def is_held(self) -> bool:
        """Whether the database session that holds the lock is still alive. Blocks until the
        database answers."""
        if self._session is None:
            return self._descriptor >= 0
        try:
            return bool(self._session.execute(sa.select(1)).scalar_one())
        except sa.exc.SQLAlchemyError:
            return False

    def __enter__(self) -> Self:
        """Acquire the lock. Raises AlreadyRunning."""
        self.acquire()
        return self

    def acquire(self, *, patience_s: float = _SESSION_END_S) -> None:
        """Acquire the lock. Blocks for up to `patience_s` while the database may still be ending
        the session of a controller that has ended. Raises AlreadyRunning."""
        is_file_locked = self._descriptor >= 0
        if not is_file_locked:
            self._descriptor = acquire_lock_file(self._file)
        try:
            self._acquire_session(patience_s)
        except BaseException:
            if is_file_locked:  # keep the given descriptor: reopening the file may require root
                self._end_session()
            else:
                self.release()
            raise

    def _acquire_session(self, patience_s: float) -> None:
        if self._engine is not None:
            self._session = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            deadline = time.monotonic() + patience_s
            while not self._session.execute(
                sa.select(sa.func.pg_try_advisory_lock(_ADVISORY_LOCK))
            ).scalar_one():
                if time.monotonic() > deadline:
                    raise AlreadyRunning(
                        f"another controller runs on "
                        f"{self._engine.url.render_as_string(hide_password=True)}"
                    )
                time.sleep(_RETRY_S)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock. Does nothing if it is not held."""
        self._end_session()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.invalidate()  # in the pool it would keep holding the lock
            self._session.close()
            self._session = None


def acquire_lock_file(file: Path) -> int:
    """Lock `file`, write this process's pid to it, and return its descriptor. Raises
    AlreadyRunning."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        owner = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
        os.close(descriptor)
        raise AlreadyRunning(
            f"another controller (pid {owner}) runs on {file.parent}: it holds {file}"
        ) from e
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def notify_controller(file: Path) -> None:
    """Notify the controller that holds the lock `file` that another process has written to its
    database. Does nothing if no controller holds it."""
    try:
        owner = file.read_text().strip()
        if owner.isdigit():
            os.kill(int(owner), signal.SIGHUP)
    except (FileNotFoundError, ProcessLookupError):
        return
