"""Scripts that do one thing at a time when told to, each in a process and by an interpreter of its
own.

An order is one line of JSON on standard input, its answer one line `answer {json}` on standard
output. What is imported and connected before the first order is in nobody's figures: a comparison
of transfers should not measure how long an interpreter takes to start."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.network import DidNotStart

STOP_TIMEOUT_S = 10.0


class OrderFailed(Exception):
    """Raised when a script could not do what it was told; the message is what it said."""


class Worker:
    """A started script. Owner: the thread that started it."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, **order: Any) -> dict[str, Any]:
        """Do this; returns what came of it. Raises OrderFailed."""
        self.tell(**order)
        return self.answer()

    def tell(self, **order: Any) -> None:
        """Begin to do this. Raises OrderFailed."""
        assert self._process.stdin is not None  # pipes, see `hired`
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError as e:
            raise OrderFailed(f"it ended with status {self._process.wait()}: {self._said()}") from e

    def answer(self) -> dict[str, Any]:
        """Wait for what came of the last order. Raises OrderFailed."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                told: dict[str, Any] = json.loads(line.removeprefix("answer "))
                if "error" in told:
                    raise OrderFailed(f"{told['error']}: {self._said().rpartition(chr(10))[2]}")
                return told
        raise OrderFailed(f"it ended with status {self._process.wait()}: {self._said()}")

    def _said(self) -> str:
        return self._log.read_text().strip()[-2000:]


@contextlib.contextmanager
def hired(*command: str, environment: Mapping[str, str] | None = None) -> Iterator[Worker]:
    """Start a script; it is ready when this yields, and gone afterwards. Raises DidNotStart."""
    with (
        tempfile.TemporaryDirectory(prefix="plow", ignore_cleanup_errors=True) as home,
        (Path(home) / "log").open("w+") as log,
    ):
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {}), "HOME": home, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        worker = Worker(process, Path(home) / "log")
        try:
            try:
                worker.ask(ready=True)
            except OrderFailed as e:
                raise DidNotStart(f"{' '.join(command)}: {e}") from e
            yield worker
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    """The end of its input is the end of its work."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
