"""`pilotlight weights …` against a platform in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.fake_platform import API_KEY, FakePlatform
from tests.fakes.shell import Typist


class Shell(Typist):
    """Types commands in a directory that has a model."""

    first = ("weights",)

    def __init__(self, platform: FakePlatform, home: Path) -> None:
        self.platform = platform
        self.home = home
        self.model = home / "minilm"
        (self.model / "onnx").mkdir(parents=True)
        (self.model / "config.json").write_text("{}")
        (self.model / "onnx" / "model.bin").write_bytes(os.urandom(5000))
        self.environ = {
            "PILOTLIGHT_URL": platform.url,
            "PILOTLIGHT_API_KEY": API_KEY,
            "HOME": str(home),
            "NO_COLOR": "1",
        }
        self.environ["XDG_CACHE_HOME"] = str(home / "cache")

    def environment(self, key: str | None) -> dict[str, str]:
        return self.environ


@pytest.fixture(name="shell")
def _shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.chdir(tmp_path)
    with FakePlatform() as platform:
        yield Shell(platform, tmp_path)


def test_push_sends_a_directory_names_it_and_says_how_to_use_it(shell: Shell) -> None:
    done = shell.run("push", "minilm")

    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "minilm: 4.9 KiB in 2 files, 5.2 KiB uploaded",
        "use them with pilotlight.Weights.named('minilm')",
    ]
    again = shell.json("push", str(shell.model), "--name", "second")
    assert (again["name"], again["source"], again["uploaded_bytes"]) == (
        "second",
        str(shell.model),
        0,
    )


def test_the_working_directory_itself_can_be_pushed(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shell.model)
    pushed = shell.json("push", ".")
    assert (pushed["name"], pushed["files"], pushed["source"]) == ("minilm", 2, str(shell.model))


def test_only_the_files_that_are_wanted_are_pushed(shell: Shell) -> None:
    (shell.model / "notes.md").write_text("not for the platform")
    assert shell.json("push", "minilm", "--include", "*.md")["files"] == 1
    done = shell.run("push", "minilm", "--include", "*.nothing")
    assert (done.exit_code, "*.nothing" in done.stderr) == (1, True)


@pytest.mark.parametrize("source", ["nothing-here", "gs://bucket/x"])
def test_a_source_that_cannot_be_read_is_refused_in_two_lines(shell: Shell, source: str) -> None:
    done = shell.run("push", source)
    assert (done.exit_code, len(done.stderr.strip().splitlines())) == (1, 2)
    assert shell.platform.weights.rows == {}


@pytest.mark.parametrize(
    "words, said",
    [(("--name", "no good"), "--name"), (("-e", "nowhere"), "environment create nowhere")],
)
def test_what_would_fail_after_the_upload_is_said_before_it(
    shell: Shell, words: tuple[str, str], said: str
) -> None:
    done = shell.run("push", "minilm", *words)
    assert (done.exit_code, said in done.output) == (1, True)
    assert shell.platform.blobs == {}


def test_the_list_shows_sizes_and_places(shell: Shell) -> None:
    assert "weights push" in shell.run("list").stdout
    shell.run("push", "minilm")
    header, line = shell.run("list").stdout.splitlines()
    columns = ["weights", "size", "files", "where", "GPU", "instances", "source", "changed"]
    assert header.split() == columns
    assert line.split()[:8] == ["minilm", "4.9", "KiB", "2", "origin", "no", "GPU", "0"]
    shell.run("pin", "minilm")
    assert shell.run("list").stdout.splitlines()[1].split()[4:8] == ["nvme", "no", "GPU", "yes"]
    assert [row["name"] for row in shell.json("list")] == ["minilm"]


def test_show_has_the_files(shell: Shell) -> None:
    shell.run("push", "minilm")
    shell.run("prefetch", "minilm")
    out = shell.run("show", "minilm").stdout
    assert "on its disk, mapped by 0 instances; a start would wait 250 ms for it" in out
    assert "onnx/model.bin" in out
    assert [row["path"] for row in shell.json("show", "minilm")["listing"]] == [
        "config.json",
        "onnx/model.bin",
    ]
    missing = shell.run("show", "nope")
    assert (missing.exit_code, "no weights 'nope'" in missing.output) == (1, True)


def test_verify_ends_with_1_when_something_is_damaged(shell: Shell) -> None:
    shell.run("push", "minilm")
    assert "is not on the node" in shell.run("verify", "minilm").stdout
    shell.run("prefetch", "minilm")
    assert "every byte on the node matches its hashes" in shell.run("verify", "minilm").stdout
    shell.platform.weights.corrupt = ["onnx/model.bin"]
    done = shell.run("verify", "minilm")
    assert (done.exit_code, "fetched again when needed: onnx/model.bin" in done.stdout) == (1, True)
    assert shell.json("verify", "minilm", status=1) == {
        "name": "minilm",
        "is_here": True,
        "corrupt": ["onnx/model.bin"],
    }


def test_prefetch_pin_and_unpin(shell: Shell) -> None:
    shell.run("push", "minilm")
    assert "minilm is on the node: on its disk" in shell.run("prefetch", "minilm").stdout
    assert shell.json("pin", "minilm")["is_pinned"] is True
    assert "is pinned on the node" in shell.run("pin", "minilm").stdout
    assert shell.json("unpin", "minilm")["is_pinned"] is False


def test_delete_asks_and_is_refused_while_in_use(shell: Shell) -> None:
    shell.run("push", "minilm")
    assert "Pass --yes" in shell.run("delete", "minilm").output
    shell.platform.weights.used_by = ["search/embed"]
    assert "search/embed" in shell.run("delete", "minilm", "--yes").output
    shell.platform.weights.used_by = []
    assert shell.json("delete", "minilm", "--yes") == {"name": "minilm", "deleted": True}
    assert shell.json("list") == []


def test_pull_brings_the_same_files_by_name_and_by_digest(shell: Shell) -> None:
    manifest = shell.json("push", "minilm")["manifest"]
    for which in ("minilm", manifest):
        target = shell.home / which[:8] / "copy"
        pulled = shell.json("pull", which, str(target))
        assert (pulled["manifest"], pulled["files"], pulled["fetched_bytes"]) == (manifest, 2, 5002)
        assert (target / "onnx" / "model.bin").read_bytes() == (
            shell.model / "onnx" / "model.bin"
        ).read_bytes()


def test_pull_into_a_directory_that_holds_something_asks(shell: Shell) -> None:
    shell.run("push", "minilm")
    (shell.home / "full").mkdir()
    (shell.home / "full" / "mine.txt").write_text("mine")
    refused = shell.run("pull", "minilm", "full")
    assert (
        refused.exit_code,
        "is not empty" in refused.output,
        "Pass --yes" in refused.output,
    ) == (1, True, True)
    assert (
        "4.9 KiB in 2 files, verified (4.9 KiB fetched)"
        in shell.run("pull", "minilm", "full", "--yes").stdout
    )
    assert (shell.home / "full" / "mine.txt").read_text() == "mine"
    assert "nothing to fetch" in shell.run("pull", "minilm", "full", "--yes").stdout


def test_a_file_in_the_way_of_a_pull_is_named(shell: Shell) -> None:
    shell.run("push", "minilm")
    (shell.home / "file").write_text("x")
    done = shell.run("pull", "minilm", "file")
    assert (done.exit_code, "is not a directory" in done.output) == (1, True)
