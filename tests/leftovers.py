"""Fails a run whose tests leave processes, mounts or network namespaces behind, and names them;
names control groups.

Processes are attributed to the run: they carry its id in their environment or descend from pytest's
first process, which adopts orphans while pytest-xdist distributes (PR_SET_CHILD_SUBREAPER,
prctl(2)). Everything else belongs to the machine, so what another program does at the same time
cannot be told apart: it is looked at in CI only, which has the machine to itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

RUN_ID = "TEST_RUN_ID"
"""Environment variable that all processes of a run inherit. Tests' environments drop names that
begin with PILOTLIGHT_."""
_PR_SET_CHILD_SUBREAPER = 36
_GROUP = "control group"
"""Named, but no failure: a platform that was stopped on an overloaded machine has been seen to
leave a slot's group behind."""
_HELPERS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "tests.e2e.command_line",
)
"""Processes that end with the process that started them: Python's own, and one of ours."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that is still alive, as `/proc` shows it."""

    pid: int
    parent: int
    command: str
    started_at: float
    environment: dict[str, str]


class Leftovers:
    """Plugin of pytest's first process: looks before the first test and after the last."""

    def __init__(self, *, adopt: bool, grace_s: float) -> None:
        self._grace_s = grace_s
        self._before = machine_state()
        self._processes: list[str] = []
        self._machine: list[str] = []
        self._phases: list[tuple[float, float, str]] = []
        if adopt:
            _adopt_orphans()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note when each test ran, in whichever worker."""
        self._phases.append((report.start, report.stop, report.nodeid))

    @pytest.hookimpl(trylast=True)  # pytest-xdist's workers have ended by then
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Wait until everything is gone; end what stays, and fail the run."""
        found = _wait_gone(self._grace_s)
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self._processes = [
            f"process {one.pid}, started by {self._starter(one)}: {one.command[:200]}"
            for one in found
        ]
        self._machine = sorted(machine_state() - self._before) if os.environ.get("CI") else []
        failing = [line for line in self._machine if not line.startswith(_GROUP)]
        if (self._processes or failing) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _starter(self, process: Process) -> str:
        """The test that its environment names; where that was cleaned, the tests that ran when it
        started."""
        if (named := process.environment.get("PYTEST_CURRENT_TEST")) is not None:
            return named.rpartition(" (")[0]
        tick = 0.02  # the kernel notes starts in hundredths of a second
        ran = [
            nodeid
            for start, stop, nodeid in self._phases
            if start - tick <= process.started_at <= stop + tick
        ]
        return " or ".join(dict.fromkeys(ran)) or "no test that is known"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name what was found."""
        if self._processes:
            terminalreporter.section(
                "Tests left processes behind (they were killed)", sep="=", red=True, bold=True
            )
            terminalreporter.write("".join(f"{line}\n" for line in self._processes))
        if self._machine:
            terminalreporter.section("Tests left these behind", sep="=", red=True, bold=True)
            terminalreporter.write("".join(f"{line}\n" for line in self._machine))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--leftovers-grace-s SECONDS`."""
    parser.addoption(
        "--leftovers-grace-s",
        type=float,
        default=15.0,
        help="longest time that processes may take to end",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Watch from the first process; the workers of pytest-xdist inherit its run id."""
    if not hasattr(config, "workerinput"):
        os.environ[RUN_ID] = uuid.uuid4().hex
        adopt = bool(config.getoption("numprocesses", None))
        config.pluginmanager.register(
            Leftovers(adopt=adopt, grace_s=config.getoption("leftovers_grace_s")), "leftovers"
        )


def _adopt_orphans() -> None:
    """Become the parent of every orphan below, and reap them as init would.

    Only in a process that runs no tests: it also reaps the workers of pytest-xdist, which nobody
    asks for their status."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    threading.Thread(target=_reap, daemon=True, name="reaper").start()


def _reap() -> None:
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:  # none at this moment
            time.sleep(0.1)


def _wait_gone(grace_s: float) -> list[Process]:
    deadline = time.monotonic() + grace_s
    while (found := of_this_run()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def of_this_run() -> list[Process]:
    """Live processes that tests started: they carry the run's id, or descend from this process."""
    me, run = os.getpid(), os.environ[RUN_ID]
    everything = {process.pid: process for process in _processes()}
    above, pid = {me}, me
    while pid in everything and (pid := everything[pid].parent) not in above:
        above.add(pid)

    def descends(process: Process | None) -> bool:
        while process is not None and process.pid != me:
            if process.parent == me:
                return True
            process = everything.get(process.parent)
        return False

    return [
        one
        for one in everything.values()
        if one.pid not in above
        and (one.environment.get(RUN_ID) == run or descends(one))
        and not any(name in one.command for name in _HELPERS)
    ]


def _processes() -> Iterator[Process]:
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = os.sysconf("SC_CLK_TCK")
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended, or belongs to another user
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            started_at = boot + int(fields[19]) / ticks
            pairs = (
                entry.partition("=")
                for entry in (directory / "environ").read_text(errors="replace").split("\0")
            )
            command = (directory / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
            yield Process(
                int(directory.name),
                int(fields[1]),
                command,
                started_at,
                {name: value for name, _, value in pairs},
            )


def machine_state() -> set[str]:
    """Mounts of our mount namespace, control groups of slots and instances, named network
    namespaces and network interfaces.

    A node agent's own control group is left out: an agent that is killed leaves it, empty, for its
    next life."""
    mounts = [
        line.partition(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()
    ]
    points = [(left.split()[4], right.split()[0]) for left, _, right in mounts]
    found = {f"mount {point}" for point, _ in points}
    for point, kind in points:
        if kind in ("cgroup", "cgroup2"):
            # other than Path.rglob it passes over directories that go away meanwhile
            walk = os.walk(point)
            found |= {
                f"{_GROUP} {above}/{name}"
                for above, names, _ in walk
                for name in names
                if re.search(r"/pilotlight-[0-9a-f]{12}$", above)
            }
    found |= {f"network namespace {path}" for path in Path("/run/netns").glob("*")}
    found |= {f"network interface {path.name}" for path in Path("/sys/class/net").glob("pl*")}
    return found
