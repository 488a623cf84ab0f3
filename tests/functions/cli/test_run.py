"""`pilotlight run`, `call` and `shell` against a platform in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pilotlight.cli.main import build
from tests.fakes.fake_platform import API_KEY, FakePlatform

SOURCE = """
    from typing import Literal

    import pilotlight

    app = pilotlight.App("tasks")

    @app.function()
    def double(n: int) -> int:
        return 2 * n

    @app.function()
    def describe(
        name: str,
        code: Literal["1", "2"] = "1",
        size: int | str = 0,
        tag: str | None = "x",
        words: list[str] | None = None,
        anything=None,
    ) -> str:
        return repr((name, code, size, tag, words, anything))

    @app.cls()
    class Scaled:
        factor: int = pilotlight.parameter()

        @pilotlight.method()
        def times(self, n: int, offset: int = 0) -> int:
            return self.factor * n + offset

    @app.local_entrypoint()
    async def main(n: int) -> str:
        return f"twice is {await double.remote.aio(n)}"

    @app.local_entrypoint()
    async def each(upto: int):
        for n in range(upto):
            yield await double.remote.aio(n)

    @app.local_entrypoint()
    async def failing() -> None:
        raise RuntimeError("not today")

    @app.local_entrypoint()
    def signalled(number: int) -> None:
        import os, time

        os.kill(os.getpid(), number)
        time.sleep(30)
"""


class Shell:
    """Types commands at a platform, in a directory with an app's file."""

    def __init__(self, platform: FakePlatform, directory: Path) -> None:
        self.platform = platform
        self.file = directory / f"tasks_{uuid.uuid4().hex[:8]}.py"
        self.file.write_text(textwrap.dedent(SOURCE))

    def run(self, *words: str, key: str = API_KEY, typed: str | None = None) -> Result:
        return CliRunner().invoke(
            build(), [*words], env=self.environ(key), prog_name="pilotlight", input=typed
        )

    def environ(self, key: str = API_KEY) -> dict[str, str]:
        return {
            "PILOTLIGHT_URL": self.platform.url,
            "PILOTLIGHT_API_KEY": key,
            "PILOTLIGHT_CONFIG": str(self.file.parent / "none.toml"),
            "NO_COLOR": "1",
        }

    def local(self, entrypoint: str, *words: str) -> Result:
        return self.run("run", f"{self.file}::{entrypoint}", *words)


@pytest.fixture(name="shell")
def _shell(tmp_path: Path) -> Iterator[Shell]:
    with FakePlatform() as platform:
        yield Shell(platform, tmp_path)


def test_the_parameters_of_a_class_are_options_of_its_methods(shell: Shell) -> None:
    done = shell.local("Scaled.times", "--n", "3", "--factor", "4")
    assert (done.exit_code, done.stdout) == (0, "12\n"), done.output
    assert shell.local("Scaled.times", "--n", "3").exit_code != 0


def test_an_asynchronous_local_entrypoint_runs_and_its_result_is_printed(shell: Shell) -> None:
    done = shell.local("main", "--n", "21")
    assert (done.exit_code, done.stdout) == (0, "twice is 42\n"), done.output
    done = shell.local("each", "--upto", "3")
    assert (done.exit_code, done.stdout.split()) == (0, ["0", "2", "4"]), done.output
    assert shell.platform.apps == {}


def test_an_asynchronous_local_entrypoint_that_raises_fails_the_command(shell: Shell) -> None:
    done = shell.local("failing")
    assert done.exit_code == 1
    assert "raised RuntimeError: not today" in done.stderr
    assert shell.platform.apps == {}


