"""Which tests `make test-fast` runs: those that take no seconds and stay in their process.

`make test` runs all but `soak`, which are marked, or listed in `tests/soak.py`. They are `slow`,
and so is what drives a whole platform. A test that has a directory, a server or a process of its
own is `integration`: most are quick, together they take minutes. Which those are is read from their
fixtures; FILES names those that do without a fixture.

A test that takes longer than `SLOW_S`, its fixtures not counted, and is not marked `slow` is named
at the end of a run: as a reminder only, since a busy machine makes every test slow.

CI has a bounded time. `--soak-until TIME` skips each soak test that would begin later, `--soak-from
COMMIT` chooses with which file they begin (`tests/parallel.py`); the end of the run says how many
were left out."""

from __future__ import annotations

import time

import pytest

from tests.soak import is_soak

SLOW_S = 2.0
SLOW_MARKS = ("e2e", "vllm", "soak")
SLOW_FILES = (
    "tests/e2e/",
    "tests/examples/",
    "tests/fuzz/",
    "tests/activator/knative/test_process.py",  # a whole activator process over a cluster
    "tests/activator/billing/test_journal_drain.py",  # processes that are killed
    "tests/functions/controller/test_database_bounds.py",  # thousands of rows
    "tests/functions/controller/test_faults.py",  # starts controllers
    "tests/functions/worker/test_memory.py",  # workers with torch
    "tests/snapshotter/test_restore.py",  # real dumps and restores
)
FIXTURES = {
    "tmp_path",
    "tmp_path_factory",
    "short_tmp",
    "redis_server",
    "postgres_server",
    "s3_address",
    "seaweedfs_address",
    "image_registry",
    "controller",
    "api_server",
}
"""Directories, servers, and the applications of the controller and of an API server."""
FILES = (
    "tests/cluster/test_chart",
    "tests/contracts/",
    "tests/functions/cli/test_supervisor.py",
    "tests/functions/controller/test_elsewhere.py",
    "tests/functions/launcher/",
    "tests/functions/worker/test_",
    "tests/snapshotter/images/test_debian.py",
    "tests/test_benchmark_programs.py",
    "tests/test_http_clients.py",
    "tests/test_security_table.py",
    "tests/test_setup.py",
    "tests/weight_cache/sources/test_s3.py",
)
"""What starts processes or servers, or reads the whole tree."""


OUT_OF_TIME = "soak: --soak-until is over"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The time that soak tests have, and where they begin."""
    parser.addoption(
        "--soak-until",
        type=float,
        default=float("inf"),
        help="seconds since 1970 after which no soak test begins; those that are left are skipped",
    )
    parser.addoption(
        "--soak-from",
        default="",
        help="any text, such as a commit: chooses the file with which soak tests begin",
    )


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what comes too late."""
    if item.get_closest_marker("soak") and time.time() > item.config.getoption("soak_until"):
        pytest.skip(OUT_OF_TIME)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is `soak`, what is `slow` because of another mark or its file, and what is
    `integration`."""
    for item in items:
        if is_soak(item):
            item.add_marker("soak")
        if any(item.get_closest_marker(name) for name in SLOW_MARKS) or item.nodeid.startswith(
            SLOW_FILES
        ):
            item.add_marker("slow")
        if not FIXTURES.isdisjoint(getattr(item, "fixturenames", ())) or item.nodeid.startswith(
            FILES
        ):
            item.add_marker("integration")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the tests that came too late, and name those that should be marked."""
    late = [r for r in terminalreporter.getreports("skipped") if OUT_OF_TIME in str(r.longrepr)]
    if late:
        terminalreporter.section(f"{len(late)} soak tests were left out: --soak-until was over")
    reports = [
        report
        for report in terminalreporter.getreports("passed")
        if report.when == "call" and "slow" not in report.keywords
    ]
    unmarked = sorted(
        (report for report in reports if report.duration > SLOW_S),
        key=lambda report: -report.duration,
    )
    if unmarked:
        terminalreporter.section(f"Tests above {SLOW_S:g} s that are not marked slow")
        for report in unmarked:
            terminalreporter.line(f"{report.duration:5.1f} s {report.nodeid}")
