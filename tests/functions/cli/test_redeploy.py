"""Deploys of `pilotlight serve`: the packages stay imported, the app's own modules do not."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
import types
from pathlib import Path

import pytest

from pilotlight.cli.commands.apps.serve import Redeployer, unload_modules


def test_modules_of_the_app_are_forgotten_and_packages_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "own_module": tmp_path / "app.py",
        "own_package.part": tmp_path / "own_package" / "part.py",
        "installed_there": tmp_path / ".venv/lib/python3/site-packages/installed.py",
        "elsewhere": tmp_path.parent / "elsewhere.py",
    }
    for name, file in files.items():
        module = types.ModuleType(name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, module)

    unload_modules(tmp_path)

    assert [name for name in files if name in sys.modules] == ["installed_there", "elsewhere"]


@pytest.mark.slow  # imports the command line in another process
def test_each_deploy_runs_the_command_with_the_current_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "app.py"
    text = "import pilotlight\napp = pilotlight.App('live')\nprint('version', {})\n"
    file.write_text(text.format(1))
    arguments = ["render", str(file), "--no-such-option"]
    done: queue.Queue[int] = queue.Queue()
    with Redeployer(str(file), tmp_path, arguments, done.put) as redeployer:
        redeployer.deploy()
        assert done.get(timeout=30) == 2  # wrong usage
        file.write_text("raise SystemExit(7)\n")
        redeployer.deploy()
        assert done.get(timeout=30) == 2
        os.kill(int(repr(redeployer).rpartition(" ")[2].rstrip(">")), signal.SIGKILL)
        redeployer.deploy()
        assert done.get(timeout=30) == 2  # in a process of its own
    assert capfd.readouterr().out.count("version 1") == 1  # imported once, ahead


@pytest.mark.slow  # imports the command line in another process
def test_a_deploy_is_superseded_by_the_next_one(tmp_path: Path) -> None:
    file, told = tmp_path / "app.py", tmp_path / "told"
    text = f"import pathlib, time\npathlib.Path({str(told)!r}).touch()\n"
    hangs = f"{text}time.sleep(60)\n"
    file.write_text(text)
    done: queue.Queue[int] = queue.Queue()
    with Redeployer(str(file), tmp_path, ["render", str(file)], done.put) as redeployer:
        _wait_for(told)  # it has imported the app
        file.write_text(hangs)
        redeployer.deploy()
        _wait_for(told)
        file.write_text("raise SystemExit(7)\n")
        redeployer.deploy()
        assert done.get(timeout=30) == 7  # of the first one nothing is said
        file.write_text(hangs)
        redeployer.deploy()
        _wait_for(told)
    assert done.empty()  # a deploy that runs at the end is ended


def _wait_for(file: Path) -> None:
    """Wait until the file is there, and remove it."""
    until = time.monotonic() + 30
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.01)
    file.unlink()
