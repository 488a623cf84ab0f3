"""From a pipe to a bounded, greppable file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.shim.log_file import LogFile
from snapshotter.shim.log_pipe import LogPipe
from snapshotter.slots.logs import parse


class Bench:
    """A pipe whose writing end is ours."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self._directory_fd = os.open(directory, os.O_RDONLY)
        readable, self.writable = os.pipe()
        self.log = LogFile(self._directory_fd, "i-1", max_bytes=max_bytes, now=0.0)
        self.pipe = LogPipe(readable, "stdout", self.log)

    def say(self, data: bytes) -> None:
        os.write(self.writable, data)
        self.pipe.pump()

    def lines(self) -> list[tuple[str | None, str]]:
        raw = (self.directory / "i-1.log").read_bytes().splitlines()
        return [(line["call"], line["text"]) for r in raw if (line := parse("i-1", r)) is not None]

    def close(self) -> None:
        self.pipe.close()
        self.log.close()
        os.close(self._directory_fd)
        os.close(self.writable)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, 1024 * 1024)
    yield bench
    bench.close()


def test_lines_carry_the_call_that_printed_them(bench: Bench) -> None:
    bench.say(b"plain\n\x1ec-7\x1finside\n")
    assert bench.lines() == [(None, "plain"), ("c-7", "inside")]


def test_a_line_that_arrives_in_two_pieces_is_one_line(bench: Bench) -> None:
    bench.say(b"one ")
    bench.say(b"line\n")
    assert bench.lines() == [(None, "one line")]


def test_the_last_line_needs_no_newline(bench: Bench) -> None:
    os.write(bench.writable, b"last words")
    bench.pipe.drain()
    assert bench.lines() == [(None, "last words")]


def test_a_line_without_end_is_cut_not_kept_in_memory(bench: Bench) -> None:
    bench.say(b"x" * 20_000)
    assert [len(text) for _, text in bench.lines()] == [20_000]


def test_the_writer_leaving_is_told(bench: Bench) -> None:
    os.close(bench.writable)
    assert bench.pipe.pump() is False
    bench.writable = os.open("/dev/null", os.O_WRONLY)


def test_a_full_file_is_replaced_once_and_the_disk_stays_bounded(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    log = LogFile(directory, "i-1", max_bytes=1000, now=0.0)
    for _ in range(50):
        log.write(b"y" * 99 + b"\n")
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) <= 2000
    assert sorted(f.name for f in tmp_path.iterdir()) == ["i-1.log", "i-1.log.1"]
    log.close()
    os.close(directory)


def test_a_broken_line_is_skipped() -> None:
    assert parse("i-1", b"half a li") is None
    assert parse("i-1", b"not-a-time stdout - text\n") is None
