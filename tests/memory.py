"""What most tests write lies in memory, where the machine has room there.

They write little, and nobody reads it after them: databases, journals, sockets. A disk takes
milliseconds for each fsync, and where files are made and deleted by the thousands up to a tenth of
one for each file: PostgreSQL makes a database of 800 files in 0.02 s instead of 0.6. Tests of what
is about disks stay there (`FOLDERS` names the others): those of nodes and of caches of weights
mount, dump and read past the page cache, and so do whole platforms.

`TMPDIR` chooses another place for all, where directories of tests are kept as pytest keeps them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.fakes.trees import remove_tree

FOLDERS = (
    "tests/activator/",
    "tests/cluster/",
    "tests/contracts/",
    "tests/functions/",
    "tests/fuzz/",
    "tests/options/",
)
ON_DISK = ("tests/functions/worker/",)
"""Of these: workers are told which of their open files a snapshot takes in, by where they lie."""
MEMORY = Path("/dev/shm")
FREE_BYTES = 2 * 2**30
"""Room that there must be: clusters of PostgreSQL have 70 MB each, one for each process of the run
and some of single tests, and few tests write more than a megabyte."""
VARIABLE = "TEST_MEMORY_DIRECTORY"
"""Tells the workers of pytest-xdist where it is; empty: on the disk."""


def make_directory(config: pytest.Config) -> None:
    """The first process of a run makes a directory for all, and removes it at the end."""
    if hasattr(config, "workerinput"):
        return
    os.environ[VARIABLE] = ""
    if "TMPDIR" in os.environ or not _has_room():
        return
    directory = Path(tempfile.mkdtemp(prefix="pl", dir=MEMORY))
    directory.chmod(0o755)  # other users' processes have directories in it
    os.environ[VARIABLE] = str(directory)
    config.add_cleanup(lambda: remove_tree(directory))


def directory() -> str | None:
    """Where directories are made; None: where `tempfile` makes them."""
    return os.environ.get(VARIABLE) or None


def directory_of(nodeid: str) -> str | None:
    """The same for a test."""
    is_in_memory = nodeid.startswith(FOLDERS) and not nodeid.startswith(ON_DISK)
    return directory() if is_in_memory else None


def _has_room() -> bool:
    """In containers it is small, or nothing can be executed there."""
    try:
        found = os.statvfs(MEMORY)
    except OSError:
        return False
    is_usable = os.access(MEMORY, os.W_OK | os.X_OK) and not found.f_flag & os.ST_NOEXEC
    return is_usable and found.f_bavail * found.f_frsize >= FREE_BYTES
