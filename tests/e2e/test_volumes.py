"""Volumes on a real platform: mounted, written, committed and read again."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import RequireOrSkip
from tests.e2e.frozen import Frozen, why_no_criu
from tests.e2e.harness import PlatformUnderTest, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="slots have mounts of their own as root only"),
]

APP = """
import os
from pathlib import Path

import pilotlight

app = pilotlight.App("stored")
data = pilotlight.Volume.from_name("data", create_if_missing=True)


@app.function(volumes={"/data": data}, scaledown_window=300)
def write(name: str, text: str, commit: bool = True) -> str:
    path = Path("/data") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if commit:
        data.commit()
    return text


@app.function(volumes={"/mnt/shared": data}, scaledown_window=300)
def read(name: str, reload: bool = False) -> str | None:
    if reload:
        data.reload()
    path = Path("/mnt/shared") / name
    return path.read_text() if path.exists() else None


@app.function(volumes={"/data": data})
def spoil(kind: str) -> str:
    path = "/data/spoiled"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "absolute":
        os.symlink("/etc/passwd", path)
    elif kind == "outside":
        os.symlink("../../etc/shadow", path)
    try:
        data.commit()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    finally:
        os.unlink(path)
    return "committed"


def fact() -> str:
    path = Path("/data/fact")
    return path.read_text() if path.exists() else ""


@app.cls(volumes={"/data": data})
class Closed:
    @pilotlight.enter()
    def load(self) -> None:
        self.before = fact()

    @pilotlight.method(example=[1])
    def same(self, n: int) -> int:
        return n

    @pilotlight.method()
    def facts(self) -> list[str]:
        return [self.before, fact()]
"""


@pytest.fixture(scope="module", name="stored")
def _stored(
    mortal_platform: PlatformUnderTest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlatformUnderTest]:
    folder = tmp_path_factory.mktemp("stored")
    (folder / "stored_app.py").write_text(APP)
    mortal_platform.cli("deploy", str(folder / "stored_app.py"), "--no-wait")
    yield mortal_platform
    mortal_platform.cli("app", "delete", "stored", "--yes")


def test_committed_files_are_read_by_other_functions_and_by_clients(
    stored: PlatformUnderTest,
) -> None:
    assert stored.result("stored/write", {"name": "a/b.txt", "text": "one"}) == "one"
    assert stored.result("stored/read", {"name": "a/b.txt"}) == "one"
    with stored.client() as client:
        assert b"".join(client.read_volume_file("data", "a/b.txt")) == b"one"
        assert [e.path for e in client.list_volume_files("data", recursive=True)] == [
            "a",
            "a/b.txt",
        ]


def test_what_a_client_puts_is_there_after_reload(stored: PlatformUnderTest) -> None:
    stored.result("stored/read", {"name": "put.txt"})
    with stored.client() as client:
        client.put_volume_files("data", {"put.txt": b"from outside"})
    assert stored.result("stored/read", {"name": "put.txt", "reload": True}) == "from outside"


def test_what_a_volume_cannot_have_is_refused_by_name(stored: PlatformUnderTest) -> None:
    assert "spoiled is a named pipe" in stored.result("stored/spoil", {"kind": "pipe"})
    assert "must be relative" in stored.result("stored/spoil", {"kind": "absolute"})
    assert "leads out of the volume" in stored.result("stored/spoil", {"kind": "outside"})
    with stored.client() as client:
        assert "spoiled" not in {e.path for e in client.list_volume_files("data")}


def test_the_command_line_puts_lists_gets_and_removes(
    stored: PlatformUnderTest, tmp_path: Path
) -> None:
    (tmp_path / "corpus" / "sub").mkdir(parents=True)
    (tmp_path / "corpus" / "a.txt").write_text("a")
    (tmp_path / "corpus" / "sub" / "b.bin").write_bytes(bytes(range(256)))
    assert "volume mine" in stored.cli("volume", "create", "mine").stdout
    stored.cli("volume", "put", "mine", str(tmp_path / "corpus"), "/c")
    again = stored.cli("volume", "put", "mine", str(tmp_path / "corpus"), "/c", check=False)
    assert (again.returncode, "has 'c/a.txt' already" in again.stderr) == (1, True)
    assert "--force" in again.stderr
    stored.cli("volume", "put", "mine", str(tmp_path / "corpus" / "a.txt"), "/c/a.txt", "--force")
    rows = json.loads(stored.cli("volume", "ls", "mine", "/c", "-r", "--json").stdout)
    assert [row["path"] for row in rows] == ["c/a.txt", "c/sub", "c/sub/b.bin"]
    stored.cli("volume", "get", "mine", "/c", str(tmp_path / "back"))
    assert (tmp_path / "back" / "sub" / "b.bin").read_bytes() == bytes(range(256))
    assert stored.cli("volume", "get", "mine", "c/a.txt", "-").stdout == "a"
    stored.cli("volume", "rm", "mine", "/c", "-r", "--yes")
    assert json.loads(stored.cli("volume", "ls", "mine", "--json").stdout) == []
    stored.cli("volume", "delete", "mine", "--yes")
    assert "mine" not in stored.cli("volume", "list").stdout


def test_kill_9_of_agent_and_controller_loses_nothing_that_was_committed(
    stored: PlatformUnderTest,
) -> None:
    done: list[int] = []
    stop = threading.Event()

    def write() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            body = {"name": f"n/{number}", "text": str(number)}
            if stored.post("stored/write", body).status_code == 200:
                done.append(number)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        for process, pause_s in (("snapshotter", 0.05), ("controller", 0.1), ("snapshotter", 0.2)):
            wait_for(partial(_has, done, len(done) + 2), "two commits")
            time.sleep(pause_s)  # into the next one
            stored.wait_restarted(process, stored.kill(process))
        wait_for(partial(_has, done, len(done) + 1), "a commit afterwards")
        stop.set()
        writing.result()
    with stored.client() as client:
        found = {entry.path for entry in client.list_volume_files("data", "n")}
        assert {f"n/{number}" for number in done} <= found
        for number in done:
            content = b"".join(client.read_volume_file("data", f"n/{number}"))
            assert content == str(number).encode()


def _has(done: list[int], least: int) -> bool:
    return len(done) >= least


def test_a_restored_instance_sees_the_volume_as_it_is(
    stored: PlatformUnderTest, require_or_skip: RequireOrSkip
) -> None:
    if (why := why_no_criu()) is not None:
        require_or_skip(why)
    frozen = Frozen(stored, "stored")
    assert frozen.call("Closed.facts").json() == ["", ""]
    frozen.wait_ready("Closed")
    stored.result("stored/write", {"name": "fact", "text": "new"})
    assert frozen.restored("Closed.facts") == ["", "new"]


def test_a_deleted_volume_stays_mounted_and_cannot_be_committed(
    stored: PlatformUnderTest,
) -> None:
    with stored.client() as client:
        client.create_volume("data")
        stored.result("stored/write", {"name": "x", "text": "kept", "commit": False})
        client.delete_volume("data")
        answer = stored.post("stored/write", {"name": "x", "text": "more"})
        assert "there is no volume 'data'" in answer.text
        assert stored.result("stored/read", {"name": "x"}) == "more"
        client.create_volume("data")
        assert list(client.list_volume_files("data")) == []
