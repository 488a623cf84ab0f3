"""A process that root started goes on without root, and reaches what it needs and no more."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pilotlight.core.settings import PlatformSettings, SettingsInvalid
from snapshotter.linux.process_user import (
    ProcessUser,
    chown_to_root,
    code_directories,
    give_file_to_user,
)
from snapshotter.settings import SnapshotterSettings
from tests.fakes.as_user import as_user, status_of

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("installed_modules_only")]
UID = 19901
ROOT = Path(__file__).parents[3]
_PROGRAM = """
import json, os, subprocess, sys
sys.path[:0] = {path!r}
from pathlib import Path
from snapshotter.linux.process_user import ProcessUser
from tests.fakes.as_user import status_of
user = ProcessUser(uid={uid}, owns=(Path({own!r}),), enters=(Path({run!r}),))
why = user.obstacle()
if not why:
    user.become()
def tried(action):
    try:
        return str(action())
    except OSError as e:
        return type(e).__name__
import wave  # a module that was not loaded before
said = {{
    "why": why, "status": status_of(os.getpid()), "home": tried(lambda: os.listdir({home!r})),
    "key": tried(lambda: open({home!r} + "/platform.key").read()), "own": tried(lambda: Path({own!r}, "new").write_text("x")),
    "old": tried(lambda: Path({own!r}, "old").read_text()), "again": tried(lambda: os.setuid(0)),
    "child": subprocess.run([sys.executable, "-c", "import sqlite3; print(1)"], capture_output=True, text=True).stdout.strip(),
    "socket": os.path.exists({run!r} + "/there"), "run": tried(lambda: os.listdir({run!r})),
}}
print(json.dumps(said))
"""


@pytest.fixture
def home(short_tmp: Path) -> Path:
    """Like a platform's: closed to others, with a key, a directory of the process's own and one of
    sockets."""
    home = short_tmp / "h"
    (home / "activator" / "a-0").mkdir(parents=True)
    (home / "run").mkdir()
    (home / "platform.key").write_text("secret")
    (home / "activator" / "a-0" / "old").write_text("kept")
    (home / "run" / "there").touch()
    for directory in (short_tmp, home, home / "activator", home / "activator" / "a-0"):
        directory.chmod(0o700)
    os.chown(home / "run", 0, UID)
    (home / "run").chmod(0o710)
    return home


def run(home: Path) -> dict[str, object]:
    """What a process says that has given up root, if it could."""
    own, directory = str(home / "activator" / "a-0"), str(home / "run")
    program = _PROGRAM.format(
        path=[str(ROOT), str(ROOT / "functions")], uid=UID, own=own, run=directory, home=str(home)
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, object] = json.loads(done.stdout)
    return said


def test_it_has_nothing_of_root_left_and_sees_its_own_directories_only(home: Path) -> None:
    said = run(home)
    status = said.pop("status")
    assert isinstance(status, dict)
    assert status["Uid"].split() == status["Gid"].split() == [str(UID)] * 4
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {
        "0" * 16
    }
    assert (status["NoNewPrivs"], status["Groups"]) == ("1", "")
    assert said == {
        "why": "",
        "home": "PermissionError",
        "key": "FileNotFoundError",
        "own": "1",
        "old": "kept",
        "again": "PermissionError",
        "child": "1",
        "socket": True,
        "run": "PermissionError",
    }
    assert (home / "activator" / "a-0" / "new").stat().st_uid == UID
    assert (home / "platform.key").read_text() == "secret"


def test_code_that_it_cannot_read_is_an_obstacle_with_a_name(home: Path, tmp_path: Path) -> None:
    module = tmp_path / "closed.py"
    module.touch(mode=0o600)
    sys.modules["closed"] = type(sys)("closed")
    sys.modules["closed"].__file__ = str(module)
    try:
        why = ProcessUser(uid=UID, owns=(home / "activator" / "a-0",)).obstacle()
    finally:
        del sys.modules["closed"]
    assert why.startswith(f"uid {UID} cannot read {module}: install the platform with umask 022")
    assert (home / "activator" / "a-0").stat().st_uid == 0, "nothing changed hands"


def test_one_whose_trial_is_killed_does_not_keep_root_because_of_that(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that the same user left behind can kill the trial, and could so choose that its
    successor is root."""
    monkeypatch.setattr(
        ProcessUser, "_first_problem", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    )
    with pytest.raises(OSError, match=f"the process that tested uid {UID} was killed"):
        ProcessUser(uid=UID, owns=(home / "activator" / "a-0",)).obstacle()


