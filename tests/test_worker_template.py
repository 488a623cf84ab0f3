"""Workers of pytest-xdist are forked from one process that has imported the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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


def arguments(directory: Path, *options: str, **modules: str) -> list[str]:
    """pytest with two workers on a folder of modules, each with the tests of a file."""
    (directory / "pytest.ini").write_text(INI)
    for name, text in modules.items():
        (directory / f"{name}.py").write_text(text)
    place = ["--rootdir", str(directory), "-c", f"{directory}/pytest.ini"]
    plugins = [word for plugin in PLUGINS for word in ("-p", plugin)]
    argv = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadgroup", *plugins]
    return [*argv, *place, "--import-mode=importlib", *options, str(directory)]


def run(directory: Path, *options: str, **modules: str) -> subprocess.CompletedProcess[str]:
    """The same, until its end."""
    return subprocess.run(
        arguments(directory, *options, **modules),
        cwd=ROOT,
        env=environment(directory),
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


def environment(directory: Path) -> dict[str, str]:
    """Of such a run."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**mine, "IMPORTS": str(directory / "imports"), "GIVEN": "to workers"}


def imports(directory: Path) -> int:
    """How many processes imported a module with `IMPORTS`."""
    return len((directory / "imports").read_text().splitlines())


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
    assert imports(tmp_path) == 1


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


@pytest.mark.soak  # a pytest of its own; few changes can break it
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


@pytest.mark.soak  # a pytest of its own; few changes can break it
@pytest.mark.parametrize(
    "text",
    [
        "if 'PYTEST_XDIST_WORKER' not in os.environ:\n    os._exit(1)\n",
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    ],
    ids=["ends", "thread"],
)
def test_without_a_process_that_can_fork_each_worker_imports_the_tests(
    tmp_path: Path, text: str
) -> None:
    done = run(
        tmp_path,
        test_a=f"{IMPORTS}{text}def test_a():\n    assert os.environ['GIVEN'] == 'to workers'\n",
        test_b="def test_b():\n    pass\n",
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert imports(tmp_path) == 3
    assert done.returncode == pytest.ExitCode.OK


@pytest.mark.soak  # a pytest of its own; few changes can break it
def test_modules_find_the_profile_of_hypothesis_that_the_run_names(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "--hypothesis-profile=ci",
        test_a="from hypothesis import settings\nNAME = settings.get_current_profile_name()\n"
        "def test_a():\n    assert NAME == 'ci'\n",
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.soak  # a pytest of its own; few changes can break it
@pytest.mark.parametrize("while_", ["a test runs", "tests are imported"])
def test_an_interrupt_ends_all_of_its_processes(tmp_path: Path, while_: str) -> None:
    waiting = "def wait():\n    Path(os.environ['IMPORTS'] + '2').touch()\n    time.sleep(40)\n"
    begin = "wait()\n" if while_ == "tests are imported" else "def test_a():\n    wait()\n"
    argv = arguments(tmp_path, test_a=f"{IMPORTS}import time\n{waiting}{begin}")
    with subprocess.Popen(
        argv,
        cwd=ROOT,
        env=environment(tmp_path),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        deadline = time.monotonic() + 30
        while not (tmp_path / "imports2").exists():
            assert time.monotonic() < deadline, "no test began"
            time.sleep(0.02)
        os.killpg(running.pid, signal.SIGINT)
        said, _ = running.communicate(timeout=20)  # each of its processes holds the pipe
    assert running.returncode == pytest.ExitCode.INTERRUPTED, said
    assert "KeyboardInterrupt" in said
