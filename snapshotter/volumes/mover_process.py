"""Runs `mover` for one operation, in a control group of its own, and reads its answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import uuid
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from snapshotter.errors import VolumeFailed
from snapshotter.linux.cgroups import Cgroups

MEMORY_BYTES = 1024**3
"""Of a mover: chunks on their way, and a manifest of 100,000 files; its page cache counts, and is
given back."""
CPU = 1.0
MAX_S = 3600.0
"""Of one operation: a sparse file of terabytes is read for hours."""
_LINE_BYTES = 64 * 1024**2


async def run_mover(cgroups: Cgroups, order: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    """Execute an order; yields its answers, the last of which has `done`. Raises VolumeFailed."""
    group = cgroups.make(f"volume-{uuid.uuid4().hex[:16]}", memory_bytes=MEMORY_BYTES, cpu=CPU)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "snapshotter.volumes.mover",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    is_done = False
    limit = asyncio.get_running_loop().call_later(MAX_S, _kill, child)
    try:
        for file in group.procs:
            Path(file).write_text(str(child.pid))
        # it reads its order after it is in the group
        child.stdin.write(json.dumps(order).encode() + b"\n")
        child.stdin.close()
        while line := await child.stdout.readline():
            answer = json.loads(line)
            if "error" in answer:
                raise VolumeFailed(answer["message"], {"reason": answer["error"]})
            is_done = "done" in answer
            yield answer
        if not is_done:
            status = await child.wait()
            raise VolumeFailed(
                f"the {order['op']} of the volume ended with status {status} before it was done: "
                f"try again",
                {"reason": "killed", "oom_kills": group.oom_kills()},
            )
    finally:
        limit.cancel()
        _kill(child)
        await asyncio.shield(_end(child, group))


def _kill(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.kill()


async def _end(child: asyncio.subprocess.Process, group: Any) -> None:
    await child.wait()
    await group.remove()
