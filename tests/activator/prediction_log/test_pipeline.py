"""From the queue to the store with the real writer process: kills, a dead store, no pyarrow, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from activator.prediction_log import writer_supervisor
from activator.prediction_log.frames import FrameReader
from activator.prediction_log.pipeline import PredictionLogs
from activator.prediction_log.queue import PredictionQueue
from activator.prediction_log.shipper import PutResult
from pilotlight.core.transport.endpoint import Endpoint
from tests.activator.prediction_log.rows import MemoryStore, logged, read_rows, rows_below

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]  # real processes, which load pyarrow
PATIENCE_S = 60.0


def put(queue: PredictionQueue, *numbers: int, function_id: str = "f-1") -> None:
    """Queue calls."""
    for number in numbers:
        queue.put(logged(number, function_id=function_id))


async def until(is_so: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < limit, what
        await asyncio.sleep(0.02)


@asynccontextmanager
async def running(
    directory: Path, store: MemoryStore | None = None, *, ship_s: float = 0.2
) -> AsyncIterator[PredictionLogs]:
    """The logs of an activator."""
    logs = PredictionLogs(
        directory=directory,
        controller=Endpoint.at(directory / "controller.sock"),
        token="t",
        max_bytes=2**24,
        ship_s=ship_s,
        store=store or MemoryStore(),
    )
    task = asyncio.create_task(logs.run())
    try:
        yield logs
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await logs.aclose()


async def test_rows_arrive_as_parquet_and_nothing_runs_before_the_first(tmp_path: Path) -> None:
    store = MemoryStore()
    async with running(tmp_path, store) as logs:
        await asyncio.sleep(0.05)
        assert logs.writer.starts == 0
        put(logs.queue, 1, 2, 3)
        await until(lambda: logs.shipper.shipped == 3, "rows are not shipped")
    (row, *_) = (row for data in store.files.values() for row in read_rows(data))
    assert str(row["cost"]) == "0.000001234567"
    assert (row["input"], row["output"], row["version"]) == ('{"x":1}', "2", "v1")
    assert logs.dropped().total() == 0
    backlog = {one.name: one.samples[0].value for one in logs.collect()}
    assert backlog["pilotlight_predictions_stored"] == 3
    assert backlog["pilotlight_predictions_backlog_seconds"] == 0


async def test_at_shutdown_what_waits_is_written_and_shipped(tmp_path: Path) -> None:
    store = MemoryStore()
    async with running(tmp_path, store, ship_s=3600) as logs:
        put(logs.queue, *range(50))
        await until(lambda: logs.writer.written == 50, "rows are not written")
        put(logs.queue, *range(50, 100))
    assert len(store.ids()) == len(set(store.ids())) == 100


async def test_a_killed_writer_is_replaced_and_what_it_had_written_arrives_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_supervisor, "FIRST_PAUSE_S", 0.05)
    store = MemoryStore()
    async with running(tmp_path, store, ship_s=3600) as logs:
        put(logs.queue, *range(20))
        await until(lambda: logs.writer.written == 20, "rows are not written")
        assert logs.writer.pid is not None
        os.kill(logs.writer.pid, signal.SIGKILL)
        put(logs.queue, *range(20, 40))
        await until(lambda: logs.writer.starts == 2 and not len(logs.queue), "no other writer")
    ids = store.ids()
    assert len(ids) == len(set(ids))
    assert {f"req-{number}" for number in range(20)} <= set(ids)
    assert len(ids) + logs.dropped()["writer"] == 40


async def test_a_stopped_writer_takes_no_memory_beyond_the_bound_and_holds_up_nobody(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, ship_s=3600) as logs:
        put(logs.queue, 1)
        await until(lambda: logs.writer.written == 1, "rows are not written")
        pid = logs.writer.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            put(logs.queue, *range(2, 2000))
            await asyncio.sleep(0.1)
            assert time.monotonic() - began < PATIENCE_S / 10
            assert len(logs.queue) > 0, "the pipe took everything"
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: logs.writer.written == 1999, "the writer does not go on")


async def test_a_dead_store_is_a_backlog_and_no_loss(tmp_path: Path) -> None:
    store = MemoryStore()
    store.answers = [httpx.ConnectError("down")]
    async with running(tmp_path, store) as logs:
        put(logs.queue, 1)
        await until(lambda: store.puts == 1 and rows_below(tmp_path), "nothing was tried")
        samples = {one.name: one.samples[0].value for one in logs.collect()}
        assert samples["pilotlight_predictions_backlog_seconds"] > 0
        await until(lambda: logs.shipper.shipped == 1, "it was not shipped later")
    assert store.ids() == ["req-1"]


async def test_a_slow_store_holds_up_no_rows(tmp_path: Path) -> None:
    gate = asyncio.Event()

    class Slow(MemoryStore):
        async def put(self, name: str, data: bytes) -> PutResult:
            await gate.wait()
            return await super().put(name, data)

    store = Slow()
    async with running(tmp_path, store) as logs:
        put(logs.queue, 1)
        await until(lambda: rows_below(tmp_path), "nothing is ready")
        put(logs.queue, 2)
        await until(lambda: len(rows_below(tmp_path)) == 2, "the writer waits for the store")
        gate.set()
        await until(lambda: logs.shipper.shipped == 2, "nothing is shipped later")
    assert store.ids() == ["req-1", "req-2"]


async def test_without_pyarrow_rows_are_dropped_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away = tmp_path / "away"
    away.mkdir()
    (away / "pyarrow.py").write_text("raise ImportError('not installed')\n")
    monkeypatch.syspath_prepend(str(away))
    async with running(tmp_path) as logs:
        put(logs.queue, 1, 2)
        await until(lambda: "pyarrow is not installed" in caplog.text, "nothing was logged")
        await until(lambda: logs.dropped()["writer"] == 2, "nothing was counted")


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.activator.prediction_log.rows import MemoryStore
from tests.activator.prediction_log.test_pipeline import put, running

async def main():
    async with running(Path(sys.argv[1]), MemoryStore(), ship_s=3600) as logs:
        number = 0
        while True:
            put(logs.queue, *range(number, number + 10))
            number += 10
            await asyncio.sleep(0.01)
            print(logs.writer.written, logs.writer.pid or 0, flush=True)

asyncio.run(main())
"""


async def test_after_a_killed_activator_the_next_one_ships_what_was_written_once(
    tmp_path: Path,
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", KILLED, str(tmp_path)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    written, writer = 0, 0
    while written < 100:
        written, writer = (int(word) for word in (await process.stdout.readline()).split())
    process.kill()
    await process.wait()
    # its writer reads to the end of its input, converts what it has, and ends
    store = MemoryStore()
    async with running(tmp_path, store) as logs:
        put(logs.queue, 10**9)
        await until(lambda: logs.shipper.shipped > written, "the rows of the killed one are lost")
        await until(lambda: logs.writer.written == 1, "the next one does not write")
    ids = store.ids()
    assert len(ids) == len(set(ids))
    assert len(ids) > written
    assert "req-1000000000" in ids
    await until(lambda: not Path(f"/proc/{writer}").exists(), "its writer goes on")


def test_frames_are_found_however_they_are_cut() -> None:
    data = b"".join(logged(number).encode() for number in range(3))
    for size in (1, 7, len(data)):
        reader = FrameReader()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        found = [one for piece in pieces for one in reader.feed(piece)]
        assert [one.facts["request_id"] for one in found] == ["req-0", "req-1", "req-2"]
        assert {one.input for one in found} == {b'{"x":1}'}
