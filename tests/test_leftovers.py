"""A run whose tests leave processes behind fails and names them; one that leaves none passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORPHAN = "import os, time\nif os.fork(): os._exit(0)\nos.setsid(); time.sleep(60)"


def run(
    directory: Path, body: str, *options: str, grace_s: int = 1
) -> subprocess.CompletedProcess[str]:
    """pytest on a file with one test, with the plugin alone."""
    (directory / "pytest.ini").write_text("[pytest]\n")
    (directory / "test_it.py").write_text(f"import subprocess, sys\ndef test_it():\n    {body}\n")
    own = (
        "-q",
        "-p",
        "tests.leftovers",
        "--rootdir",
        str(directory),
        "-c",
        str(directory / "pytest.ini"),
        "--leftovers-grace-s",
        f"{grace_s}",
    )
    argv = [sys.executable, "-m", "pytest", *own, *options, str(directory / "test_it.py")]
    # there it looks at the whole machine
    environ = {name: value for name, value in os.environ.items() if name != "CI"}
    return subprocess.run(
        argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=50
    )


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "xdist"])
@pytest.mark.slow  # a pytest of its own
def test_process_that_outlives_the_run_fails_it_and_is_named_with_its_test(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = run(tmp_path, f"subprocess.Popen([sys.executable, '-c', {ORPHAN!r}]).wait()", *options)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "started by test_it.py::test_it:" in done.stdout


@pytest.mark.slow  # a pytest of its own
def test_orphan_with_an_empty_environment_is_found_by_the_process_that_adopted_it(
    tmp_path: Path,
) -> None:
    done = run(
        tmp_path,
        f"subprocess.Popen([sys.executable, '-c', {ORPHAN!r}], env={{}}).wait()",
        "-n",
        "1",
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "started by test_it.py::test_it:" in done.stdout


@pytest.mark.slow  # a pytest of its own
def test_run_that_leaves_nothing_passes(tmp_path: Path) -> None:
    done = run(
        tmp_path, "subprocess.run([sys.executable, '-c', ''], check=True)", "-n", "1", grace_s=30
    )
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    assert "left" not in done.stdout
