"""What a build prints costs the agent little, and its last lines arrive in any case."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pilotlight.core.rpc import SendPart, serve_rpc
from snapshotter.agent.agent import describe
from snapshotter.client import AgentClient
from snapshotter.errors import ImageBuildFailed
from snapshotter.images.build_log import KEPT_LOGS, BuildLog
from snapshotter.images.build_output import (
    BYTES_PER_S,
    LAST_LINES,
    LINES_PER_S,
    MAX_LINE_BYTES,
    Output,
)
from snapshotter.images.build_sandbox import run_on_machine
from snapshotter.images.builder import LOG_TAIL_BYTES, log_tail
from snapshotter.images.images import Images
from snapshotter.images.interpreters import own_interpreter

FLOOD_S = 2.0
_FLOOD = f"""
import os, time
end = time.monotonic() + {FLOOD_S}
while time.monotonic() < end:
    os.write(1, b"\\n" * 65536)
os.write(1, b"the last words\\n")
"""


@pytest.mark.slow  # watches a command for two seconds
async def test_a_command_that_prints_empty_lines_without_end_holds_the_event_loop_for_milliseconds() -> (
    None
):
    lines: list[str] = []

    async def keep(batch: Sequence[str]) -> None:
        lines.extend(batch)

    running = asyncio.create_task(
        run_on_machine([sys.executable, "-S", "-c", _FLOOD], variables={}, on_lines=keep)
    )
    turns, began, began_at = [], time.thread_time(), time.monotonic()
    while not running.done():
        computed = time.thread_time()
        await asyncio.sleep(0)
        turns.append(time.thread_time() - computed)
        await asyncio.sleep(0.001)

    assert await running == 0
    assert max(turns) < 0.1, "one turn of the loop"
    assert time.thread_time() - began < FLOOD_S / 2, "a flood costs no core"
    assert (
        len(lines)
        < (max(FLOOD_S * 4, time.monotonic() - began_at) + 8) * LINES_PER_S + LAST_LINES + 2
    )
    assert lines.count("the last words") == 1
    assert sum("lines omitted" in line for line in lines[-LAST_LINES - 1 :]) == 1


def test_lines_beyond_the_rate_are_counted_and_said_once_at_the_end() -> None:
    output = Output(now=0.0)
    first = output.feed(b"".join(b"%d\n" % n for n in range(6000)), now=0.0)
    assert (first[:2], len(first)) == (["0", "1"], 8 * LINES_PER_S)
    assert (output.left_out, output.is_flooded) == (2000, True)

    assert output.feed(b"later\n", now=1.0) == ["later"]
    assert not output.is_flooded
    assert output.end() == [
        ("[2000 lines omitted: the command printed more than 500 lines or 262144 bytes per second]")
    ]


def test_the_last_lines_are_those_that_were_left_out() -> None:
    output = Output(now=0.0)
    output.feed(b"x\n" * 8 * LINES_PER_S, now=0.0)
    for n in range(100):
        assert output.feed(b"%d\n" % n, now=0.0) == []
    assert output.end()[1:] == [str(n) for n in range(100 - LAST_LINES, 100)]


def test_bytes_are_bounded_like_lines() -> None:
    output = Output(now=0.0)
    passed = sum(
        len(line) for _ in range(100) for line in output.feed((b"x" * 60_000 + b"\n"), now=0.0)
    )
    assert 7 * BYTES_PER_S < passed <= 8 * BYTES_PER_S
    assert sum(map(len, output.end())) < 100_000


def test_a_line_comes_whole_whatever_blocks_it_is_read_in_and_an_overlong_one_in_pieces() -> None:
    output = Output(now=0.0)
    assert output.feed(b"one\ntw", now=0.0) == ["one"]
    assert output.feed(b"o\r\nthree", now=0.0) == ["two"]
    assert output.end() == ["three"]

    pieces = [
        piece for _ in range(3) for piece in output.feed(b"x" * 40_000, now=0.0)
    ] + output.end()
    assert [len(piece) for piece in pieces] == [MAX_LINE_BYTES, 80_000 - MAX_LINE_BYTES, 40_000]
    assert output.left_out == 0


def test_a_log_of_a_build_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    (tmp_path / "b.log").write_text("of an earlier build")
    with BuildLog(tmp_path / "b.log", max_bytes=24) as log:
        log.write(["12345", "half of a pair: \udc80"[:5]])
        assert (tmp_path / "b.log").read_text() == "12345\nhalf \n", (
            "what is early can be read while it is built"
        )
        log.write(["x" * 100])
        log.write(["left", "out", "second", "last"])
    assert (tmp_path / "b.log").read_text() == "12345\nhalf \n[110 bytes omitted]\nsecond\nlast\n"
    with BuildLog(tmp_path / "b.log") as log:
        log.write(["\udc80"])
        log.write(["x" * 1023] * 2048)
    text = (tmp_path / "b.log").read_text()
    assert text.startswith("\\udc80\nxxx")
    assert len(text) < 1024 * 1024 + 100


def write_log(images: Path, number: int, uid: str, *, written_at: float) -> Path:
    images.mkdir(parents=True, exist_ok=True)
    log = images / f"{number:064x}{uid}.log"
    log.write_bytes(bytes(1000))
    os.utime(log, (written_at, written_at))
    return log


def test_logs_of_failed_builds_are_bounded_per_tenant_in_number_and_age(tmp_path: Path) -> None:
    images, root = Images(tmp_path, environ={}, requirements=()), tmp_path / "node" / "images"
    mine = [write_log(root, n, "-20001", written_at=100.0 + n) for n in range(18)]
    theirs = [write_log(root, 500 + n, "-20002", written_at=float(n)) for n in range(3)]
    built = write_log(root, 999, "-20001", written_at=1.0)
    built.with_suffix("").mkdir()
    assert images.prune_logs(keep_s=1000, now=1001.5) == 4
    assert set(root.glob("*.log")) == {*mine[2:], theirs[2], built}
    assert images.prune_logs(keep_s=1000, now=200.0, missing=(1500, 0)) == 2, "the oldest"
    assert images.prune_logs(keep_s=1000, now=200.0, missing=(0, 1)) == 1
    assert set(root.glob("*.log")) == {*mine[4:], built}


@pytest.mark.slow  # makes an environment
async def test_a_build_that_fails_removes_the_oldest_logs_of_its_tenant(tmp_path: Path) -> None:
    async def ignore(part: Mapping[str, Any]) -> None:
        pass

    images = Images(tmp_path, environ={}, requirements=())
    logs = [
        write_log(tmp_path / "node" / "images", n, "", written_at=100.0 + n)
        for n in range(KEPT_LOGS)
    ]
    missing = {
        "python": own_interpreter().version,
        "steps": [{"op": "copy", "blob": "0" * 64, "target": "x"}],
    }
    with pytest.raises(ImageBuildFailed, match="is not in the blob store"):
        await images.build(missing, uid=None, part=ignore)
    assert [log.exists() for log in logs] == [False] + [True] * (KEPT_LOGS - 1)


def test_the_log_of_a_failed_build_is_deleted_like_an_image(tmp_path: Path) -> None:
    images = Images(tmp_path, environ={}, requirements=())
    log = write_log(tmp_path / "node" / "images", 1, "-20001", written_at=1.0)
    assert images.delete("../" + log.stem, uid=20001) == 0
    assert log.exists()
    assert images.delete(f"{1:064x}", uid=20001) == 0
    assert not log.exists()


def test_the_tail_of_a_log_is_bounded_as_json_has_it() -> None:
    assert log_tail([]) == []
    assert log_tail(["one", "two"]) == ["one", "two"]
    assert log_tail(["first", "x" * 200, "last"], max_bytes=128) == ["x" * 10, "last"]
    for character in ("\0", "\U0001f600", "\ufffd", '"', "x"):
        tail = log_tail([character * 65_536] * 45)
        assert (
            LOG_TAIL_BYTES / 13
            < len(json.dumps(tail, separators=(",", ":")))
            <= LOG_TAIL_BYTES + 64
        )


async def test_a_failed_build_whose_last_lines_are_long_gets_its_answer(short_tmp: Path) -> None:
    async def build(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        raise ImageBuildFailed(
            "it failed", {"log_tail": log_tail(["\0" * 65_000] * 45), "step": "run"}
        )

    server = await serve_rpc(short_tmp / "s", {"build_image": build}, describe)
    client = AgentClient(short_tmp / "s")
    with pytest.raises(ImageBuildFailed, match="it failed") as failed:
        async for _ in client.build_image({}, uid=None):
            pass
    assert failed.value.detail["step"] == "run"
    assert set("".join(failed.value.detail["log_tail"])) == {"\0"}
    await client.aclose()
    server.close()
