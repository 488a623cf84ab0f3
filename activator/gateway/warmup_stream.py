"""Streamed response of a warm-up: a line for each stage, heartbeats while a stage lasts, and the
report last.

Making a snapshot of gigabytes takes minutes, and proxies close a connection that is silent for
one. Lines (NDJSON): `{"stage": name, "elapsed_ms": n}`, then `{"report": {…}}`, or
`{"error": problem}`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from activator.http.problems import problem_of
from activator.http.request import Request
from pilotlight import errors
from pilotlight.protocol import CONTENT_NDJSON

HEARTBEAT_S = 10.0
"""Below the idle limits of common proxies (30 to 60 s), with a margin for a lost packet."""
Report = Mapping[str, Any]
Work = Callable[[Callable[[str], None]], Coroutine[Any, Any, Report]]


def accepts_progress(request: Request) -> bool:
    """Return whether the caller accepts NDJSON."""
    return CONTENT_NDJSON.encode() in request.headers.get(b"accept", b"")


async def stream(request: Request, work: Work, *, heartbeat_s: float = HEARTBEAT_S) -> None:
    """Run `work` and stream its stages; it gets a function to call at each stage. A disconnect of
    the caller cancels it."""
    headers = [(b"content-type", CONTENT_NDJSON.encode()), (b"x-request-id", request.id.encode())]
    await request.start(200, headers)
    began, stage = time.monotonic(), "start"
    changed = asyncio.Event()

    def entered(name: str) -> None:
        nonlocal stage
        stage = name
        changed.set()

    async def send_line(body: Mapping[str, Any], *, more: bool = True) -> None:
        await request.chunk(json.dumps(body).encode() + b"\n", more=more)

    task = asyncio.create_task(work(entered), name=f"warm-up {request.id}")
    task.add_done_callback(lambda _: changed.set())
    try:
        while not task.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s):
                    await changed.wait()
            changed.clear()
            if not task.done():
                await send_line(
                    {"stage": stage, "elapsed_ms": round((time.monotonic() - began) * 1000)}
                )
        await send_line(_last_line(request, task), more=False)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _last_line(request: Request, task: asyncio.Task[Report]) -> Mapping[str, Any]:
    try:
        return {"report": dict(task.result())}
    except errors.PilotlightError as e:
        return {"error": problem_of(e, request.id)}