FRESH = """
import runpy, signal, sys
signal.signal(int(sys.argv[-1]), signal.SIG_DFL)
sys.argv[0] = "pilotlight"
runpy.run_module("pilotlight", run_name="__main__", alter_sys=True)
"""
"""The command line, with a signal that nobody ignores (nohup) or handles (coverage) before it."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_or_a_kill_ends_a_run_like_ctrl_c(
    shell: Shell, number: signal.Signals
) -> None:
    """The app is removed: its schedules and min_instances would go on without an owner."""
    reference = f"{shell.file}::signalled"
    done = subprocess.run(
        [sys.executable, "-c", FRESH, "run", reference, "--number", f"{number:d}"],
        env=os.environ | shell.environ(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert [
        asked for asked in shell.platform.asked if asked.startswith("DELETE /v1/apps/tasks-run-")
    ]


@pytest.mark.parametrize(
    "words, received",
    [
        (("name=5",), "('5', '1', 0, 'x', None, None)"),
        (("name=null", "code=2", "tag=null"), "('null', '2', 0, None, None, None)"),
        (("name=true", "tag=7", "size=8"), "('true', '1', 8, '7', None, None)"),
        (('name={"a": 1}', 'words=["b"]'), "('{\"a\": 1}', '1', 0, 'x', ['b'], None)"),
        (('name="quoted"', "anything=3"), "('quoted', '1', 0, 'x', None, 3)"),
    ],
)
def test_a_text_parameter_receives_text_that_looks_like_another_type(
    shell: Shell, words: tuple[str, ...], received: str
) -> None:
    assert shell.run("deploy", str(shell.file), "--no-wait").exit_code == 0
    flags = [flag for word in words for flag in ("-a", word)]
    done = shell.run("call", "tasks/describe", *flags)
    assert (done.exit_code, json.loads(done.stdout)) == (0, received), done.output


def test_arguments_that_are_text_anyway_need_no_look_at_the_signature(shell: Shell) -> None:
    assert shell.run("deploy", str(shell.file), "--no-wait").exit_code == 0
    shell.platform.asked.clear()
    assert shell.run("call", "tasks/describe", "-a", "name=Ada").exit_code == 0
    assert shell.platform.asked == ["POST /v1/functions/tasks/describe:invoke"]


def test_an_option_that_call_does_not_have_says_how_arguments_are_passed(shell: Shell) -> None:
    done = shell.run("call", "tasks/describe", "-a", "--size=3", "--my-name=Ada")
    assert done.exit_code == 2
    said = " ".join(done.stderr.replace("│", " ").split())
    assert "No such option: --my-name." in said
    assert "passed as --arg my_name=Ada, or all of them as JSON" in said

    done = shell.run("call", "tasks/describe", "--strem", "Ada")
    said = " ".join(done.stderr.replace("│", " ").split())
    assert "Did you mean --stream" in said, said
    assert "--arg strem=…" in said


def test_a_wrong_key_is_one_line_and_the_next_step(shell: Shell) -> None:
    for words, error in (
        (("call", "tasks/describe", "-a", "name=5"), "no valid API key was given"),
        (("run", f"{shell.file}::main", "1"), f"{shell.platform.url} does not accept this API key"),
    ):
        done = shell.run(*words, key="pl_wrong")
        what, step = done.stderr.strip().splitlines()[-2:]
        assert (done.exit_code, what) == (1, f"error {error}")
        assert step.startswith("try   Run `pilotlight login`, set PILOTLIGHT_API_KEY")


def test_a_shell_keeps_variables_and_the_directory_between_lines(shell: Shell) -> None:
    shell.platform.instances = [{"id": "i-1", "app": "tasks", "function": "double"}]
    lines = [
        "greeting=\"it's a \\$5 day\"; two='one",  # a line break within a value is two lines here
        "x=1 y=$((x + 1))",
        'export greeting="it\'s \\$5, \\"more\\""',
        "cd /usr && cd bin; false",
        'echo "$greeting $x $y $PWD"; readonly x',
        "unset y; cd /no/such/place; (exit 3); exit 7",
        'sh -c \'echo "child: $greeting"\'; echo "y=${y-none} $(pwd)"',
        "cd -; for f in 1 2; do n=$f; done; echo $n",
        "file=$(ls -t /dev/shm/pilotlight-shell.* | head -1); ls -l $file | cut -c 1-10; echo $file",
    ]
    done = shell.run("shell", "tasks/double", typed="\n".join([*lines, "exit", "echo never", ""]))
    *shown, file = done.stdout.splitlines()
    assert shown == [
        'it\'s $5, "more" 1 2 /usr/bin',
        'child: it\'s $5, "more"',
        "y=none /usr/bin",
        "/usr",
        "2",
        "-rw-------",
    ]
    assert (done.exit_code, Path(file).exists()) == (0, False)
    assert "eval: " in done.stderr
    assert "no/such/place" in done.stderr
