"""Runs a short command with a time limit."""

from __future__ import annotations

import asyncio
from pathlib import Path


async def run_command(
    *argv: str | Path, timeout_s: float, stderr: int = asyncio.subprocess.DEVNULL
) -> tuple[int, bytes]:
    """Run a command without input; return its exit status and output. Raises OSError if it does not
    start, TimeoutError after killing it."""
    child = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=stderr
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, _ = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        raise
    return child.returncode or 0, out
