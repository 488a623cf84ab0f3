"""Plugin: what collection leaves in memory is not looked at by the garbage collector.

A worker of pytest-xdist imports the whole suite and keeps it: some millions of objects. Looking at
them again and again takes a sixth of the time of collection, and each full collection that a test
asks for would take a second."""

from __future__ import annotations

import gc


def pytest_configure() -> None:
    """Nothing of what is collected is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From here on as in any program. What is garbage by now stays: to find it takes a second."""
    gc.freeze()
    gc.enable()
