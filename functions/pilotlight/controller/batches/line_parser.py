"""The controller's side of the process that parses batch files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Any, Final

from pilotlight.controller.batches.line_process import REQUEST_S
from pilotlight.errors import Unavailable

START_S: Final = 20.0
RETRY_S: Final = 5.0


class LineParser:
    """Runs the process while there is work for it. Owner: the event loop's one task that uses
    it."""

    def __init__(self) -> None:
        self._process: Process | None = None

    def __repr__(self) -> str:
        return f"<LineParser {self.pid or 'idle'}>"

    @property
    def pid(self) -> int:
        """Of the process; 0 = it does not run."""
        return 0 if self._process is None else self._process.pid

    async def parse(self, data: bytes, *, endpoint: str, is_openai: bool) -> list[dict[str, Any]]:
        """Parse whole lines of a file (`line_process.parsed_lines`). Raises Unavailable."""
        head = json.dumps({"endpoint": endpoint, "is_openai": is_openai}).encode()
        found = await self._ask(head, data)
        return await asyncio.to_thread(json.loads, found)

    async def compose(self, ended: Sequence[dict[str, Any]]) -> bytes:
        """Return lines of an output or error file (`line_process.composed`). Raises
        Unavailable."""
        data = await asyncio.to_thread(json.dumps, ended)
        return await self._ask(b"{}", data.encode())

    async def _ask(self, head: bytes, data: bytes) -> bytes:
        try:
            process = self._process or await self._start()
            assert process.stdin is not None
            if process.stdin.is_closing():  # uvloop raises RuntimeError for a write to it
                raise EOFError
            async with asyncio.timeout(REQUEST_S + 5):
                for frame in (head, data):
                    process.stdin.write(len(frame).to_bytes(4, "big") + frame)
                await process.stdin.drain()
                return await _read(process)
        except (OSError, EOFError, TimeoutError) as e:
            await self.aclose()
            raise Unavailable(
                f"the process that parses batch files has ended ({type(e).__name__})",
                retry_after_s=RETRY_S,
            ) from e
        except BaseException:
            await self.aclose()
            raise

    async def _start(self) -> Process:
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pilotlight.controller.batches.line_process",
            stdin=PIPE,
            stdout=PIPE,
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
        )
        async with asyncio.timeout(START_S):
            await _read(process)
        return process

    async def aclose(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


async def _read(process: Process) -> bytes:
    assert process.stdout is not None
    size = int.from_bytes(await process.stdout.readexactly(4), "big")
    return await process.stdout.readexactly(size)
