"""Which log is whose: the read side of logs."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from snapshotter.errors import LogsBusy
from snapshotter.slots.log_owners import LogOwners
from snapshotter.slots.logs import MAX_READS, LogQuery, Logs

LINE = "2026-11-01T00:00:00+00:00 stdout - text\n"
MINE = {"tenant": "t-1"}


def write(directory: Path, name: str, labels: dict[str, str]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps({"labels": labels}))
    (directory / f"{name}.log").write_text(LINE)


async def texts(logs: Logs, name: str | None) -> list[str]:
    return [line["text"] async for line in logs.read(LogQuery(labels=MINE, instance_id=name))]


async def test_only_logs_with_the_labels_asked_for_are_read(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "logs")
    write(tmp_path / "logs", "i-mine", MINE)
    write(tmp_path / "logs", "i-theirs", {"tenant": "t-2"})

    assert await texts(logs, None) == ["text"]
    assert await texts(logs, "i-mine") == ["text"]
    assert await texts(logs, "i-theirs") == []


@pytest.mark.parametrize(
    "name", ["../elsewhere/forged", "{root}/elsewhere/forged", "./i-mine", "i-mine\n", ""]
)
async def test_what_is_no_name_of_an_instance_leads_nowhere(tmp_path: Path, name: str) -> None:
    logs = Logs(tmp_path / "logs")
    write(tmp_path / "elsewhere", "forged", MINE)

    assert await texts(logs, name.format(root=tmp_path)) == []


async def test_the_tail_of_a_log_has_no_line_before_one_was_printed(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "logs")
    assert await logs.tail("i-new") == []
    write(tmp_path / "logs", "i-new", MINE)
    assert await logs.tail("i-new") == ["text"]
    (tmp_path / "logs/i-new.log").write_text("")
    assert await logs.tail("i-new") == []


async def test_a_line_of_several_calls_is_each_ones(tmp_path: Path) -> None:
    write(tmp_path / "logs", "i-mine", MINE)
    (tmp_path / "logs/i-mine.log").write_text(
        LINE.replace(" - ", " req-1,req-2 ") + LINE.replace(" - text", " req-12 other")
    )

    found = {
        call: [
            line["text"]
            async for line in Logs(tmp_path / "logs").read(LogQuery(labels=MINE, call_id=call))
        ]
        for call in ("req-1", "req-2", "req-12", "req-3", "req-1,req-2")
    }

    assert found == {
        "req-1": ["text"],
        "req-2": ["text"],
        "req-12": ["other"],
        "req-3": [],
        "req-1,req-2": [],
    }


def fill(
    directory: Path, name: str, *, started_at: float, minutes: list[int], text: str = "text"
) -> None:
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps({"labels": MINE, "started_at": started_at}))
    (directory / f"{name}.log").write_text(
        "".join(
            f"2026-11-01T00:{minute:02}:00+00:00 stdout - {text} {minute}\n" for minute in minutes
        )
    )


async def test_logs_that_begin_at_different_times_are_read_as_one(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "logs")
    began = 1793491200.0  # 2026-11-01T00:00:00Z
    fill(tmp_path / "logs", "i-3", started_at=began + 239, minutes=[4, 4, 7])
    fill(tmp_path / "logs", "i-1", started_at=began, minutes=[0, 1, 5])
    fill(tmp_path / "logs", "i-2", started_at=began + 60, minutes=[1, 2, 3])
    fill(tmp_path / "logs", "i-4", started_at=began + 1e6, minutes=[6])  # its clock was wrong

    found = [(line["instance"], line["text"]) async for line in logs.read(LogQuery(labels=MINE))]

    order = [
        "i-1 0",
        "i-1 1",
        "i-2 1",
        "i-2 2",
        "i-2 3",
        "i-3 4",
        "i-3 4",
        "i-1 5",
        "i-3 7",
        "i-4 6",
    ]
    assert [f"{name} {text.removeprefix('text ')}" for name, text in found] == order


@pytest.mark.slow  # a log of many megabytes
async def test_a_reader_that_does_not_go_on_costs_the_memory_of_a_batch(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "logs")
    write(tmp_path / "logs", "i-mine", MINE)
    (tmp_path / "logs/i-mine.log").write_text(LINE * 100_000)
    tracemalloc.start()
    try:
        lines = logs.read(LogQuery(labels=MINE))
        assert (await anext(lines))["text"] == "text"
        assert tracemalloc.get_traced_memory()[1] < 2_000_000, "100,000 lines are 50 MB"
        assert sum([1 async for _ in lines]) == 99_999
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("tail", [100, 201, 18_000])
async def test_a_long_tail_costs_the_memory_of_a_batch(tmp_path: Path, tail: int) -> None:
    logs = Logs(tmp_path / "logs")
    write(tmp_path / "logs", "i-mine", MINE)
    (tmp_path / "logs/i-mine.log").write_text(
        "".join(LINE.replace("text", str(number)) for number in range(20_000))
    )
    tracemalloc.start()
    try:
        found = logs.read(LogQuery(labels=MINE, tail=tail))
        assert (await anext(found))["text"] == str(20_000 - tail)
        assert sum([1 async for _ in found]) == tail - 1
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


async def test_lines_printed_while_a_long_tail_is_read_are_none_of_it(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "logs")
    write(tmp_path / "logs", "i-mine", MINE)
    (tmp_path / "logs/i-mine.log").write_text(LINE * 10_000)
    found = logs.read(LogQuery(labels=MINE, tail=9_000))
    await anext(found)
    with (tmp_path / "logs/i-mine.log").open("a") as f:
        f.write(LINE.replace("text", "newer") * 1_000)

    assert [line["text"] async for line in found] == ["text"] * 8_999


async def test_lines_that_are_not_wanted_are_passed_over_in_steps(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "logs")
    write(tmp_path / "logs", "i-mine", MINE)
    (tmp_path / "logs/i-mine.log").write_text(
        LINE * 20_000 + LINE.replace(" - text", " req-1 found") + LINE * 20_000
    )

    assert [line["text"] async for line in logs.read(LogQuery(labels=MINE, call_id="req-1"))] == [
        "found"
    ]
    assert [
        line["text"] async for line in logs.read(LogQuery(labels=MINE, call_id="req-1", tail=5))
    ] == ["found"]
    assert len([line async for line in logs.read(LogQuery(labels=MINE, tail=5))]) == 5


async def test_a_tenant_has_few_readers_of_logs_at_once(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "logs")
    for name, labels in (("i-mine", MINE), ("i-theirs", {"tenant": "t-2"})):
        write(tmp_path / "logs", name, labels)
        (tmp_path / f"logs/{name}.log").write_text(LINE * 1000)
    readers = [logs.read(LogQuery(labels=MINE)) for _ in range(MAX_READS)]
    for reader in readers:
        await anext(reader)

    with pytest.raises(LogsBusy, match="4 requests already read logs of this tenant") as busy:
        await anext(logs.read(LogQuery(labels=MINE)))
    assert busy.value.detail == {"limit": 4, "retry_after_s": 5}
    assert (await anext(logs.read(LogQuery(labels={"tenant": "t-2"}))))["text"] == "text"
    following = logs.follow(LogQuery(labels=MINE))
    assert (await anext(following))["text"] == "text"
    await readers[0].aclose()
    assert len(await texts(logs, None)) == 1000
    for open_one in (*readers, following):
        await open_one.aclose()


class CountedLogs(Logs):
    """Counts how often somebody who follows looks at logs, and how often all of them are asked
    for."""

    looks = listings = 0

    def _names(self, query: LogQuery) -> list[str]:
        self.listings += 1
        return super()._names(query)

    def _new_lines(self, *args: Any) -> Iterator[Any]:
        self.looks += 1
        return super()._new_lines(*args)


def append(directory: Path, name: str, text: str) -> None:
    with (directory / f"{name}.log").open("a") as f:
        f.write(LINE.replace("text", text))


async def texts_until(lines: AsyncIterator[Any], last: str) -> list[str]:
    found: list[str] = []
    async for line in lines:
        found.append(line["text"])
        if found[-1] == last:
            break
    return found


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.to_thread(int)


async def test_who_follows_looks_at_its_own_logs_and_not_at_each_line(tmp_path: Path) -> None:
    logs = CountedLogs(tmp_path)
    write(tmp_path, "i-mine", MINE)
    write(tmp_path, "i-theirs", {"tenant": "t-2"})
    loop = asyncio.get_running_loop()
    lines = logs.follow(LogQuery(labels=MINE))
    assert (await anext(lines))["text"] == "text"
    following = asyncio.ensure_future(anext(lines))
    while logs.listings < 3:  # where each log ends, what is in it, and what was written meanwhile
        await turns(1)
    listings = logs.listings
    for _ in range(20):
        append(tmp_path, "i-theirs", "other")
        await turns(5)
    append(tmp_path, "i-mine", "0")
    assert (await following)["text"] == "0"
    assert logs.looks == 2, "at the beginning, and for the line"
    assert logs.listings == listings, "only the log that was written is looked at"

    began, before, number = loop.time(), logs.looks, 0
    reading = asyncio.ensure_future(texts_until(lines, "last"))
    while loop.time() < began + 0.4:
        append(tmp_path, "i-mine", str(number := number + 1))
        await turns(5)
    append(tmp_path, "i-mine", "last")
    assert await reading == [*map(str, range(1, number + 1)), "last"]
    assert logs.looks - before <= 2 + (loop.time() - began) * 4, (
        "a quarter of a second lies between two looks"
    )
    await lines.aclose()


async def test_who_follows_hears_of_a_log_that_is_new(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    lines = logs.follow(LogQuery(labels=MINE))
    following = asyncio.ensure_future(anext(lines))
    await turns(5)
    logs.register("i-new", labels=MINE, revision="r", now=1.0)
    append(tmp_path, "i-new", "hello")
    assert (await following)["instance"] == "i-new"
    await lines.aclose()


async def test_readers_of_logs_leave_the_other_threads_alone(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    write(tmp_path, "i-mine", MINE)
    go = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        blocked = asyncio.ensure_future(asyncio.to_thread(go.wait, 60))
        try:
            async with asyncio.timeout(30):
                assert await texts(logs, None) == ["text"]
                assert (await anext(logs.follow(LogQuery(labels=MINE))))["text"] == "text"
        finally:
            go.set()
            await blocked


def test_whose_a_log_is_is_read_once(tmp_path: Path) -> None:
    write(tmp_path, "i-mine", MINE)
    write(tmp_path, "i-theirs", {"tenant": "t-2"})
    os.utime(tmp_path, (1, 1))
    owners = LogOwners(tmp_path)
    assert owners.names(MINE) == ["i-mine"]
    # which nobody reads any more
    (tmp_path / "i-theirs.json").write_text(json.dumps({"labels": MINE}))
    write(tmp_path, "i-3", MINE)
    os.utime(tmp_path, (1, 1))
    assert (owners.names(MINE), sorted(owners.names({}))) == (["i-mine"], ["i-mine", "i-theirs"])
    (tmp_path / "i-3.json").unlink()
    (tmp_path / "i-mine.json").unlink()
    write(tmp_path, "i-2", MINE)
    assert owners.names(MINE) == ["i-2"]
    assert repr(owners) == "<LogOwners 2 logs of 2 tenants>"
    write(tmp_path, "i-2", {"tenant": "t-2"})
    owners.invalidate("i-2")
    assert owners.names(MINE) == []
