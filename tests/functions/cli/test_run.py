"""`pilotlight run` and `call` against a platform in this process."""

from __future__ import annotations

import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pilotlight.cli.main import build
from tests.fakes.fake_platform import API_KEY, FakePlatform

SOURCE = """
    import pilotlight

    app = pilotlight.App("tasks")

    @app.function()
    def double(n: int) -> int:
        return 2 * n

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
"""


class Shell:
    """Types commands at a platform, in a directory with an app's file."""

    def __init__(self, platform: FakePlatform, directory: Path) -> None:
        self.platform = platform
        self.file = directory / f"tasks_{uuid.uuid4().hex[:8]}.py"
        self.file.write_text(textwrap.dedent(SOURCE))

    def run(self, *words: str, key: str = API_KEY) -> Result:
        environ = {
            "PILOTLIGHT_URL": self.platform.url,
            "PILOTLIGHT_API_KEY": key,
            "PILOTLIGHT_CONFIG": str(self.file.parent / "none.toml"),
            "NO_COLOR": "1",
        }
        return CliRunner().invoke(build(), [*words], env=environ, prog_name="pilotlight")

    def local(self, entrypoint: str, *words: str) -> Result:
        return self.run("run", f"{self.file}::{entrypoint}", *words)


@pytest.fixture(name="shell")
def _shell(tmp_path: Path) -> Iterator[Shell]:
    with FakePlatform() as platform:
        yield Shell(platform, tmp_path)


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
