"""Where SQLite's file is, how an earlier release's gets there, and who opens it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

from pilotlight.controller.database import sqlite_file
from pilotlight.errors import Conflict, NotFound

UID = 19902


def filled(file: Path) -> sqlite3.Connection:
    """A database in WAL mode with a row in it, open: what it holds is in its log."""
    database = sqlite3.connect(file)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE t (n)")
    database.execute("INSERT INTO t VALUES (7)")
    database.commit()
    return database


def test_the_file_of_an_earlier_release_is_moved_with_all_that_its_log_holds(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    with contextlib.closing(filled(tmp_path / "controller.db")):
        for file in tmp_path.glob("controller.db*"):  # as a controller leaves it that is killed
            (copy / file.name).write_bytes(file.read_bytes())
    assert (copy / "controller.db-wal").stat().st_size > 0
    assert sqlite_file.find_database(copy) == copy / "controller.db"
    for _ in range(2):
        sqlite_file.move_to_own_directory(copy)
        assert sqlite_file.find_database(copy) == copy / "controller/controller.db"
    assert [path.name for path in copy.iterdir()] == ["controller"]
    assert (copy / "controller").stat().st_mode & 0o777 == 0o700
    with contextlib.closing(sqlite3.connect(copy / "controller/controller.db")) as moved:
        assert moved.execute("SELECT n FROM t").fetchall() == [(7,)]


def test_a_file_that_a_process_has_open_is_not_moved(tmp_path: Path) -> None:
    with (
        contextlib.closing(filled(tmp_path / "controller.db")),
        pytest.raises(Conflict, match="cannot be moved"),
    ):
        sqlite_file.move_to_own_directory(tmp_path, timeout_s=0.05)
    assert (tmp_path / "controller.db").exists()
    sqlite_file.move_to_own_directory(tmp_path)
    assert (tmp_path / "controller/controller.db").exists()


def test_a_new_home_has_the_directory_only(tmp_path: Path) -> None:
    sqlite_file.move_to_own_directory(tmp_path)
    assert sqlite_file.find_database(tmp_path) is None
    assert sqlite_file.database_owner(tmp_path) is None, "it is ours"


@pytest.mark.root
def test_a_file_that_is_moved_is_of_whose_the_directory_is(tmp_path: Path) -> None:
    (tmp_path / "controller").mkdir()
    os.chown(tmp_path / "controller", UID, UID)
    filled(tmp_path / "controller.db").close()
    sqlite_file.move_to_own_directory(tmp_path)
    status = sqlite_file.database_path(tmp_path).stat()
    assert (status.st_uid, status.st_gid) == (UID, UID)


@pytest.mark.root
def test_root_opens_nothing_in_a_directory_of_another_user(tmp_path: Path) -> None:
    sqlite_file.move_to_own_directory(tmp_path)
    os.chown(tmp_path / "controller", UID, UID)
    owner = sqlite_file.database_owner(tmp_path)
    assert owner is not None
    assert sqlite_file.run_as_owner(owner, lambda: [os.getuid(), os.getgroups()]) == [UID, []]
    (tmp_path / "secret").write_text("root's")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "controller/controller.db").symlink_to(tmp_path / "secret")
    with pytest.raises(Conflict, match="unable to open database file"):
        sqlite_file.run_as_owner(
            owner,
            lambda: (
                sqlite3.connect(sqlite_file.database_path(tmp_path))
                .execute("SELECT 1 FROM t")
                .fetchall()
            ),
        )

    def refused() -> None:
        raise NotFound("no such thing", hint="make one")

    with pytest.raises(NotFound, match="no such thing") as seen:
        sqlite_file.run_as_owner(owner, refused)
    assert seen.value.detail == {"hint": "make one"}
    with pytest.raises(Conflict, match="belongs to user 19902, and running as that user failed"):
        sqlite_file.run_as_owner(owner, lambda: os._exit(1))
