"""Runs the writer process (`activator.prediction_log.writer`), and gives it the rows that wait. It
is started when there is a first row, or when one before it left files."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from pathlib import Path
from typing import Any, Final

from activator.prediction_log.queue import PredictionQueue
from activator.prediction_log.spool import OPEN
from activator.prediction_log.writer import KEY_BYTES, MISSING_LIBRARY
from pilotlight.core.backoff import Backoff

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
STEADY_S: Final = 60.0
"""A process that ran for this long had no fault that a pause would help against."""
END_S: Final = 5.0
"""How long it may take at shutdown to convert what it has."""


class WriterSupervisor:
    """Starts the process, again after its death. Owner: the event loop; `run` is one task.

    Attributes:
        starts: processes that were started.
    """

    def __init__(
        self,
        queue: PredictionQueue,
        *,
        directory: Path,
        token: str,
        max_bytes: int,
        ship_s: float,
    ) -> None:
        """`token`: of the activators, from which the key of feature hashes is derived, so that all
        activators of a platform have the same."""
        self._queue = queue
        self._directory = directory
        self._key = hashlib.blake2b(
            token.encode(), person=b"prediction-log", digest_size=KEY_BYTES
        ).digest()
        self._arguments = (str(directory), str(max_bytes), str(ship_s))
        self._process: Process | None = None
        self._sent = 0
        self._report: dict[str, Any] = {}
        self._past: Counter[str] = Counter()
        self._past_written = 0
        self.starts = 0

    def __repr__(self) -> str:
        _, max_bytes, ship_s = self._arguments
        return (
            f"<WriterSupervisor {self.starts} starts, {self.written} rows written, at most "
            f"{max_bytes} bytes, ships each {ship_s} s>"
        )

    @property
    def pid(self) -> int | None:
        """Of the running process; None = there is none."""
        return self._process.pid if self._process is not None else None

    @property
    def written(self) -> int:
        """Rows in files."""
        return self._past_written + int(self._report.get("written", 0))

    @property
    def dropped(self) -> Counter[str]:
        """Rows that were lost, by reason; `writer`: they were with it when it died."""
        return self._past + Counter(self._report.get("dropped", {}))

    @property
    def used_bytes(self) -> int:
        """Bytes of its files."""
        return int(self._report.get("used_bytes", 0))

    @property
    def open_age_s(self) -> float:
        """Age of the oldest row that is in no ready file."""
        return float(self._report.get("open_age_s", 0.0))

    async def run(self) -> None:
        """Run the process, until cancelled; `aclose` ends it."""
        backoff = Backoff(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S)
        loop = asyncio.get_running_loop()
        if not any(self._leftovers()):
            await self._queue.is_filled.wait()
        while True:
            began = loop.time()
            try:
                await self._run_once()
            except OSError as e:
                log.warning("prediction log: writer does not start error=%s", e)
            if loop.time() - began > STEADY_S:
                backoff.reset()
            await backoff.pause()

    async def aclose(self) -> None:
        """Give the process what waits, and let it end. What it does not convert in END_S is
        converted by the next one."""
        process = self._process
        if process is None:
            return
        rest = []
        while len(self._queue):
            batch = self._queue.pop_batch()
            self._sent += len(batch)
            rest += [logged.encode() for logged in batch]
        try:
            async with asyncio.timeout(END_S):
                out, _ = await process.communicate(b"".join(rest))
            for line in out.splitlines(keepends=True):
                self._read_report(line)
        except (TimeoutError, ConnectionError, RuntimeError):
            # RuntimeError: uvloop's for a pipe whose reader has died
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self._ended(process)

    async def _run_once(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "activator.prediction_log.writer", *self._arguments),
            stdin=PIPE,
            stdout=PIPE,
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
        self._process = process
        self.starts += 1
        assert process.stdin is not None
        process.stdin.write(self._key)
        sending = asyncio.create_task(self._send(process), name="prediction rows")
        try:
            await self._follow(process)
            status = await process.wait()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        self._ended(process)
        why = "pyarrow is not installed" if status == MISSING_LIBRARY else f"status {status}"
        log.error("prediction log: the writer ended (%s); rows are dropped until it is back", why)

    async def _send(self, process: Process) -> None:
        assert process.stdin is not None
        try:
            while True:
                await self._queue.is_filled.wait()
                batch = self._queue.pop_batch()
                self._sent += len(batch)
                process.stdin.writelines([logged.encode() for logged in batch])
                await process.stdin.drain()
        except ConnectionError:
            return  # it died, which `_follow` sees

    async def _follow(self, process: Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._read_report(line)

    def _read_report(self, line: bytes) -> None:
        """Take a report, unless it is torn: the process was killed while it wrote it."""
        with contextlib.suppress(ValueError):
            self._report = json.loads(line)

    def _ended(self, process: Process) -> None:
        """Count the rows of a process that has ended, and those that were lost with it."""
        report = self._report
        kept, dropped = int(report.get("written", 0)), Counter[str](report.get("dropped", {}))
        self._past_written += kept
        self._past += dropped
        lost = self._sent - kept - dropped.total()
        if lost > 0 and process.returncode != 0:
            self._past["writer"] += lost
        self._report, self._sent = {}, 0
        self._process = None

    def _leftovers(self) -> list[Path]:
        return list((self._directory / OPEN).glob("*.ndjson"))
