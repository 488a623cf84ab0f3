"""The SQLite database in <home>, in a directory of its own: only that directory's owner opens the
file.

`<home>/controller/` holds `controller.db` and SQLite's files beside it. It belongs to the
controller's user, which need not be root (`process_user`). SQLite opens these files by name and
follows links, so root does not open them in a directory of another user: a child process that runs
as this user does. Earlier releases had the file in <home> itself."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from pilotlight import errors
from pilotlight.errors import Conflict, PilotlightError
from snapshotter.linux.process_user import ProcessUser

DIRECTORY = "controller"
NAME = "controller.db"
MOVE_TIMEOUT_S = 10.0
"""How long a move waits for another process that has the file open, in seconds."""


def database_directory(home: Path) -> Path:
    """Return the directory of the database and its log."""
    return home / DIRECTORY


def database_path(home: Path) -> Path:
    """Return the path of the database, which need not exist."""
    return home / DIRECTORY / NAME


def find_database(home: Path) -> Path | None:
    """Return the path of the existing database, which an earlier release may have placed in <home>
    itself; None if there is none."""
    return next((file for file in (database_path(home), home / NAME) if file.exists()), None)


def move_to_own_directory(home: Path, *, timeout_s: float = MOVE_TIMEOUT_S) -> None:
    """Create the directory, and move an earlier release's database into it. Raises Conflict when a
    process has the database open."""
    directory = database_directory(home)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    old, new = home / NAME, database_path(home)
    if not old.exists() or new.exists():
        return
    with contextlib.suppress(FileNotFoundError):  # another process has moved it
        _merge_wal(old, timeout_s)
        status = directory.stat()
        # before the move: the directory's owner could replace the file there
        os.chown(old, status.st_uid, status.st_gid)
        old.rename(new)
        for each in (directory, home):
            descriptor = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.fsync(descriptor)
            os.close(descriptor)


def _merge_wal(file: Path, timeout_s: float) -> None:
    """Merge the write-ahead log into the database file, which no process may have open."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{file}?mode=rw", uri=True, timeout=timeout_s)
        ) as database:
            (mode,) = database.execute("PRAGMA journal_mode=DELETE").fetchone()
            reason = "" if mode == "delete" else f"its journal mode is still {mode}"
    except sqlite3.OperationalError as e:
        if not file.exists():
            raise FileNotFoundError(file) from e
        reason = str(e)
    if reason:
        raise Conflict(
            f"{file} cannot be moved to {database_path(file.parent)}: {reason}",
            hint="Stop the process that has it open: `pilotlight down`.",
        )


def database_owner(home: Path) -> ProcessUser | None:
    """Return the user that must open the file, if this process is root and the directory belongs to
    another user; else None: this process may open it."""
    if os.geteuid() != 0:
        return None
    try:
        uid = database_directory(home).stat().st_uid
    except FileNotFoundError:
        return None
    return ProcessUser(uid=uid, enters=(database_directory(home),)) if uid else None


def run_as_owner(owner: ProcessUser | None, work: Callable[[], Any]) -> Any:
    """Run `work` as `owner` and return its result, which must be a JSON value. Passes on its errors
    from `pilotlight.errors`; raises Conflict for others."""
    if owner is None:
        return work()

    def encoded_result() -> bytes:
        try:
            return json.dumps({"ok": work()}).encode()
        except PilotlightError as e:
            return json.dumps(
                {"kind": type(e).__name__, "message": str(e), "detail": dict(e.detail)}
            ).encode()
        except (OSError, ImportError, sqlite3.Error, SQLAlchemyError) as e:
            return json.dumps(
                {"kind": "Conflict", "message": f"{type(e).__name__}: {e}", "detail": {}}
            ).encode()

    encoded = owner.run_as_user(encoded_result)
    if not encoded:
        why = owner.obstacle() or "the child process exited without a result"
        raise Conflict(
            f"{owner.enters[0]} belongs to user {owner.uid}, and running as that user failed: {why}"
        )
    answer = json.loads(encoded)
    if "ok" in answer:
        return answer["ok"]
    raise getattr(errors, answer["kind"], Conflict)(answer["message"], **answer["detail"])
