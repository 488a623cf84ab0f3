"""Which tests `make test-fast` runs: those that take no seconds. What drives a whole platform is `slow` because of that, and so is `soak`.

A test that takes longer than `SLOW_S`, its fixtures not counted, and is not marked `slow` is named at the end of a run: as a reminder
only, since a busy machine makes every test slow.
"""

from __future__ import annotations

import pytest

SLOW_S = 2.0
SLOW_MARKS = ("e2e", "vllm", "soak")
SLOW_FOLDERS = ("tests/e2e/", "tests/examples/", "tests/fuzz/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `slow` what is marked `e2e`, `vllm` or `soak`, and whole folders."""
    for item in items:
        if any(item.get_closest_marker(name) for name in SLOW_MARKS) or item.nodeid.startswith(SLOW_FOLDERS):
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that should be marked."""
    reports = [report for report in terminalreporter.getreports("passed") if report.when == "call" and "slow" not in report.keywords]
    unmarked = sorted((report for report in reports if report.duration > SLOW_S), key=lambda report: -report.duration)
    if unmarked:
        terminalreporter.section(f"Tests above {SLOW_S:g} s that are not marked slow")
        for report in unmarked:
            terminalreporter.line(f"{report.duration:5.1f} s {report.nodeid}")
