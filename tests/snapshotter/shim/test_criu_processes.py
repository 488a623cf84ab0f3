"""CRIU processes as a shim keeps them: one that is killed takes its helpers along."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from snapshotter.shim.criu_processes import CriuProcesses

HELPED = "/bin/sleep 1000 & wait"
"""A program with a helper, which outlives it unless somebody ends it, and holds what it was
given."""


@pytest.fixture
def told(tmp_path: Path) -> tuple[CriuProcesses, list[Mapping[str, Any]], int]:
    """CRIUs, what they told, and the pid of one with a helper."""
    told: list[Mapping[str, Any]] = []
    criu_processes = CriuProcesses(
        lambda message, *_: told.append(message),
        stdio=list,
        ended=lambda: None,
        pages_lost=lambda: None,
    )
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    order = {
        "run": "dump-1",
        "argv": ["/bin/sh", "-c", HELPED],
        "uid": 0,
        "cgroup": {},
        "socket": True,
    }
    criu_processes.start(order, [directory, directory])
    os.close(directory)
    return criu_processes, told, int(told[0]["pid"])


def helper_of(pid: int) -> int:
    while not (found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        pass  # the shell is about to fork it; bounded by the test's own timeout
    return int(found[0])


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        # it went before it was opened, or before it was read
        return True


def test_helpers_of_one_that_was_killed_end_with_it(
    told: tuple[CriuProcesses, list[Mapping[str, Any]], int],
) -> None:
    criu_processes, heard, pid = told
    helper = helper_of(pid)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert not is_dead(helper)
    assert criu_processes.on_reaped(pid, status)
    while not is_dead(helper):
        pass
    assert heard[-1] == {"event": "criu_exited", "run": "dump-1", "status": status}
    assert not criu_processes.on_reaped(pid, status), "it is known once"


def test_one_that_is_ended_takes_its_helpers_along(
    told: tuple[CriuProcesses, list[Mapping[str, Any]], int],
) -> None:
    criu_processes, _, pid = told
    helper = helper_of(pid)
    criu_processes.kill("dump-2")
    assert not is_dead(helper), "of another run"
    criu_processes.kill("dump-1")
    while not is_dead(helper):
        pass
    assert criu_processes.on_reaped(*os.waitpid(pid, 0))
