"""Which logs are deleted, and which stay."""

from __future__ import annotations

import os
from pathlib import Path

from snapshotter.slots.log_pruning import LogPruner
from snapshotter.slots.logs import LogQuery, Logs


async def test_logs_of_the_dead_go_by_age_and_by_size_never_those_of_the_living(
    tmp_path: Path,
) -> None:
    logs = Logs(tmp_path)
    for number, name in enumerate(("old", "big", "new", "alive")):
        logs.register(name, labels={"app": "a"}, revision="r", now=0.0)
        (tmp_path / f"{name}.log").write_bytes(b"2026-11-20T10:00:00.000000Z stdout - x\n" * 10)
        os.utime(tmp_path / f"{name}.log", (1000.0 * number, 1000.0 * number))

    assert (
        LogPruner(tmp_path).prune(alive={"alive"}, keep_s=1500.0, total_bytes=400, now=2000.0) == 2
    )
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
    assert LogPruner(tmp_path).prune(alive=set(), keep_s=1e9, total_bytes=10**9, now=10.0) == 2
    assert sizes_of(logs).keys() == {"a-2.log", "a-3.log", *(f"b-{n}.log" for n in range(4))}, (
        "another tenant's stay"
    )


def test_logs_that_are_written_lose_their_older_file_when_the_tenant_is_over_its_bound(
    tmp_path: Path,
) -> None:
    logs = Logs(tmp_path)
    put_log(logs, "alive", "acme", 100, older=200, at=2.0, log_bytes=150)
    put_log(logs, "slot", "acme", 40, at=1.0, log_bytes=None)
    assert LogPruner(tmp_path).prune(alive={"alive"}, keep_s=1e9, total_bytes=10**9, now=10.0) == 1
    assert sizes_of(logs) == {"alive.log": 100}


def test_newest_start_says_what_the_bound_is(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    put_log(logs, "before", "acme", 100, at=1.0, log_bytes=10)
    put_log(logs, "after", "acme", 100, at=2.0, log_bytes=1000)
    assert LogPruner(tmp_path).prune(alive=set(), keep_s=1e9, total_bytes=10**9, now=10.0) == 0


def test_logs_of_the_dead_go_when_the_disk_is_below_its_floor(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    for number in range(4):
        put_log(logs, f"a-{number}", "acme", 100, at=float(number), log_bytes=None)
    assert (
        LogPruner(tmp_path).prune(
            alive={"a-0"}, keep_s=1e9, total_bytes=10**9, now=10.0, missing=(150, 0)
        )
        == 2
    )
    assert sizes_of(logs).keys() == {"a-0.log", "a-3.log"}


def test_logs_of_the_dead_go_when_inodes_are_below_their_floor(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    for number in range(4):
        put_log(logs, f"a-{number}", "acme", 100, at=float(number), log_bytes=None)
    assert (
        LogPruner(tmp_path).prune(
            alive={"a-0"}, keep_s=1e9, total_bytes=10**9, now=10.0, missing=(0, 4)
        )
        == 2
    ), "a log has three files"
    assert sizes_of(logs).keys() == {"a-0.log", "a-3.log"}
