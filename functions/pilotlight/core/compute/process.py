"""A process that computes with what strangers sent, apart from an event loop that others depend on:
one request at a time, in frames (`loop`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from typing import Final, Self

START_S: Final = 30.0
"""How long a process may take to start: seconds on a machine under load."""


class ComputeProcessLost(Exception):
    """Raised when the process has ended, or ends, during a request."""


class ComputeProcess:
    """One process. Owner: its starter, for one request at a time; `aclose` kills it, as it has to
    after a request that was given up."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __repr__(self) -> str:
        return f"<ComputeProcess {self.pid}{' ended' if self.has_ended else ''}>"

    @classmethod
    async def start(cls, module: str, *arguments: str) -> Self:
        """Start a module that calls `loop.serve`. Raises OSError, TimeoutError,
        ComputeProcessLost."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            stdin=PIPE,
            stdout=PIPE,
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
        )
        started = cls(process)
        try:
            async with asyncio.timeout(START_S):
                await started._read()
        except BaseException:
            await started.aclose()
            raise
        return started

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended."""
        return self._process.returncode is not None

    async def ask(self, head: bytes, data: bytes) -> bytes:
        """Return its answer to a request. Raises ComputeProcessLost."""
        pipe = self._process.stdin
        assert pipe is not None
        if pipe.is_closing():  # uvloop raises RuntimeError for a write to it
            raise ComputeProcessLost("the process has ended")
        try:
            for frame in (head, data):
                pipe.write(len(frame).to_bytes(4, "big"))
                pipe.write(frame)
            await pipe.drain()
        except ConnectionError as e:
            raise ComputeProcessLost(str(e)) from e
        return await self._read()

    async def _read(self) -> bytes:
        pipe = self._process.stdout
        assert pipe is not None
        try:
            size = int.from_bytes(await pipe.readexactly(4), "big")
            return await pipe.readexactly(size)
        except asyncio.IncompleteReadError as e:
            raise ComputeProcessLost("the process has ended") from e

    async def aclose(self) -> None:
        """Kill it, and wait for its end."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
        await asyncio.sleep(0)  # lets the pipes' transports close
