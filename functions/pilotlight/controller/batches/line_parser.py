"""The controller's side of the process that parses batch files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

from pilotlight.controller.batches import line_process
from pilotlight.core.compute.process import ComputeProcess, ComputeProcessLost
from pilotlight.errors import Unavailable

RETRY_S: Final = 5.0


class LineParser:
    """Runs the process while there is work for it. Owner: the event loop's one task that uses
    it."""

    def __init__(self) -> None:
        self._process: ComputeProcess | None = None

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
            if self._process is None:
                self._process = await ComputeProcess.start(line_process.__name__)
            async with asyncio.timeout(line_process.REQUEST_S + 5):
                return await self._process.ask(head, data)
        except (OSError, TimeoutError, ComputeProcessLost) as e:
            await self.aclose()
            raise Unavailable(
                f"the process that parses batch files has ended ({type(e).__name__})",
                retry_after_s=RETRY_S,
            ) from e
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await process.aclose()
