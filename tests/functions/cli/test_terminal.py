"""What others wrote, in the terminal of who reads it."""

from __future__ import annotations

import io
import json
import sys
from typing import Any, cast

import pytest
from rich.live import Live

from pilotlight.cli.commands.calls.call import _invoke, _pretty, _print_items
from pilotlight.cli.commands.operations.instance import run_in
from pilotlight.cli.core.command import report_error
from pilotlight.cli.core.formatting import format_table
from pilotlight.cli.core.logs import format_log_line
from pilotlight.cli.core.session import CommonOptions, Session
from pilotlight.client.client import Client
from pilotlight.client.responses import CallResponse
from pilotlight.core.terminal import Terminal
from pilotlight.errors import NotFound

HOSTILE = "x\x1b]0;owned\x07\x1b[2J\x9b2J\u202ey"


@pytest.mark.parametrize(
    "what",
    [HOSTILE, format_table([{"name": HOSTILE}], {"name": "NAME"}, empty="")],
    ids=["text", "table"],
)
def test_control_characters_are_shown_and_not_obeyed(what: Any) -> None:
    out = io.StringIO()
    Terminal(out, width=120).print(what, markup=False)

    assert r"x\x1b]0;owned" in out.getvalue()
    assert r"\x1b[2J\x9b2J\u202ey" in out.getvalue()
    assert all(line.isprintable() for line in out.getvalue().splitlines())


def test_an_errors_text_does_not_speak_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report_error(
        NotFound(f"no function\n{HOSTILE}", hint=HOSTILE), Session(options=CommonOptions())
    )

    told = capsys.readouterr().err
    assert all(line.isprintable() for line in told.splitlines())
    assert told.startswith("error no function\n")


def test_lines_of_logs_keep_colours_and_nothing_else() -> None:
    out = io.StringIO()
    terminal = Terminal(out, width=120)
    terminal.print(
        format_log_line(
            {
                "time": None,
                "instance": "i-1",
                "stream": "stdout",
                "text": f"\x1b[31mred\x1b[0m {HOSTILE}",
            }
        )
    )

    assert "red x" in out.getvalue()
    assert all(line.isprintable() for line in out.getvalue().splitlines())


def test_what_the_terminal_draws_itself_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a bare machine has none
    out = io.StringIO()
    terminal = Terminal(out, width=40)
    terminal._force_terminal = True
    with Live("[bold]here[/]", console=terminal):
        pass

    assert "here" in out.getvalue()
    assert "\x1b[?25l" in out.getvalue()


@pytest.mark.parametrize("text", ["root:x:0:0:", ":smile:", "[bold]b[/bold]", "[/x]"])
def test_a_result_is_printed_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Session(options=CommonOptions()).show({}, lambda: _pretty({"said": text}))
    assert json.loads(capsys.readouterr().out) == {"said": text}


class _Screen(io.TextIOWrapper):
    """A terminal, or a pipe, with the bytes that are written to it."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.written, self._is_terminal = io.BytesIO(), is_terminal
        super().__init__(self.written, encoding="utf-8", newline="")

    def isatty(self) -> bool:
        return self._is_terminal


class _Client:
    """Answers with what user code chose."""

    def exec_instance(self, _: str, __: list[str]) -> list[dict[str, Any]]:
        return [{"stream": "stdout", "text": HOSTILE}, {"exit_status": 3}]

    def invoke(self, *_: Any, **__: Any) -> CallResponse:
        return CallResponse(
            status=200, headers={"content-type": "text/plain"}, body=HOSTILE.encode()
        )


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])
def test_raw_output_of_a_function_is_escaped_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    session, client = Session(options=CommonOptions()), cast("Client", _Client())

    def execute() -> None:
        assert run_in(session, client, "i-1", ["true"]) == 3

    def call() -> None:
        _invoke(session, client, "shop", "hello", {}, raw=True, timeout=None, extra={})

    for command in (execute, call):
        screen = _Screen(is_terminal=is_terminal)
        monkeypatch.setattr(sys, "stdout", screen)
        command()
        shown = rb"x\x1b]0;owned\x07\x1b[2J\x9b2J\u202ey"
        assert screen.written.getvalue() == (shown if is_terminal else HOSTILE.encode())


def test_json_of_a_command_has_no_control_characters_and_the_same_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Session(options=CommonOptions(json=True)).show({"result": f"ü{HOSTILE}"}, str)
    _print_items([f"ü{HOSTILE}"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.isprintable() and "ü" in line for line in lines)
    assert [json.loads(line) for line in lines] == [{"result": f"ü{HOSTILE}"}, f"ü{HOSTILE}"]
