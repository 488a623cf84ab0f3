"""`pilotlight run`, `app.run()` and `deploy`: what stderr shows while they wait, what stdout has."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from pilotlight.cli.commands.apps.deploy_progress import load_user_app
from pilotlight.cli.main import build
from pilotlight.client import sessions
from pilotlight.errors import TooManyRequests
from pilotlight.packaging.progress import IMAGE, NOTICE, UPLOAD, ProgressEvent
from pilotlight.packaging.progress_output import ProgressOutput
from tests.fakes.fake_platform import API_KEY, DeployedApp, FakePlatform

SOURCE = """
import pilotlight

app = pilotlight.App("shop", image=pilotlight.Image.python("3.11").pip_install("rich"))

@app.function()
def greet(name: str) -> str:
    return f"Hello, {name}!"

@app.function()
def fail() -> None:
    raise ValueError("no")

@app.function()
def count(upto: int):
    yield from range(upto)
"""
PATIENCE_S = 20.0


class Screen(io.StringIO):
    """Stderr that knows what it has shown, as a terminal or a pipe."""

    def __init__(self, *, is_terminal: bool = False) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self._changed = threading.Condition()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        with self._changed:
            self._changed.notify_all()
            return super().write(text)

    def wait_for(self, text: str) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: text in self.getvalue(), PATIENCE_S)

    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


@pytest.fixture(name="platform")
def _platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePlatform]:
    with FakePlatform() as fake:
        monkeypatch.setenv("PILOTLIGHT_URL", fake.url)
        monkeypatch.setenv("PILOTLIGHT_API_KEY", API_KEY)
        monkeypatch.setenv("TERM", "xterm")
        yield fake
        sessions.close()


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / f"shop_{uuid.uuid4().hex[:8]}.py"
    path.write_text(SOURCE)
    yield str(path)
    sys.modules.pop(path.stem, None)


def run(screen: Screen, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "stderr", screen)
    command = typer.main.get_command(build())
    return int(command(list(words), prog_name="pilotlight", standalone_mode=False) or 0)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_output_of_the_function_is_shown_while_it_runs(
    *,
    platform: FakePlatform,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
) -> None:
    screen = Screen(is_terminal=is_terminal)

    def speak() -> None:
        platform.write_log("one")
        assert screen.wait_for("one"), "nothing was shown while the function ran"
        platform.write_log("two \x1b[2J!", stream="stderr")

    platform.during_calls = speak

    assert run(screen, monkeypatch, "run", f"{file}::greet", "--name", "Ada") == 0
    assert capsys.readouterr().out == "Hello, Ada!\n"
    shown = screen.getvalue()
    assert (shown.count("one"), shown.count("two")) == (1, 1)
    assert "\x1b[2J" not in shown
    if is_terminal:
        assert "shop/greet: calling" in shown
        back = shown.rpartition("\x1b[?25l")[2]
        assert "\x1b[?25h" in back  # the cursor
    else:
        name = screen.lines()[3].split()[1]
        size = screen.lines()[1]
        assert re.fullmatch(r"upload: \d KiB", size)
        assert screen.lines() == [
            "packaging shop",
            size,
            "image: pip",
            f"deploying {name} to main",
            "shop/greet: importing, entering, warming up",
            "shop/greet: starting an instance",
            "shop/greet: making and proving a snapshot",
            "shop/greet: calling",
            "one",
            "two !",
        ]
    assert not platform.apps


def test_without_colours_none_are_written(
    platform: FakePlatform, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    platform.during_calls = lambda: platform.write_log("\x1b[31mred\x1b[0m")
    screen = Screen(is_terminal=True)
    run(screen, monkeypatch, "run", f"{file}::greet", "--name", "Ada")
    assert "red" in screen.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*m", screen.getvalue().replace("\x1b[0m", ""))


def test_json_keeps_stdout_to_the_result_and_stderr_to_objects(
    platform: FakePlatform,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    platform.during_calls = lambda: platform.write_log("one")
    screen = Screen(is_terminal=True)
    run(screen, monkeypatch, "--json", "run", f"{file}::greet", "--name", "Ada")
    assert json.loads(capsys.readouterr().out) == "Hello, Ada!"
    (line,) = (json.loads(line) for line in screen.lines())
    assert line["log"]["text"] == "one"


def test_items_of_a_generator_are_printed_as_they_come(
    platform: FakePlatform,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(Screen(is_terminal=True), monkeypatch, "run", f"{file}::count", "--upto", "3")
    assert capsys.readouterr().out == "0\n1\n2\n"
    assert not platform.apps


def test_a_failure_shows_the_output_and_removes_the_app(
    platform: FakePlatform,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    platform.during_calls = lambda: platform.write_log("before it failed")
    screen = Screen()
    assert run(screen, monkeypatch, "run", f"{file}::fail") == 1
    assert "before it failed" in screen.getvalue()
    assert screen.lines()[-2:] == [
        "error shop/fail raised ValueError: no",
        "try   Correct the function: the output above has its traceback.",
    ]
    assert capsys.readouterr().out == ""
    assert not platform.apps


def test_a_run_in_a_script_shows_the_same_on_stderr(
    platform: FakePlatform,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    app = load_user_app(file)
    greet = getattr(sys.modules[Path(file).stem], "greet")  # noqa: B009 - a module of the test

    def speak() -> None:
        platform.write_log("one")
        assert screen.wait_for("one")

    platform.during_calls = speak
    with app.run():
        assert greet.remote("Ada") == "Hello, Ada!"
    assert screen.lines()[0] == "packaging shop"
    assert screen.lines()[-1] == "one"
    assert capsys.readouterr().out == ""

    shown = screen.getvalue()
    platform.during_calls = lambda: platform.write_log("unseen")
    with app.run(show_output=False):
        greet.remote("Ada")
    assert screen.getvalue() == shown
    assert platform.followers == 1


def test_output_goes_on_after_a_lost_connection_without_repeating_lines(
    platform: FakePlatform,
) -> None:
    screen = Screen()
    output = ProgressOutput(screen)
    platform.deleted["main", "shop"] = DeployedApp(functions={}, history=[])
    with sessions.use_profile(platform.profile()):
        output.follow("shop")
        for text in ("one", "two", "three"):
            platform.write_log(text)
            platform.write_log(text, instance="i-other", stream="stderr")
            assert screen.wait_for(f"{text}\n{text}")
            platform.end_followers()
        platform.write_log("four")
        output.close()
    assert screen.lines() == [*("one", "one"), *("two", "two"), *("three", "three"), "four"]


def test_a_run_goes_on_where_its_output_cannot_be_read(
    platform: FakePlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    output = ProgressOutput(screen)
    with sessions.use_profile(platform.profile()):
        platform.refuse(TooManyRequests("32 requests already follow logs", retry_after_s=60))
        output.follow("gone")
        assert screen.wait_for("the output of gone is shown at its end only: 32 requests")
        output.close()


def test_a_pipe_has_a_line_for_each_stage_and_not_for_each_piece() -> None:
    screen = Screen()
    output = ProgressOutput(screen)
    for done in range(0, 3 << 20, 1 << 18):
        output.progress(
            ProgressEvent(stage=UPLOAD, text="model", done_bytes=done, total_bytes=3 << 20)
        )
    for _ in range(2):
        output.progress(ProgressEvent(stage=IMAGE, text="pip install [x]"))
        output.step("starting")
    built = "image: pip install [x]"
    assert screen.lines() == ["upload: 3.0 MiB", built, "starting", built]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_notice_stays_on_the_screen(*, is_terminal: bool) -> None:
    screen = Screen(is_terminal=is_terminal)
    output = ProgressOutput(screen)
    output.step("packaging")
    output.progress(ProgressEvent(stage=NOTICE, text="left out: home"))
    output.step("starting")
    output.close()
    assert re.search(r"(?m)^(\x1b\[\S*)*left out: home$", screen.getvalue().replace("\r", ""))


def test_a_deploy_says_each_step_the_public_address_and_once_what_its_starts_are(
    *,
    platform: FakePlatform,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PILOTLIGHT_CONFIG", str(tmp_path / "profile.toml"))
    Path(file).write_text(SOURCE.replace("@app.function()", '@app.function(access="public")', 1))
    explained = []
    for _ in range(2):
        screen = Screen()
        assert run(screen, monkeypatch, "deploy", file) == 0
        explained.append("from its snapshot on disk" in screen.getvalue())
    assert explained == [True, False]
    assert "shop/greet: making and proving a snapshot" in screen.lines()
    out = capsys.readouterr().out
    assert f"POST {platform.url}/t/acme/v1/functions/shop/greet:invoke (public" in out
    assert "/t/acme/v1/functions/shop/count" not in out

    assert run(Screen(), monkeypatch, "--json", "deploy", file, "--no-wait") == 0
    addresses = json.loads(capsys.readouterr().out)["addresses"]
    assert addresses["count"] == [f"POST {platform.url}/v1/functions/shop/count:invoke"]
    public = f"POST {platform.url}/t/acme/v1/functions/shop/greet:invoke"
    assert addresses["greet"] == [public.replace("/t/acme", ""), public]
