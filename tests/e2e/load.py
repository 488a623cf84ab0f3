"""Callers that never stop calling, and a memory of everything that they were answered."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

import httpx

from tests.e2e.harness import PATIENCE_S, PlatformUnderTest

REFUSED_PAUSE_S = 0.1
"""Between attempts to reach an activator that is not there."""
PAUSE_S = 0.15
"""Between an answer and the caller's next call: the tests want many calls in flight, not a machine
that does nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One call that got an answer; `at` is monotonic seconds."""

    id: str
    status: int
    body: Any
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """One call whose connection ended before its answer; monotonic seconds."""

    sent: float
    at: float


class Load:
    """`callers` tasks that call `function` (n → [n, instance]) over and over, until the context
    ends. Owner: the test's event loop."""

    def __init__(
        self, platform: PlatformUnderTest, function: str = "work/nap", *, callers: int = 30
    ) -> None:
        self._platform = platform
        self._function = function
        self._callers = callers
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=200)
        self._client = httpx.AsyncClient(
            base_url=platform.url, headers=platform.headers, timeout=60.0, limits=limits
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ended = False
        self.answered: list[Answered] = []
        self.broken: list[Broken] = []
        self.refused = 0
        self.in_flight = 0
        self.submitted: list[str] = []

    def __repr__(self) -> str:
        return (
            f"<Load {dict(self.statuses())} broken={len(self.broken)} refused={self.refused} "
            f"submitted={len(self.submitted)}>"
        )

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._call_on(n), name=f"caller {n}") for n in range(self._callers)
        ]
        await self.wait_answers(self._callers)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_ended = True
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self._tasks)
        await self._client.aclose()

    def statuses(self) -> Counter[int]:
        """How often which status was answered."""
        return Counter(a.status for a in self.answered)

    def instances(self, *, since: float = 0.0) -> set[str]:
        """Who answered after `since`."""
        return {a.body[1] for a in self.answered if a.status == 200 and a.at >= since}

    async def wait_all_in_flight(self) -> None:
        """Until every caller waits for an answer: soon, where nobody answers."""
        async with asyncio.timeout(PATIENCE_S):
            while self.in_flight < self._callers:
                self._check_callers()
                await asyncio.sleep(0.02)

    async def wait_answers(self, count: int) -> None:
        """Until `count` more calls were answered with success."""
        wanted = self.statuses()[200] + count
        async with asyncio.timeout(PATIENCE_S):
            while self.statuses()[200] < wanted:
                self._check_callers()
                await asyncio.sleep(0.02)

    def _check_callers(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def submit(self, count: int, *, seconds: float) -> None:
        """Submit calls that take so long each, all at once; returns when each has its 202."""
        path = f"/v1/functions/{self._function}:submit"
        bodies = [{"n": n, "seconds": seconds} for n in range(count)]
        for answer in await asyncio.gather(
            *(self._client.post(path, json=body) for body in bodies)
        ):
            assert answer.status_code == 202, answer.text
            self.submitted.append(answer.json()["id"])

    async def results(self) -> list[str]:
        """The final state of each submitted call, in order."""
        async with asyncio.timeout(2 * PATIENCE_S):
            return list(await asyncio.gather(*(self._state(call) for call in self.submitted)))

    async def _state(self, call: str) -> str:
        while True:
            try:
                answer = await self._client.get(f"/v1/calls/{call}", params={"wait_s": 5})
            except httpx.TransportError:
                await asyncio.sleep(REFUSED_PAUSE_S)
                continue
            state = str(answer.json().get("state", ""))
            if answer.status_code == 200 and state not in ("QUEUED", "RUNNING"):
                return state
            await asyncio.sleep(REFUSED_PAUSE_S)

    async def _call_on(self, caller: int) -> None:
        n = caller
        while not self._is_ended:
            sent = time.monotonic()
            self.in_flight += 1
            try:
                answer = await self._client.post(
                    f"/v1/functions/{self._function}:invoke", json={"n": n}
                )
            except httpx.ConnectError:
                self.refused += 1
                await asyncio.sleep(REFUSED_PAUSE_S)
            except httpx.TransportError:
                self.broken.append(Broken(sent=sent, at=time.monotonic()))
            else:
                self.answered.append(self._taken(answer, n))
            finally:
                self.in_flight -= 1
            n += self._callers
            await asyncio.sleep(PAUSE_S)

    def _taken(self, answer: httpx.Response, n: int) -> Answered:
        if "x-request-id" not in answer.headers or (
            answer.status_code == 200 and answer.json()[0] != n
        ):
            raise AssertionError(
                f"asked for {n}, got {answer.status_code} "
                f"{answer.text}\n{self._platform.log_tails(40)}"
            )
        return Answered(
            id=answer.headers["x-request-id"],
            status=answer.status_code,
            body=answer.json(),
            at=time.monotonic(),
        )
