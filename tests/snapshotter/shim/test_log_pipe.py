"""From a pipe to a bounded, greppable file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.shim.log_pipe import LogFile, LogPipe
from snapshotter.slots.logs import LogQuery, Logs, parse


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


def test_the_allowance_is_a_burst_and_a_rate_and_counts_what_it_refuses(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    log = LogFile(directory, "i-1", max_bytes=2 * 1024 * 1024, now=100.0)
    assert log.allows(2 * 1024 * 1024, 100.0)
    assert not log.allows(1000, 100.0)
    assert log.allows(1024 * 1024, 101.0)
    assert log.dropped_bytes == 1000
    log.close()
    os.close(directory)


async def test_logs_of_the_dead_go_by_age_and_by_size_never_those_of_the_living(
    tmp_path: Path,
) -> None:
    logs = Logs(tmp_path)
    for number, name in enumerate(("old", "big", "new", "alive")):
        logs.register(name, labels={"app": "a"}, revision="r", now=0.0)
        (tmp_path / f"{name}.log").write_bytes(b"2026-11-20T10:00:00.000000Z stdout - x\n" * 10)
        os.utime(tmp_path / f"{name}.log", (1000.0 * number, 1000.0 * number))

    assert logs.prune(alive={"alive"}, keep_s=1500.0, total_bytes=400, now=2000.0) == 2
    assert {p.stem for p in tmp_path.glob("*.json")} == {"new", "alive"}
    lines = [line async for line in logs.read(LogQuery(labels={"app": "a"}, tail=3))]
    assert len(lines) == 3


def put_log(
    logs: Logs,
    name: str,
    tenant: str,
    size: int,
    *,
    at: float,
    log_bytes: int | None,
    older: int = 0,
) -> None:
    logs.register(name, labels={"tenant": tenant}, revision="r", now=at, log_bytes=log_bytes)
    for suffix, length in ((".log", size), (".log.1", older)):
        (logs.directory / f"{name}{suffix}").write_bytes(b"x" * length)
        os.utime(logs.directory / f"{name}{suffix}", (at, at))


def sizes_of(logs: Logs) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in logs.directory.glob("*.log*") if p.stat().st_size}


def test_logs_of_a_tenant_are_bounded_and_the_oldest_go_first(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    for number in range(4):
        put_log(logs, f"a-{number}", "acme", 100, at=float(number), log_bytes=250)
        put_log(logs, f"b-{number}", "beta", 100, at=float(number), log_bytes=None)
    assert logs.prune(alive=set(), keep_s=1e9, total_bytes=10**9, now=10.0) == 2
    assert sizes_of(logs).keys() == {"a-2.log", "a-3.log", *(f"b-{n}.log" for n in range(4))}, (
        "another tenant's stay"
    )


def test_logs_that_are_written_lose_their_older_file_when_the_tenant_is_over_its_bound(
    tmp_path: Path,
) -> None:
    logs = Logs(tmp_path)
    put_log(logs, "alive", "acme", 100, older=200, at=2.0, log_bytes=150)
    put_log(logs, "slot", "acme", 40, at=1.0, log_bytes=None)
    assert logs.prune(alive={"alive"}, keep_s=1e9, total_bytes=10**9, now=10.0) == 1
    assert sizes_of(logs) == {"alive.log": 100}


def test_newest_start_says_what_the_bound_is(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    put_log(logs, "before", "acme", 100, at=1.0, log_bytes=10)
    put_log(logs, "after", "acme", 100, at=2.0, log_bytes=1000)
    assert logs.prune(alive=set(), keep_s=1e9, total_bytes=10**9, now=10.0) == 0


def test_logs_of_the_dead_go_when_the_disk_is_below_its_floor(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    for number in range(4):
        put_log(logs, f"a-{number}", "acme", 100, at=float(number), log_bytes=None)
    assert logs.prune(alive={"a-0"}, keep_s=1e9, total_bytes=10**9, now=10.0, missing=(150, 0)) == 2
    assert sizes_of(logs).keys() == {"a-0.log", "a-3.log"}


def test_logs_of_the_dead_go_when_inodes_are_below_their_floor(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    for number in range(4):
        put_log(logs, f"a-{number}", "acme", 100, at=float(number), log_bytes=None)
    assert (
        logs.prune(alive={"a-0"}, keep_s=1e9, total_bytes=10**9, now=10.0, missing=(0, 4)) == 2
    ), "a log has three files"
    assert sizes_of(logs).keys() == {"a-0.log", "a-3.log"}


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


def test_a_broken_line_is_skipped() -> None:
    assert parse("i-1", b"half a li") is None
    assert parse("i-1", b"not-a-time stdout - text\n") is None
