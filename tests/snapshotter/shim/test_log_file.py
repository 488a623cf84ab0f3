"""The limits of one log file."""

from __future__ import annotations

import os
from pathlib import Path

from snapshotter.shim.log_file import LogFile


def test_the_allowance_is_a_burst_and_a_rate_and_counts_what_it_refuses(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    log = LogFile(directory, "i-1", max_bytes=2 * 1024 * 1024, now=100.0)
    assert log.allows(2 * 1024 * 1024, 100.0)
    assert not log.allows(1000, 100.0)
    assert log.allows(1024 * 1024, 101.0)
    assert log.dropped_bytes == 1000
    log.close()
    os.close(directory)


def test_lines_are_dropped_and_counted_below_the_floor_of_the_disk(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    log = LogFile(directory, "i-1", max_bytes=10_000, now=0.0, floor_bytes=1 << 60)
    log.write(b"a line\n")
    assert (log.dropped_bytes, (tmp_path / "i-1.log").read_bytes()) == (7, b"")
    log.close()
    log = LogFile(directory, "i-1", max_bytes=10_000, now=0.0, floor_bytes=1)
    log.write(b"a line\n")
    assert (log.dropped_bytes, (tmp_path / "i-1.log").read_bytes()) == (0, b"a line\n")
    log.close()
    os.close(directory)
