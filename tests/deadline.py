"""Plugin: a test that outlives its timeout ends its process, with all stacks on stderr.

pytest-timeout raises in whatever runs when the alarm comes. In a callback of an event loop asyncio
reports the exception to the loop's handler and goes on (`asyncio.events.Handle._run`), so that a
test whose loop has always something to do would never end. pytest-xdist fails such a test, names
it, and goes on in another process."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

GRACE_S = 60.0
"""For the stacks that pytest-timeout prints, and the teardown of fixtures."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Bound the whole test, fixtures included, by twice its timeout."""
    marker = item.get_closest_marker("timeout")
    given = marker.args[0] if marker and marker.args else item.config.getini("timeout")
    file = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(2 * float(given) + GRACE_S, exit=True, file=file)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
