"""`pilotlight snapshot`, `template`, `instance stop --all` and `deploy`, against a platform in this
process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from pilotlight.errors import StartFailed
from tests.fakes.fake_platform import API_KEY, FakePlatform
from tests.fakes.shell import Typist

SOURCE = (
    "import pilotlight\napp = pilotlight.App('search')\n\n@app.function()\ndef embed(text: "
    "str) -> str:\n    return text\n"
)


def snapshot(name: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "id": name,
        "revision": "f-1@v3-abcdef",
        "state": "READY",
        "in_place": False,
        "pages": "lazy",
        "image_bytes": 61_000_000,
        "heap_bytes": 0,
        "heap_why": "",
        "reason": "",
        "phases_ms": {"dump": 300.0},
        "cold_ms": 5400.0,
        "restore_ms": 120.0,
        "created_at": 1.0,
        "last_used_at": 0.0,
        "restores": 3,
        "remote": True,
        "node": "node-1",
        "where": "disk, store",
        "identity": {"kernel": "6.1"},
        "labels": {"app": "search", "function": "embed"},
    }
    return {**values, **changes}


class Shell(Typist):
    """Types commands."""

    def __init__(self, platform: FakePlatform, home: Path) -> None:
        self.platform = platform
        self.home = home
        self.environ = {
            "PILOTLIGHT_URL": platform.url,
            "PILOTLIGHT_API_KEY": API_KEY,
            "HOME": str(home),
            "NO_COLOR": "1",
        }

    def environment(self, key: str | None) -> dict[str, str]:
        return self.environ

    def deploy(self, *words: str) -> Result:
        (self.home / "searching.py").write_text(SOURCE)
        return self.run("deploy", str(self.home / "searching.py"), *words)


@pytest.fixture(name="shell")
def _shell(tmp_path: Path) -> Iterator[Shell]:
    with FakePlatform() as platform:
        shell = Shell(platform, tmp_path)
        assert shell.deploy("--no-wait").exit_code == 0
        platform.snapshots = [
            snapshot("sn-11aa"),
            snapshot("sn-12bb", state="QUARANTINED", reason="three restores failed", in_place=True),
        ]
        yield shell


def test_deploy_waits_for_the_proof_and_prints_cold_restore_and_fork(shell: Shell) -> None:
    shell.platform.warmup_report = {
        "template": {"phases_ms": {"boot": 5400.0}, "threads": []},
        "start_kind": "FORK",
        "start_ms": 21.0,
        "snapshot": snapshot("sn-1"),
    }
    assert "cold 5.40 s → restore 120 ms → fork 21 ms; image 61 MB" in shell.deploy().stdout
    (proof,) = json.loads(shell.deploy("--json").stdout)["proofs"]
    assert (proof["restore_ms"], proof["snapshot"]["id"]) == (120.0, "sn-1")


def test_a_deploy_says_which_functions_do_not_start_and_starts_the_others(shell: Shell) -> None:
    file = shell.home / "two.py"
    file.write_text(SOURCE + "\n@app.function()\ndef rank(n: int) -> int:\n    return n\n")
    shell.platform.warmup_report = {"start_kind": "COLD", "start_ms": 5400.0}
    hint = "Remove `gpu=`."
    error = StartFailed("search/embed cannot start on this node: no GPU", hint=hint)
    shell.platform.start_errors["embed"] = error
    done = shell.run("deploy", str(file))
    first, failed, rank, *_ = done.stdout.splitlines()
    assert done.exit_code == 1
    assert re.fullmatch(r"search version \d+ is deployed in main, but embed does not start", first)
    assert failed.split()[0] == "embed"
    assert failed.endswith("  does not start")
    assert rank.split()[0] == "rank"
    assert done.stderr.splitlines()[-2:] == [f"error {error}", f"try   {hint}"]
    assert done.output.count(str(error)) == 1

    said = shell.json("deploy", str(file), status=1)
    assert [proof["function"] for proof in said["proofs"]] == ["rank"]
    assert said["failed"] == [{"function": "embed", "type": "start-failed", "error": str(error)}]
    shell.platform.start_errors.clear()
    assert shell.json("deploy", str(file))["failed"] == []


def test_a_refusal_is_printed_with_its_line_and_the_deploy_is_done(shell: Shell) -> None:
    reason = {
        "kind": "connection",
        "fd": 7,
        "what": "TCP",
        "where": "app.py:12",
        "message": "a connection to 10.0.0.2:443 is open",
    }
    shell.platform.warmup_report = {
        "start_kind": "COLD",
        "start_ms": 100.0,
        "snapshot": {"refused": [reason]},
    }
    done = shell.deploy()
    assert done.exit_code == 0
    assert "no snapshot: a connection to 10.0.0.2:443 is open (app.py:12)" in done.stdout


def test_no_wait_asks_for_no_proof(shell: Shell) -> None:
    shell.deploy("--no-wait")
    assert not [asked for asked in shell.platform.asked if "warmup" in asked]


def test_the_list_shows_state_kind_and_times(shell: Shell) -> None:
    out = shell.run("snapshot", "list").stdout
    first, second = out.splitlines()[1:]
    for word in (
        "sn-11aa",
        "search/embed",
        "v3-abcdef",
        "ready",
        "fork",
        "lazy",
        "58.2 MiB",
        "120 ms",
        "5.40 s",
        "node-1",
        "disk, store",
    ):
        assert word in first
    assert "quarantined" in second
    assert "server" in second
    assert "three restores failed" in second
    assert [row["id"] for row in shell.json("snapshot", "list", "search")] == ["sn-11aa", "sn-12bb"]
    assert shell.json("snapshot", "list", "other") == []
    assert "pilotlight doctor" in shell.run("snapshot", "list", "other").stdout


def test_one_is_shown_by_the_first_characters_of_its_id(shell: Shell) -> None:
    out = shell.run("snapshot", "show", "sn-12").stdout
    assert "quarantined: three restores failed" in out
    assert "kernel" in out
    assert "matches 2 ids" in shell.run("snapshot", "show", "sn-1").output
    assert "snapshot list" in shell.run("snapshot", "show", "sn-9").output


def test_proving_ends_with_1_when_it_stays_in_quarantine(shell: Shell) -> None:
    done = shell.run("snapshot", "prove", "sn-12")
    assert (done.exit_code, "is proven" in done.stdout) == (0, True)
    shell.platform.snapshots[0] |= {"state": "QUARANTINED", "reason": "corrupt"}
    failed = shell.run("snapshot", "prove", "sn-11")
    assert (failed.exit_code, "sn-11aa is quarantined: corrupt" in failed.stdout) == (1, True)


def test_a_snapshot_of_several_nodes_is_one_and_is_quarantined_with_a_reason(shell: Shell) -> None:
    shell.platform.snapshots.append(snapshot("sn-11aa", node="node-2", where="disk"))
    rows = shell.json("snapshot", "list")
    assert [
        (row["node"], row["where"], row["state"]) for row in rows if row["id"] == "sn-11aa"
    ] == [
        ("node-1", "disk, store", "READY"),
        ("node-2", "disk", "READY"),
    ]
    done = shell.run("snapshot", "quarantine", "sn-11", "--reason", "it leaks")
    assert done.exit_code == 0
    assert "sn-11aa is quarantined: by a key: it leaks" in done.stdout


def test_switching_off_asks_deletes_and_is_undone_by_enable(shell: Shell) -> None:
    assert "Pass --yes" in shell.run("snapshot", "disable", "search/embed").output
    assert len(shell.platform.snapshots) == 2
    assert "2 deleted" in shell.run("snapshot", "disable", "search/embed", "--yes").stdout
    assert shell.platform.snapshots_off == {("main", "search", "embed")}
    assert "off" in shell.run("app", "show", "search").stdout
    assert shell.json("snapshot", "enable", "search/embed")["enabled"] is True
    assert shell.platform.snapshots_off == set()
    assert "off" not in shell.run("app", "show", "search").stdout
    assert "not the address of a function" in shell.run("snapshot", "enable", "search").output


def test_one_or_all_of_a_function_are_deleted(shell: Shell) -> None:
    assert shell.run("snapshot", "delete", "sn-11").exit_code == 1
    assert shell.json("snapshot", "delete", "sn-11", "--yes") == {"deleted": 1}
    assert shell.json("snapshot", "delete", "search/embed", "--yes") == {"deleted": 1}
    assert shell.platform.snapshots == []


def test_back_to_nothing_in_memory(shell: Shell) -> None:
    labels = {"app": "search", "function": "embed"}
    shell.platform.templates = [
        {"revision": "f-1@v1-a", "labels": labels},
        {"revision": "f-2@v1-a", "labels": labels | {"app": "other"}},
    ]
    shell.platform.instances = [{"id": "i-1"}, {"id": "i-2"}]
    assert shell.json("instance", "stop", "--all") == {"instances": ["i-1", "i-2"], "stopped": True}
    assert shell.run("instance", "stop").exit_code == 1
    assert "search/embed" in shell.run("template", "list").stdout
    assert shell.json("template", "drop", "search/embed") == {"dropped": 1}
    assert [t["revision"] for t in shell.platform.templates] == ["f-2@v1-a"]


def test_logs_of_a_name_that_never_was_are_an_error(shell: Shell) -> None:
    done = shell.run("logs", "serach")
    assert (done.exit_code, "serach" in done.output) == (1, True)
