"""Plugin: what collection leaves in memory is not looked at by the garbage collector, and what tests
leave is looked at less often than Python does by default.

A worker of pytest-xdist imports the whole suite and keeps it: some millions of objects. Looking at
them again and again takes a sixth of the time of collection, and each full collection that a test
asks for would take a second. Python's default is for programs that are short of memory: looking
after every 700 objects took a tenth of the time of the controller's tests."""

from __future__ import annotations

import gc

YOUNG = 10_000
"""New objects before the collector looks at them (Python: 700)."""


def pytest_configure() -> None:
    """Nothing of what is collected is garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From here on garbage is found. What is garbage by now stays: to find it takes a second."""
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    gc.enable()
