"""Plugin: bytecode is made once, before the first test, in one process for each processor.

Without it each worker of pytest-xdist parses every test and rewrites its asserts by itself, at the
same time as the others, and each process that a test starts compiles all that it imports (workers
of functions write no bytecode: `-B`)."""

from __future__ import annotations

import compileall
import importlib.util
import os
import re
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from _pytest.assertion.rewrite import assertstate_key

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "activator",
    "snapshotter",
    "weight_cache",
    "functions/pilotlight",
    "benchmarks",
    "tests",
)
LARGE_LIBRARIES = ("kubernetes",)
"""What scripts/setup leaves to whoever imports it first: here all workers would, at the same
time."""
_REWRITTEN = re.compile(r"/(test_[^/]*|conftest)\.py$")
"""What pytest compiles in a way of its own."""


@pytest.hookimpl(tryfirst=True)  # before orphans are adopted, and children reaped
def pytest_configure(config: pytest.Config) -> None:
    """In pytest's first process; a file whose bytecode is current is left alone."""
    if hasattr(config, "workerinput"):
        return
    for package in PACKAGES:
        compileall.compile_dir(ROOT / package, quiet=2, rx=_REWRITTEN, workers=0)
    for library in LARGE_LIBRARIES:
        if (found := importlib.util.find_spec(library)) is not None:
            for place in found.submodule_search_locations or ():
                compileall.compile_dir(place, quiet=2, workers=0)
    if assertstate_key in config.stash:
        files = sorted((ROOT / "tests").rglob("*.py"))
        _rewrite([file for file in files if _REWRITTEN.search(str(file))], config)


def _rewrite(files: list[Path], config: pytest.Config) -> None:
    """Leave what pytest would make of `files` where it looks for it. A process that fails leaves
    its share to the workers."""
    count = os.cpu_count() or 1
    children = []
    for share in range(count):
        if (child := os.fork()) == 0:
            try:
                for file in files[share::count]:
                    _rewrite_one(file, config)
            finally:
                os._exit(0)  # whatever happened: it is no pytest of its own
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _rewrite_one(file: Path, config: pytest.Config) -> None:
    """As `AssertionRewritingHook.exec_module` of pytest does."""
    folder = rewrite.get_cache_dir(file)
    if not rewrite.try_makedirs(folder):
        return
    cached = folder / (file.name[:-3] + rewrite.PYC_TAIL)
    if rewrite._read_pyc(file, cached) is None:
        source, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[assertstate_key], code, source, cached)
