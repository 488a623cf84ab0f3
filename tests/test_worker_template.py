"""Workers of pytest-xdist are forked from one process that has imported the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLUGINS = ("tests.tiers", "tests.parallel")
INI = """
[pytest]
filterwarnings = error
asyncio_default_fixture_loop_scope = function
"""
IMPORTS = """
import os
from pathlib import Path
with Path(os.environ["IMPORTS"]).open("a") as file:
    print(os.getpid(), file=file)
"""
"""Notes each process that executes the module."""


def run(directory: Path, **modules: str) -> subprocess.CompletedProcess[str]:
    """pytest with two workers on a folder of modules, each with the tests of a file."""
    (directory / "pytest.ini").write_text(INI)
    for name, text in modules.items():
        (directory / f"{name}.py").write_text(text)
    options = [
        "--rootdir",
        str(directory),
        "-c",
        f"{directory}/pytest.ini",
        "--import-mode=importlib",
    ]
    plugins = [word for plugin in PLUGINS for word in ("-p", plugin)]
    argv = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadgroup", *plugins]
    return subprocess.run(
        [*argv, *options, str(directory)],
        cwd=ROOT,
        env={**os.environ, "IMPORTS": str(directory / "imports"), "GIVEN": "to workers"},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


@pytest.mark.slow  # a pytest of its own
def test_modules_are_imported_once_for_all_workers_and_their_asserts_are_explained(
    tmp_path: Path,
) -> None:
    done = run(
        tmp_path,
        test_a=f"{IMPORTS}def test_a():\n    assert os.environ['GIVEN'] == 'to workers'\n",
        test_b="def test_b():\n    found = 1\n    assert found == 2\n",
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "assert 1 == 2" in done.stdout
    assert len((tmp_path / "imports").read_text().splitlines()) == 1


@pytest.mark.slow  # a pytest of its own
def test_a_worker_that_ends_fails_its_test_and_others_are_forked(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        test_a="import os\ndef test_a():\n    os._exit(3)\n",
        test_b="def test_b():\n    pass\n",
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "crashed while running" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


@pytest.mark.slow  # a pytest of its own
@pytest.mark.parametrize(
    "text, said",
    [
        ("raise ValueError('broken')", "ValueError: broken"),
        ("import warnings\nwarnings.warn('old')", "UserWarning: old"),
    ],
    ids=["exception", "warning"],
)
def test_a_module_that_cannot_be_imported_is_an_error_of_the_run(
    tmp_path: Path, text: str, said: str
) -> None:
    done = run(tmp_path, test_a=text, test_b="def test_b():\n    pass\n")
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "error" in done.stdout.splitlines()[-1]
    assert said in done.stdout
    assert done.returncode != pytest.ExitCode.OK
