"""Releases an engine's GPU memory while its instance is suspended, and restores it on resume.

Uses vLLM's documented endpoints, in its order (docs: "Sleep Mode"): level 1 keeps the weights in
DRAM, level 2 drops them, so that they are loaded again from their files. An engine on a CPU has no
such mode, and other functions have no engine: they are only frozen."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from activator.worker_client.address import connect
from activator.worker_client.connection import WorkerConnection, WorkerConnectionLost
from pilotlight.spec.function import FunctionSpec
from snapshotter import errors as agent_errors

SLEEP_S = 60.0
"""Time to copy 80 GB from the GPU at 2 GB/s, a pessimistic rate; dropping is much faster."""
WAKE_S = 120.0
"""Time to read 80 GB from the page cache, pessimistically."""
STATE_S = 10.0
"""Timeout of the sleep state request."""


async def suspend(spec: FunctionSpec, socket: str) -> None:
    """Release the GPU's memory. Raises SnapshotterError if the engine does not."""
    if spec.engine is not None and spec.resources.gpu:
        await _post(socket, f"/sleep?level={spec.engine.sleep_level}", deadline_s=SLEEP_S)


async def resume(spec: FunctionSpec, socket: str) -> None:
    """Restore the GPU's memory, weights first. Raises SnapshotterError if the engine does
    not."""
    if spec.engine is None or not spec.resources.gpu:
        return
    await _post(socket, "/wake_up?tags=weights", deadline_s=WAKE_S)
    if spec.engine.sleep_level == 2:
        await _post(socket, "/collective_rpc", {"method": "reload_weights"}, deadline_s=WAKE_S)
    await _post(socket, "/wake_up?tags=kv_cache", deadline_s=WAKE_S)


async def is_partially_asleep(spec: FunctionSpec, socket: str) -> bool:
    """Whether the engine of a running instance has released its memory: a suspend or resume was
    interrupted.

    Raises SnapshotterError if the engine does not answer."""
    if spec.engine is None or not spec.resources.gpu:
        return False
    try:
        answer = json.loads(await _request(socket, "GET", "/is_sleeping", deadline_s=STATE_S))
    except ValueError as e:
        raise agent_errors.SnapshotterError(
            f"the engine's answer to /is_sleeping is not JSON: {e}"
        ) from e
    return isinstance(answer, dict) and answer.get("is_sleeping") is True


async def _post(
    socket: str, path: str, body: dict[str, Any] | None = None, *, deadline_s: float
) -> None:
    await _request(socket, "POST", path, body, deadline_s=deadline_s)


async def _request(
    socket: str, verb: str, path: str, body: dict[str, Any] | None = None, *, deadline_s: float
) -> bytes:
    """The body of the answer if it is short; otherwise b""."""
    data = json.dumps(body).encode() if body is not None else b""
    lines = (
        f"{verb} {path} HTTP/1.1",
        "host: engine",
        "connection: close",
        "content-type: application/json",
        f"content-length: {len(data)}",
    )
    head = "\r\n".join((*lines, "", ""))
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(deadline_s):
            connection = await connect(loop, WorkerConnection, socket)
            try:
                answer = await connection.request(head.encode() + data, loop=loop)
            finally:
                connection.close()
    except TimeoutError as e:
        raise agent_errors.SnapshotterError(
            f"the engine did not answer {path} within {deadline_s:g} s"
        ) from e
    except (WorkerConnectionLost, OSError) as e:
        raise agent_errors.SnapshotterError(f"the engine did not answer {path}: {e}") from e
    if answer.status >= 400:
        raise agent_errors.SnapshotterError(f"the engine answered {path} with {answer.status}")
    return answer.body or b""
