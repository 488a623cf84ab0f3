"""SQLite's file in <home>, in a directory of its own: who owns that directory is who opens the
file.

`<home>/controller/` holds `controller.db` and what SQLite keeps beside it, and belongs to the
controller, which need not be root (`process_user`). SQLite opens these files by name and follows
links, so root opens none in a directory that another user owns: it has a child process do it that
is this user. Earlier releases had the file in <home> itself."""

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
from snapshotter.process_user import ProcessUser

DIRECTORY = "controller"
NAME = "controller.db"
MOVE_TIMEOUT_S = 10.0
"""How long a move waits for another process that has the file open."""


def directory_of(home: Path) -> Path:
    """Where the file and its log are."""
    return home / DIRECTORY


def file_of(home: Path) -> Path:
    """The file, which need not be there."""
    return home / DIRECTORY / NAME


def found_in(home: Path) -> Path | None:
    """The file as it is there, of an earlier release in <home> itself; None = there is none."""
    return next((file for file in (file_of(home), home / NAME) if file.exists()), None)


def settle(home: Path, *, timeout_s: float = MOVE_TIMEOUT_S) -> None:
    """Make the directory, and move an earlier release's file into it. Raises Conflict where a
    process has that open."""
    directory = directory_of(home)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    old, new = home / NAME, file_of(home)
    if not old.exists() or new.exists():
        return
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        _fold(old, timeout_s)
        status = directory.stat()
        # before: whose the directory is may put another file in its place there
        os.chown(old, status.st_uid, status.st_gid)
        old.rename(new)
        for each in (directory, home):
            descriptor = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.fsync(descriptor)
            os.close(descriptor)


def _fold(file: Path, timeout_s: float) -> None:
    """Bring all of the database into its one file, which no process may have open."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{file}?mode=rw", uri=True, timeout=timeout_s)
        ) as database:
            (mode,) = database.execute("PRAGMA journal_mode=DELETE").fetchone()
            reason = "" if mode == "delete" else f"its log stays in mode {mode}"
    except sqlite3.OperationalError as e:
        if not file.exists():
            raise FileNotFoundError(file) from e
        reason = str(e)
    if reason:
        raise Conflict(
            f"{file} cannot be moved to {file_of(file.parent)}: {reason}",
            hint="Stop what has it open: `pilotlight down`.",
        )


def owner_of(home: Path) -> ProcessUser | None:
    """Who may open the file, where we are root and the directory is another user's; else None: we
    may."""
    if os.geteuid() != 0:
        return None
    try:
        uid = directory_of(home).stat().st_uid
    except FileNotFoundError:
        return None
    return ProcessUser(uid=uid, enters=(directory_of(home),)) if uid else None


def as_owner(owner: ProcessUser | None, work: Callable[[], Any]) -> Any:
    """What `work` returns, which must be a JSON value, done as `owner`. Raises what it raises of
    `pilotlight.errors`; else Conflict."""
    if owner is None:
        return work()

    def told() -> bytes:
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

    said = owner.run_as_user(told)
    if not said:
        why = owner.obstacle() or "the process that was to do it ended without an answer"
        raise Conflict(
            f"{owner.enters[0]} is user {owner.uid}'s, and nothing can be done there as that "
            f"user: {why}"
        )
    answer = json.loads(said)
    if "ok" in answer:
        return answer["ok"]
    raise getattr(errors, answer["kind"], Conflict)(answer["message"], **answer["detail"])
