"""What a slot's files are packed into at its snapshot point lies on the disk of the logs, and takes
no memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from snapshotter.shim.event_loop import Poller
from snapshotter.shim.log_capture import LogCapture


@pytest.fixture
def directory(tmp_path: Path) -> int:
    return os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)


def recorder(directory: int, *, floor_bytes: int = 0) -> LogCapture:
    return LogCapture(
        Poller(), lambda *_: None, directory=directory, max_bytes=1024, floor_bytes=floor_bytes
    )


@pytest.mark.parametrize("knows_unnamed_files", [True, False])
def test_the_file_lies_on_that_disk_and_has_no_name(
    tmp_path: Path, directory: int, monkeypatch: pytest.MonkeyPatch, knows_unnamed_files: bool
) -> None:
    if not knows_unnamed_files:
        # EISDIR, as of a file system without them
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    fd = recorder(directory).unnamed_file()
    try:
        assert os.write(fd, b"x") == 1
        assert (os.fstat(fd).st_dev, os.fstat(fd).st_nlink) == (tmp_path.stat().st_dev, 0)
        assert os.listdir(tmp_path) == []
    finally:
        os.close(fd)
        os.close(directory)


def test_below_the_floor_of_the_disk_there_is_none(directory: int) -> None:
    with pytest.raises(OSError, match="nearly full") as refused:
        recorder(directory, floor_bytes=1 << 60).unnamed_file()
    assert refused.value.errno == errno.ENOSPC
    os.close(directory)
