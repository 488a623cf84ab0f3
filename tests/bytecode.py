"""Plugin: bytecode, and what Hypothesis reads in sources, is made once, before the first test, in
one process for each processor.

Without it each worker of pytest-xdist parses every test and rewrites its asserts by itself, at the
same time as the others, and each process that a test starts compiles all that it imports (workers
of functions write no bytecode: `-B`). Likewise each worker would parse every module of the project
for the constants that Hypothesis tries as inputs: four seconds, for what it keeps in
`.hypothesis/constants`."""

from __future__ import annotations

import compileall
import importlib.util
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from _pytest.assertion import rewrite
from _pytest.assertion.rewrite import assertstate_key
from hypothesis.internal.constants_ast import constants_from_module, is_local_module_file

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
    work: list[Callable[[], None]] = []
    if config.getoption("numprocesses", None):
        work += [
            partial(_read_constants, file)
            for package in PACKAGES
            for file in sorted((ROOT / package).rglob("*.py"))
            if is_local_module_file(str(file))
        ]
    if assertstate_key in config.stash:
        work += [
            partial(_rewrite, file, config)
            for file in sorted((ROOT / "tests").rglob("*.py"))
            if _REWRITTEN.search(str(file))
        ]
    _share(work)


def _share(work: list[Callable[[], None]]) -> None:
    """Do it in one process for each processor. A process that fails leaves its share to the
    workers."""
    count = os.cpu_count() or 1
    children = []
    for share in range(count):
        if (child := os.fork()) == 0:
            try:
                for one in work[share::count]:
                    one()
            finally:
                os._exit(0)  # whatever happened: it is no pytest of its own
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _read_constants(file: Path) -> None:
    """Leave what Hypothesis finds in `file` where it looks for it."""
    module = ModuleType(file.stem)
    module.__file__ = str(file)
    constants_from_module(module)


def _rewrite(file: Path, config: pytest.Config) -> None:
    """As `AssertionRewritingHook.exec_module` of pytest does."""
    folder = rewrite.get_cache_dir(file)
    if not rewrite.try_makedirs(folder):
        return
    cached = folder / (file.name[:-3] + rewrite.PYC_TAIL)
    if rewrite._read_pyc(file, cached) is None:
        source, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[assertstate_key], code, source, cached)
