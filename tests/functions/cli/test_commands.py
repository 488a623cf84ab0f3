"""The command line as a whole: common options, exit statuses, errors in two lines. No platform runs
here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import click
import pytest
import typer
from typer.testing import CliRunner

from pilotlight.cli.commands.calls.call import (
    body_value,
    call_arguments,
    format_summary,
    parse_response_headers,
)
from pilotlight.cli.commands.tenants.access import secret_values
from pilotlight.cli.core.command import command, common_callback
from pilotlight.cli.core.next_step import next_step
from pilotlight.cli.core.session import CommonOptions, Session
from pilotlight.cli.main import build
from pilotlight.errors import (
    ApprovalRequired,
    FunctionRaised,
    InvalidInput,
    NotFound,
    PilotlightError,
    StartFailed,
    Unauthenticated,
)

COMMANDS = [
    *("up", "down", "status", "deploy", "render", "run", "serve", "call", "shell", "doctor", "top"),
    *("login", "dashboard", "token show"),
    *("app list", "logs", "app show", "app history", "app stop", "app delete"),
    *(
        "instance list",
        "instance logs",
        "instance exec",
        "instance stop",
        "billing report",
        "state backup",
        "state load",
        "state drill",
    ),
    *("billing rates", "billing export", "billing correct", "billing verify"),
    *(
        "billing invoice list",
        "billing invoice show",
        "billing invoice issue",
        "billing invoice download",
    ),
    *(
        "tenant create",
        "tenant list",
        "tenant show",
        "tenant set",
        "tenant suspend",
        "tenant resume",
        "tenant plans",
    ),
    *("slo list", "slo show"),
    *("quota show", "quota set", "quota clear", "audit", "token rotate"),
    *("token create", "token list", "token revoke", "secret set", "secret list", "secret delete"),
    *(
        "snapshot list",
        "snapshot show",
        "snapshot prove",
        "snapshot disable",
        "snapshot enable",
        "snapshot delete",
    ),
    *("template list", "template drop"),
    *(
        "weights push",
        "weights pull",
        "weights list",
        "weights show",
        "weights verify",
        "weights prefetch",
    ),
    *("weights pin", "weights unpin", "weights delete"),
    *("volume list", "volume create", "volume ls", "volume put", "volume get", "volume rm"),
    *("volume delete", "dict list", "dict delete", "queue list", "queue delete"),
    *("sandbox list", "sandbox exec", "sandbox terminate"),
    *("environment create", "environment list", "environment delete"),
]
seen: list[CommonOptions] = []


def probe() -> typer.Typer:
    """A tree with one command that records its options, and one that fails as told."""
    root = typer.Typer()

    def remember(ctx: typer.Context, options: CommonOptions) -> None:
        ctx.obj = options

    def look(session: Session, word: str = "x") -> None:
        """Look."""
        seen.append(session.options)

    def about(
        session: Session, target: Annotated[str, typer.Argument(metavar="APP/FUNCTION")]
    ) -> None:
        """Fail about a function."""
        raise StartFailed("did not start")

    def fail(session: Session, how: str) -> None:
        """Fail."""
        if how == "interrupt":
            raise KeyboardInterrupt
        raise {
            "known": Unauthenticated("no key"),
            "hint": InvalidInput("bad", hint="Do better."),
            "file": FileNotFoundError("gone"),
        }[how]

    root.callback()(common_callback(remember))
    command(root, "look")(look)
    command(root, "fail")(fail)
    command(root, "about")(about)
    return root


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_takes_json_and_explains_itself(words: str) -> None:
    out = CliRunner().invoke(
        build(),
        [*words.split(), "--help"],
        env={"COLUMNS": "200", "NO_COLOR": "1"},
        prog_name="pilotlight",
    )
    assert out.exit_code == 0
    assert "--json" in out.output
    assert "--profile-file" in out.output


@pytest.mark.parametrize(
    "words",
    [
        ["--json", "-e", "a", "look"],
        ["look", "--json", "-e", "a"],
        ["-e", "b", "look", "--json", "-e", "a"],
    ],
)
def test_common_options_go_before_or_after_the_command_and_the_later_wins(words: list[str]) -> None:
    seen.clear()
    assert CliRunner().invoke(probe(), words).exit_code == 0
    assert seen == [CommonOptions(json=True, environment="a")]


@pytest.mark.parametrize(
    "how, status", [("known", 1), ("hint", 1), ("file", 1), ("interrupt", 130)]
)
def test_exit_statuses(how: str, status: int) -> None:
    assert CliRunner().invoke(probe(), ["fail", how]).exit_code == status


def test_every_command_is_registered_by_the_module_that_the_list_names() -> None:
    root: Any = typer.main.get_command(build())
    listed = root.list_commands(None)
    assert [name for name in listed if root.get_command(None, name) is None] == []
    assert sorted(root.commands) == sorted(listed)  # no module registers more than the list says


def test_a_mistyped_command_is_answered_with_the_closest_one() -> None:
    out = CliRunner().invoke(build(), ["deplyo"], env={"NO_COLOR": "1"})
    assert (out.exit_code, "Did you mean 'deploy'" in out.output) == (2, True)


def test_wrong_usage_ends_with_2() -> None:
    assert CliRunner().invoke(build(), ["nope"]).exit_code == 2
    assert CliRunner().invoke(build(), ["call"]).exit_code == 2


def test_an_error_is_one_line_what_happened_and_one_what_to_do() -> None:
    out = CliRunner().invoke(probe(), ["fail", "hint"])
    assert out.output.splitlines() == ["error bad", "try   Do better."]


@pytest.mark.parametrize(
    "target, app",
    [("search/embed", "search"), ("search/Model.embed@next", "search"), ("search", "APP")],
)
def test_what_to_do_names_what_the_command_was_about(target: str, app: str) -> None:
    out = CliRunner().invoke(probe(), ["about", target])
    assert out.output.splitlines()[1] == f"try   Read the function's log: `pilotlight logs {app}`."


def test_what_to_do_names_what_the_error_is_about() -> None:
    raised = FunctionRaised("x", app="search", request_id="req-1")
    assert "`pilotlight logs search --call req-1`" in next_step(raised, {"APP": "other"})
    assert "`pilotlight logs other`" in next_step(FunctionRaised("x"), {"APP": "other"})
    hint = "`pilotlight traffic show APP/FUNCTION` and APP"
    of_function = InvalidInput("x", hint=hint, app="search", function="embed")
    assert next_step(of_function) == "`pilotlight traffic show search/embed` and APP"
    assert next_step(InvalidInput("x", hint=hint)) == hint
    waiting = ApprovalRequired("x", function="embed", revision="v2")
    approve = "`pilotlight app approve search/embed v2`"
    assert approve in next_step(waiting, {"APP": "search"})


def test_what_to_do_where_something_is_not_found_names_what_the_command_knows() -> None:
    known = {"APP": "search", "APP/FUNCTION": "search/embed"}
    of_function = next_step(NotFound("x", app="search", function="embed"))
    assert of_function == (
        "`pilotlight app list` shows whether search is deployed, `pilotlight app show search` its "
        "functions, `pilotlight app revisions search/embed` the revisions of search/embed."
    )
    of_app = next_step(NotFound("x"), {"APP": "search"})
    assert "`pilotlight app show search` its functions; of another resource" in of_app
    assert "search/embed" in next_step(NotFound("x"), known)
    assert "`pilotlight app list`, or the `list`" in next_step(NotFound("x"))


def test_help_shows_the_daily_commands_first() -> None:
    out = CliRunner().invoke(
        build(), ["--help"], env={"COLUMNS": "100", "NO_COLOR": "1"}, prog_name="pilotlight"
    )
    panels = re.findall(r"^╭─ ([A-Z][^─]*?) ─", out.output, re.MULTILINE)
    assert panels[:3] == ["Options", "Common options", "Every day"]
    assert "Commands" not in panels  # every command has a panel
    daily = out.output.partition("Every day")[2].partition("╰")[0]
    words = re.findall(r"^│ (\w+)", daily, re.MULTILINE)
    assert words[:6] == ["up", "deploy", "run", "serve", "call", "logs"]
    assert len(words) == 10


def test_an_error_is_json_where_json_was_asked_for() -> None:
    out = CliRunner().invoke(probe(), ["fail", "known", "--json"])
    error = json.loads(out.output)["error"]
    assert (error["type"], error["message"]) == ("unauthenticated", "no key")
    assert "PILOTLIGHT_API_KEY" in error["hint"]


def test_debug_shows_where_an_error_comes_from() -> None:
    out = CliRunner().invoke(probe(), ["fail", "known"], env={"PILOTLIGHT_DEBUG": "1"})
    assert isinstance(out.exception, Unauthenticated)


def test_every_known_error_says_what_to_do() -> None:
    ours = [
        kind
        for kind in PilotlightError.__subclasses__()
        if kind.__module__ == PilotlightError.__module__
    ]
    silent = [kind.__name__ for kind in ours if "PILOTLIGHT_DEBUG" in next_step(kind("x"))]
    assert set(silent) <= {"ClientClosedRequest"}


def test_destroying_asks_and_refuses_where_nobody_can_answer(tmp_path: Path) -> None:
    out = CliRunner().invoke(
        build(), ["app", "delete", "x"], env={"PILOTLIGHT_CONFIG": str(tmp_path / "none")}
    )
    assert out.exit_code == 1
    assert "Pass --yes" in out.output


ENDING = {
    "abort",
    "cancel",
    "clear",
    "delete",
    "disable",
    "down",
    "drop",
    "prune",
    "revoke",
    "stop",
}


def test_every_command_that_ends_something_accepts_yes(tmp_path: Path) -> None:
    def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
        if hasattr(node, "commands"):
            context = click.Context(node)
            for name in node.list_commands(context):
                yield from walk(node.get_command(context, name), f"{path} {name}".strip())
        else:
            yield path, node

    ending = {
        path: command
        for path, command in walk(typer.main.get_command(build()))
        if path.split()[-1] in ENDING
    }
    assert ending.keys() >= {"down", "template drop", "instance stop", "app delete", "quota clear"}
    assert [p for p, c in ending.items() if not any("--yes" in o.opts for o in c.params)] == []
    environ = {"HOME": str(tmp_path), "PILOTLIGHT_HOME": str(tmp_path / "home")}
    out = CliRunner().invoke(build(), ["down", "-y", "--home", str(tmp_path / "h")], env=environ)
    assert (out.exit_code, "no platform runs" in out.output) == (0, True)
    assert not (tmp_path / "h").exists()


def test_call_arguments_are_json_or_pairs_and_not_both() -> None:
    assert call_arguments(None, ["a=1"]) == {"a": 1}
    assert call_arguments("[1, 2]", []) == [1, 2]
    assert call_arguments(None, []) == {}
    for text, words in (("{}", ["a=1"]), ("just text", []), ("3", [])):
        with pytest.raises(InvalidInput):
            call_arguments(text, words)


def test_answers_are_summed_up_from_their_headers() -> None:
    headers = {
        "pilotlight-start": "FORK",
        "server-timing": 'queue;dur=0.1, start;dur=12, weights;desc="dram"',
        "pilotlight-cost": "0.0000100",
        "x-request-id": "req-1",
    }
    assert (
        format_summary(parse_response_headers(headers))
        == "FORK · queue 0.1 ms · start 12 ms · weights from dram · cost 0.00001 · req-1"
    )
    assert body_value("application/x-ndjson", b'1\n{"a": 2}\n') == [1, {"a": 2}]
    assert body_value("text/plain", b"hi") == "hi"


def test_secret_values_are_never_taken_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "v").write_text("line\n")
    assert secret_values(["A"], from_env=True, from_file=None, environ={"A": "1"}) == {"A": "1"}
    assert secret_values(["A"], from_env=False, from_file=tmp_path / "v", environ={}) == {
        "A": "line\n"
    }
    with pytest.raises(InvalidInput, match="'A'… is not the name of a variable") as failure:
        secret_values(["A=hunter2"], from_env=False, from_file=None, environ={})
    assert "hunter2" not in str(failure.value)
    with pytest.raises(InvalidInput, match="has no B"):
        secret_values(["B"], from_env=True, from_file=None, environ={})


def test_help_loads_nothing_heavy() -> None:
    heavy = ("httpx", "fastapi", "sqlalchemy", "yaml", "rich.table", "cloudpickle")
    script = (
        "import sys, typer; from pilotlight.cli.main import build; root = "
        "typer.main.get_command(build())\n"
    )
    script += (
        f"[root.get_command(None, name) for name in root.list_commands(None)]; print([m for "
        f"m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
