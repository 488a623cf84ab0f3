"""Sends requests when they are due, and measures the responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pilotlight.loadtest.requests import PreparedRequest, RequestFactory, StreamReader
from pilotlight.loadtest.results import Result
from pilotlight.protocol import (
    HEADER_COST,
    HEADER_ENVIRONMENT,
    HEADER_REQUEST_ID,
    HEADER_START,
)

if TYPE_CHECKING:
    import httpx

    from pilotlight.profile import Profile

ProgressCallback = Callable[[int, int, int], None]
"""Called with (sent, answered, failed) whenever one of them changes."""
MAX_OPEN = 4096
"""Maximum requests in flight; above it the generator waits, which its `late` figures show."""
_OTHER_FILES = 64
"""Open files that are reserved for other uses than connections."""
AHEAD_BYTES = 128 * 1024**2
"""Maximum size of requests built in advance; above it one is built for each one sent."""


async def run(
    profile: Profile,
    recipe: RequestFactory,
    due: Sequence[float],
    *,
    timeout_s: float,
    seed: int = 0,
    on_progress: ProgressCallback | None = None,
    most_open: int = MAX_OPEN,
    ahead_bytes: int = AHEAD_BYTES,
) -> tuple[list[Result], float]:
    """Send one request at each time in `due` (seconds from now); return the results in that order
    and the elapsed seconds.

    Nothing is retried: a refusal is a result. On cancellation, abandon requests in flight and
    return the results so far."""
    import httpx

    from pilotlight.core.transport.cookies import no_cookies

    prepared = _made(recipe, random.Random(seed), len(due), ahead_bytes)
    headers = {HEADER_ENVIRONMENT: profile.environment, "user-agent": "pilotlight-loadtest"}
    if profile.api_key:
        headers["authorization"] = f"Bearer {profile.api_key}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_OPEN)
    timeout = httpx.Timeout(timeout_s, pool=None)
    transport = httpx.AsyncHTTPTransport(limits=limits, uds=profile.socket_path)
    async with httpx.AsyncClient(
        base_url=profile.base_url,
        headers=headers,
        transport=transport,
        timeout=timeout,
        trust_env=False,
        cookies=no_cookies(),
    ) as client:
        test = _LoadTest(
            client, timeout_s, min(most_open, _most_files() - _OTHER_FILES), on_progress
        )
        next(prepared)
        begin = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for at, one in zip(due, prepared, strict=True):
                    await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
                    group.create_task(test.send(one, begin, at))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
        return sorted(test.results, key=lambda result: result.due_s), time.perf_counter() - begin


def _made(
    recipe: RequestFactory, source: random.Random, count: int, ahead_bytes: int
) -> Iterator[Any]:
    """Yield None when the first requests are built, up to `ahead_bytes`, and then the requests in
    order. Building them in advance keeps the generator from delaying due requests."""
    waiting, held, made = deque[PreparedRequest](), 0, 0
    while made < count and held < ahead_bytes:
        waiting.append(recipe.make(source))
        held, made = held + len(waiting[-1].body), made + 1
    yield None
    while waiting:
        yield waiting.popleft()
        if made < count:
            waiting.append(recipe.make(source))
            made += 1


def _most_files() -> int:
    """Raise this process's limit of open files as far as needed and allowed, and return it."""
    if sys.platform == "win32":
        return MAX_OPEN
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else soft


class _LoadTest:
    """Sends the requests of one test. Owner: its event loop."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        timeout_s: float,
        most_open: int,
        on_progress: ProgressCallback | None,
    ) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(max(1, most_open))
        self._on_progress = on_progress
        self._sent = self._failed = 0
        self.results: list[Result] = []

    async def send(self, prepared: PreparedRequest, begin: float, due_s: float) -> None:
        """Send one request as soon as fewer than the maximum are in flight."""
        async with self._room:
            await self._send(prepared, begin, due_s)

    async def _send(self, prepared: PreparedRequest, begin: float, due_s: float) -> None:
        import httpx

        result = Result(due_s=due_s, late_ms=(time.perf_counter() - begin - due_s) * 1000)
        self._sent += 1
        try:
            # httpx's timeout restarts with each byte, and streams send heartbeats
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(prepared, result, begin + due_s)
        except (httpx.TimeoutException, TimeoutError):
            result.error = "timeout"
        except httpx.HTTPError as e:
            result.error = "connection" if not result.status else "broken"
            if isinstance(e, httpx.ConnectError):
                result.error = "connect"
        result.latency_ms = (time.perf_counter() - begin - due_s) * 1000
        self._failed += not result.is_good
        self.results.append(result)
        if self._on_progress is not None:
            self._on_progress(self._sent, len(self.results), self._failed)

    async def _exchange(self, prepared: PreparedRequest, result: Result, due: float) -> None:
        async with self._client.stream(
            "POST", prepared.path, content=prepared.body, headers=prepared.headers
        ) as response:
            result.status = response.status_code
            result.start = response.headers.get(HEADER_START, "")
            result.cost = response.headers.get(HEADER_COST, "")
            result.id = response.headers.get(HEADER_REQUEST_ID, "")
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                _read_whole(await response.aread(), result)
                return
            reader, last = StreamReader(), 0.0
            async for chunk in response.aiter_raw():
                pieces, now = reader.feed(chunk), time.perf_counter()
                for _ in range(pieces):
                    if result.first_ms is None:
                        result.first_ms = (now - due) * 1000
                    else:
                        result.gaps_ms.append((now - last) * 1000)
                    last = now
            _read_end(reader, result)


def _read_whole(body: bytes, result: Result) -> None:
    """Read the token counts of a response that is not streamed."""
    try:
        document = json.loads(body)
    except ValueError:
        return
    if isinstance(document, dict) and isinstance(document.get("usage"), dict):
        result.tokens_in = document["usage"].get("prompt_tokens")
        result.tokens_out = document["usage"].get("completion_tokens")


def _read_end(reader: StreamReader, result: Result) -> None:
    result.error = result.error or reader.error
    if reader.end.get("finish_reason") in ("error", "cancelled"):
        result.error = result.error or str(reader.end["finish_reason"])
    result.cost = str(reader.end.get("cost") or result.cost)
    result.start = str(reader.end.get("start") or result.start)
    result.tokens_in = reader.usage.get("prompt_tokens", reader.end.get("tokens_in"))
    result.tokens_out = reader.usage.get("completion_tokens", reader.end.get("tokens_out"))