def test_a_file_that_it_must_open_again_is_an_obstacle_where_it_may_not(home: Path) -> None:
    key = home / "tls.key"
    key.touch(mode=0o600)
    assert (
        ProcessUser(uid=UID, uses=(key,))
        .obstacle()
        .startswith(f"uid {UID} cannot use {key}: give group {UID} access")
    )


def test_what_is_in_a_directory_changes_hands_before_the_directory_does(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    top = tmp_path / "top"
    (top / "deep").mkdir(parents=True)
    (top / "deep" / "file").touch()
    (top / "link").symlink_to(tmp_path / "elsewhere")
    give_file_to_user(top, UID)
    owners = {path.name: path.lstat().st_uid for path in (top, *top.rglob("*"))}
    assert owners == {"top": UID, "deep": UID, "file": UID, "link": UID}
    assert (tmp_path / "elsewhere").stat().st_uid == 0, "no link is followed"
    (top / "made by root").touch()
    give_file_to_user(top, UID)
    assert (top / "made by root").stat().st_uid == 0, (
        "root changes nothing in a directory that another user may change"
    )
    give_file_to_user(top, 0)
    assert {path.lstat().st_uid for path in (top, *top.rglob("*"))} == {0}


def test_a_file_with_another_name_does_not_change_hands(tmp_path: Path) -> None:
    (tmp_path / "shadow").touch()
    (tmp_path / "top").mkdir()
    os.link(tmp_path / "shadow", tmp_path / "top" / "mine")
    with pytest.raises(OSError, match="has several hard links"):
        give_file_to_user(tmp_path / "top", UID)
    assert (
        "top/mine has several hard links"
        in ProcessUser(uid=UID, owns=(tmp_path / "top",)).obstacle()
    )
    assert (tmp_path / "shadow").stat().st_uid == 0


def test_it_still_ends_with_its_parent(home: Path) -> None:
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:  # a supervisor, whose child gives up root, and which dies then
        grandchild = os.fork()
        if grandchild == 0:
            import ctypes

            ctypes.CDLL(None).prctl(1, signal.SIGTERM)
            ProcessUser(uid=UID, owns=(home / "activator" / "a-0",)).become()
            os.write(writable, b"x")
            signal.pause()
            os._exit(0)
        os.close(writable)
        os.read(readable, 1)
        os._exit(0)
    os.close(writable)
    os.waitpid(child, 0)
    with os.fdopen(readable, "rb") as ends:
        assert ends.read() == b"", "the pipe ends with the last process that holds it"


def test_the_interpreter_is_among_the_directories_of_code() -> None:
    found = code_directories()
    assert Path(sys.prefix) in found
    assert any(Path(os.__file__).is_relative_to(directory) for directory in found)


@pytest.mark.parametrize("uid", [0, -1, 65534])
def test_a_uid_that_is_none_is_refused_by_name(uid: int) -> None:
    with pytest.raises(ValueError, match=f"activator_uid = {uid}: must be 1 to 65533, or null"):
        PlatformSettings(activator_uid=uid)
    with pytest.raises(
        ValueError,
        match=f"controller_uid = {uid}: must be 1 to 65533, or null: then the controller runs as root",
    ):
        PlatformSettings(controller_uid=uid)


def test_a_uid_of_a_tenant_is_refused_by_name() -> None:
    SnapshotterSettings().check_uids(PlatformSettings())
    SnapshotterSettings(uid_base=10000).check_uids(
        PlatformSettings(activator_uid=None, controller_uid=None)
    )
    with pytest.raises(
        SettingsInvalid,
        match=r"activator_uid = 20000: tenants' uids start at snapshotter\.uid_base = 20000",
    ):
        SnapshotterSettings().check_uids(PlatformSettings(activator_uid=20000))
    with pytest.raises(
        SettingsInvalid,
        match=r"controller_uid = 20001: tenants' uids start at snapshotter\.uid_base = 20000",
    ):
        SnapshotterSettings().check_uids(PlatformSettings(controller_uid=20001))


def test_a_uid_of_two_processes_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"controller_uid = 19901: must differ from activator_uid"):
        PlatformSettings(controller_uid=19901)
    with pytest.raises(ValueError, match=r"activator_uid = 19902: must differ from controller_uid"):
        PlatformSettings(activator_uid=19902)
    PlatformSettings(activator_uid=None, controller_uid=None)


