"""How pytest-xdist distributes the suite: `make test` runs it in several processes, a plain `pytest
PATH` in one.

A file is the unit of distribution, because its tests share fixtures of module scope, among them
whole platforms. Files that share a platform are one unit (`UNITS`): in two processes there would be
two of it, for the rest of the run. So are those with tests of the real vLLM: two engines at once do
not fit into a small machine's memory. The soak tests of a file (`tests/soak.py`) are a unit of their own
and come last, beginning with another file for each commit: where they may begin until a certain
time only (`--soak-until`, `tests/tiers.py`), other commits run the others. Units are told by names
of tests, because pytest-xdist 3.8 does not pass its groups on under pytest 9.2. Everything else may run beside anything: platforms,
ports, databases and directories are each test's own."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import execnet
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

from tests.soak import is_listed

LONGEST_FIRST = (
    "tests/e2e/test_snapshots.py",
    "tests/snapshotter/test_restore.py",
    "tests/e2e/test_snapshots_faults.py",
    "tests/e2e/test_cli.py",
    "tests/examples/test_examples.py",
    "tests/e2e/test_faults_processes.py",
    "tests/snapshotter/starts/test_prefork_pool.py",
    "tests/snapshotter/images/test_images.py",
    "tests/functions/controller/test_dashboard_browser.py",
    "tests/cluster/test_fake_nodes.py",
    "tests/snapshotter/test_engine.py",
    "tests/snapshotter/agent/test_agent.py",
    "tests/snapshotter/agent/test_weights.py",
    "tests/weight_cache/store/test_faults.py",
    "tests/e2e/",
    "tests/cluster/",
    "tests/snapshotter/",
)
"""Files and folders that take longest, in the order in which they start: a long one that starts
last keeps one worker busy while the others have nothing to do. Everything else follows in the order
of collection."""


PROGRAM = Path(__file__).with_name("worker_template.py")
TEMPLATE_END_S = 5.0
"""Longest time that the process that forks workers may take to end after them."""
NO_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Its environment, in which it imports NumPy and PyArrow without threads: a fork would not have
them. Workers get the run's environment."""

UNITS = {
    "vllm": (
        "tests/activator/llm/openai/test_real_engine.py",
        "tests/contracts/test_engine.py",
        "tests/e2e/test_language_model.py",
    ),
    "platform": (
        "tests/e2e/test_bad_input.py",
        "tests/e2e/test_calls_by_functions.py",
        "tests/e2e/test_cli.py",
        "tests/e2e/test_keys_of_processes.py",
        "tests/e2e/test_plan.py",
        "tests/e2e/test_sandboxes.py",
        "tests/e2e/test_streams.py",
        "tests/e2e/test_tenancy.py",
        "tests/e2e/test_weights.py",
    ),
    "mortal_platform": (
        "tests/e2e/test_batch_files.py",
        "tests/e2e/test_collections.py",
        "tests/e2e/test_jobs.py",
        "tests/e2e/test_replay.py",
        "tests/e2e/test_volumes.py",
    ),
    "examples": (
        "tests/examples/test_examples.py",
        "tests/examples/test_modal_style.py",
    ),
}
"""Files that are distributed together: those with tests of the real vLLM, those that share a
fixture of this name, and those that share the platform of the examples."""
_UNIT_OF = {file: unit for unit, files in UNITS.items() for file in files}


class WorkerTemplate:
    """Plugin of pytest's first process: owns the process that forks workers, from their start to
    the end of the run."""

    def __init__(self, config: pytest.Config) -> None:
        self._arguments = [str(argument) for argument in config.invocation_params.args]
        self._owned = contextlib.ExitStack()
        config.add_cleanup(self._owned.close)

    def pytest_xdist_setupnodes(self, specs: Sequence[execnet.XSpec]) -> None:
        """Each worker on this machine is a fork."""
        local = [spec for spec in specs if spec.popen and spec.python is None]
        if local:
            path = self._start()
        for spec in local:
            spec.python = shlex.join([sys.executable, "-I", "-S", str(PROGRAM), path])

    def pytest_sessionfinish(self) -> None:
        """The process that forks ends with its last worker: they have ended by now."""
        self._owned.close()

    def _start(self) -> str:
        """Start it; returns the path of its socket."""
        directory = tempfile.TemporaryDirectory(prefix="plxw", ignore_cleanup_errors=True)
        path = f"{self._owned.enter_context(directory)}/s"
        owner, owned = socket.socketpair()
        with owned, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(64)
            descriptors = [owned.fileno(), listener.fileno()]
            program = (
                f"import sys; sys.path[:] = {sys.path!r}; from tests import worker_template; "
                f"worker_template.main({descriptors}, {self._arguments!r})"
            )
            process = subprocess.Popen(
                [sys.executable, "-u", *(["-B"] * sys.dont_write_bytecode), "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env=os.environ | NO_THREADS,
            )
        self._owned.callback(_wait_or_kill, process)
        self._owned.enter_context(owner)  # closed first
        return path


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(TEMPLATE_END_S)
    except subprocess.TimeoutExpired:  # it imports still, as after an interrupt
        process.kill()
        process.wait()


def pytest_configure(config: pytest.Config) -> None:
    """Where files are the unit of distribution, as in `make test`."""
    if not hasattr(config, "workerinput") and config.getoption("dist", None) == "loadgroup":
        config.pluginmanager.register(WorkerTemplate(config), "worker-template")


class FileScheduling(LoadGroupScheduling):  # type: ignore[misc]  # no type information
    """A worker takes one unit at a time, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if is_listed(nodeid):
            return f"soak {file}"
        return _UNIT_OF.get(file, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling | None:
    """Replace the scheduler of `--dist loadgroup`, which would distribute the tests of a file one
    by one."""
    if config.getoption("dist") != "loadgroup":
        return None
    # by the number of tests: most tests are short, and the longest files have few
    config.option.loadscopereorder = False
    return FileScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker: put what takes longest first, and soak tests last."""
    if not hasattr(config, "workerinput"):
        return
    soak: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        (soak if is_listed(item.nodeid) else others).append(item)
    items[:] = [*sorted(others, key=_rank), *rotated(soak, config.getoption("soak_from"))]


def rotated(items: list[pytest.Item], start: str) -> list[pytest.Item]:
    """The same tests, beginning with a file that `start` chooses (any text, such as a commit)."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    files = sorted(by_file)
    first = zlib.crc32(start.encode()) % (len(files) or 1)
    return [item for file in files[first:] + files[:first] for item in by_file[file]]


def _rank(item: pytest.Item) -> int:
    last = len(LONGEST_FIRST)
    if item.get_closest_marker("vllm"):
        # takes all processors for minutes: beside short tests, not beside snapshots that are made
        # in the background
        return last
    return next(
        (rank for rank, prefix in enumerate(LONGEST_FIRST) if item.nodeid.startswith(prefix)),
        last + 1,
    )
