"""The writer's files: bounded, partitioned by function and hour, complete after a crash at each step,
and never twice."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from activator.prediction_log import spool as spools
from activator.prediction_log.spool import Spool

HOUR_S = 3600
MAX_BYTES = 1024**2


def convert(lines: Iterable[bytes]) -> tuple[bytes, int]:
    """Rows as lines, where a test does not look at Parquet."""
    rows = list(lines)
    if b"damaged" in rows:
        raise ValueError("damaged")
    return b"\n".join(rows), len(rows)


OPEN: list[Disk] = []
"""Spools of the current test."""


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close files at the end, as the end of a process does."""
    yield
    while OPEN:
        OPEN.pop().crash()


class Disk(Spool):
    """A spool in a directory, with a clock that is set by hand."""

    def __init__(self, directory: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.seconds = 0.0
        super().__init__(
            directory, convert, max_bytes=max_bytes, max_age_s=60.0, now=lambda: self.seconds
        )
        self.recover()
        OPEN.append(self)

    def add(
        self, *rows: bytes, tenant: str = "t-1", function: str = "f-1", at_s: float = 0.0
    ) -> None:
        for row in rows:
            self.append(row, tenant=tenant, function=function, at_s=at_s, keep_s=HOUR_S)

    def crash(self) -> None:
        """End like a killed process: files stay as they are, the lock is released."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        for one in self._files.values():
            one.file.close()


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Files grow no further meanwhile, as on a full disk (setrlimit(2))."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def ready(directory: Path) -> dict[str, list[bytes]]:
    return {
        path.name: path.read_bytes().split(b"\n")
        for path in (directory / "ready").glob("*.parquet")
    }


def test_rows_are_partitioned_by_function_and_hour_and_named_so(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.add(b"1", b"2")
    disk.add(b"3", at_s=HOUR_S + 1)
    disk.add(b"4", function="f-2")
    disk.close()
    found = {
        name.rpartition("~")[0].rpartition("~")[0]: rows for name, rows in ready(tmp_path).items()
    }
    assert found == {
        "t-1~f-1~0~3600": [b"1", b"2"],
        "t-1~f-1~1~3600": [b"3"],
        "t-1~f-2~0~3600": [b"4"],
    }
    assert {name.rpartition("~")[2] for name in ready(tmp_path)} == {"2.parquet", "1.parquet"}
    assert not list((tmp_path / "open").iterdir())


def test_a_file_is_ready_when_it_is_old_or_large_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path)
    disk.add(b"1")
    disk.seconds = 59
    disk.rotate()
    assert ready(tmp_path) == {}
    assert disk.open_age_s == 59
    disk.seconds = 60
    disk.rotate()
    assert list(ready(tmp_path).values()) == [[b"1"]]
    monkeypatch.setattr(spools, "ROTATE_BYTES", 4)
    disk.add(b"22", b"3", b"4")
    assert sorted(ready(tmp_path).values()) == [[b"1"], [b"22", b"3"]]


def test_files_have_a_bound_and_one_tenant_half_of_it(tmp_path: Path) -> None:
    disk = Disk(tmp_path, max_bytes=100)
    disk.add(*[b"x" * 9] * 8)
    assert (disk.written, disk.dropped["spool_full"]) == (5, 3)
    disk.add(*[b"y" * 9] * 8, tenant="t-2")
    assert (disk.written, disk.dropped["spool_full"]) == (10, 6)
    disk.add(b"z", tenant="t-3")
    assert disk.dropped["spool_full"] == 7
    disk.close()


def test_there_is_room_again_once_files_were_shipped(tmp_path: Path) -> None:
    disk = Disk(tmp_path, max_bytes=4 * spools.MIN_BYTES)
    for function in ("f-1", "f-2"):
        disk.add(b"x", function=function)
    disk.rotate(all_files=True)
    disk.add(b"refused")
    assert disk.dropped["spool_full"] == 1
    for path in (tmp_path / "ready").iterdir():
        path.unlink()
    disk.rotate()
    disk.add(b"taken")
    assert (disk.written, disk.dropped["spool_full"]) == (3, 1)


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "MAX_OPEN", 2)
    disk = Disk(tmp_path)
    for number in range(5):
        disk.add(b"x", function=f"f-{number}")
    assert len(list((tmp_path / "open").iterdir())) == 2
    disk.close()
    assert len(ready(tmp_path)) == 5


def test_a_name_that_is_no_part_of_a_file_is_refused(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.add(b"x", function="../../etc/passwd")
    disk.add(b"x", tenant="a~b")
    assert (disk.written, disk.dropped["invalid"]) == (0, 2)


def test_rows_of_a_killed_process_are_converted_by_the_next_without_a_torn_one(
    tmp_path: Path,
) -> None:
    disk = Disk(tmp_path)
    disk.add(b"1", b"2")
    (path,) = (tmp_path / "open").iterdir()
    with path.open("ab") as file:
        file.write(b"torn")
    disk.crash()
    Disk(tmp_path).close()
    assert list(ready(tmp_path).values()) == [[b"1", b"2"]]


def test_a_kill_between_the_two_files_makes_the_same_file_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.add(b"1", b"2")
    (path,) = (tmp_path / "open").iterdir()
    disk.crash()
    text = path.read_bytes()
    Disk(tmp_path).close()
    before = ready(tmp_path)
    path.write_bytes(text)  # as if the process had been killed before it removed the rows
    (tmp_path / "ready" / "half.part").write_bytes(b"half")
    Disk(tmp_path).close()
    assert ready(tmp_path) == before
    assert not list((tmp_path / "ready").glob("*.part"))


def test_a_failing_disk_drops_rows_and_leaves_whole_ones(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.add(b"1")
    with files_up_to(4):  # a part of the next row fits
        disk.add(b"22222")
    disk.add(b"3")
    assert (disk.written, disk.dropped["disk"]) == (2, 1)
    disk.close()
    assert list(ready(tmp_path).values()) == [[b"1", b"3"]]


def test_rows_that_cannot_be_converted_now_are_tried_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.add(b"1")
    with files_up_to(0):
        disk.rotate(all_files=True)
    assert ready(tmp_path) == {}
    disk.rotate()
    assert list(ready(tmp_path).values()) == [[b"1"]]


def test_damaged_rows_are_counted_and_do_not_stop_others(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.add(b"damaged", function="f-1")
    disk.add(b"1", function="f-2")
    disk.rotate(all_files=True)
    assert disk.dropped["invalid"] == 1
    assert list(ready(tmp_path).values()) == [[b"1"]]
    disk.close()


def test_one_process_has_the_directory(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    with (tmp_path / "lock").open() as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        disk.close()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