def test_the_users_of_tests_are_what_they_seem() -> None:
    assert (
        as_user(UID, lambda: f"{os.getuid()} {status_of(os.getpid())['CapEff']}")
        == f"{UID} {'0' * 16}"
    )
    assert (
        stat.S_IMODE(Path("/root").stat().st_mode) & 0o7
        or as_user(UID, lambda: str(os.listdir("/root"))) == "PermissionError"
    )


def test_a_file_that_only_root_sees_is_an_obstacle_where_its_directory_is_covered(
    home: Path,
) -> None:
    """Beside a directory that is shown, in one that is covered by an empty one."""
    (home / "tls.key").touch(mode=0o644)
    user = ProcessUser(uid=UID, owns=(home / "activator" / "a-0",), uses=(home / "tls.key",))
    assert user.obstacle().startswith(f"uid {UID} cannot use {home}/tls.key")


def test_a_directory_that_it_must_write_in_is_an_obstacle_where_it_may_not(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    (blobs / "aa").mkdir(parents=True)
    blobs.chmod(0o777)
    user = ProcessUser(uid=UID, writes=(blobs,))
    assert (
        user.obstacle()
        == f"uid {UID} cannot write in {blobs}/aa: give it to that user (chown -R {UID}:{UID} "
        f"{blobs})"
    )
    os.chown(blobs / "aa", UID, UID)
    assert user.obstacle() == ""


def test_work_is_done_by_a_child_that_is_the_user(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    os.chown(own, UID, UID)
    user = ProcessUser(uid=UID, enters=(own,))
    (tmp_path / "secret").write_text("root's")
    (own / "link").symlink_to(tmp_path / "secret")

    def written() -> bytes:
        return f"{os.getuid()} {(own / 'new').write_text('x')}".encode()

    assert user.run_as_user(written) == f"{UID} 1".encode()
    assert user.run_as_user((own / "link").read_bytes) == b"", (
        "it follows a link no further than its user does"
    )
    assert os.getuid() == 0


def test_root_takes_nothing_back_that_could_lead_it_elsewhere(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "deep").mkdir(parents=True)
    (top / "deep/file").touch()
    (top / "deep/controller.db-wal").symlink_to("/etc/passwd")
    give_file_to_user(top, UID)
    for _ in range(2):  # also the next time, when some of it was done
        with pytest.raises(
            OSError,
            match=r"deep/controller\.db-wal \(lrwxrwxrwx\) was not made by the platform",
        ):
            chown_to_root(top)
        assert top.stat().st_uid == 0
    (top / "deep/controller.db-wal").unlink()
    chown_to_root(top)
    assert {(path.lstat().st_uid, path.lstat().st_gid) for path in (top, *top.rglob("*"))} == {
        (0, 0)
    }
