"""Calls of the API server with deadlines, a bounded number of retries, and our own errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pilotlight.core.threads import cancel_and_wait
from pilotlight.kubernetes.api_errors import ApiResponse, error_from_response
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.errors import BadCredentials, ClusterError, ClusterUnreachable
from pilotlight.kubernetes.kinds import Kind
from pilotlight.kubernetes.retry_policy import RetryDelays, is_retryable
from pilotlight.kubernetes.transport import Transport

logger = logging.getLogger(__name__)

VERSION_PATH = "/version"
VERSION = Kind("v1", "Version", "version", False)
"""Stands for the API server's version, which is no object."""
RESTARTED_S = 10.0
"""How long after its last absence an API server may not know its roles yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDeadlines:
    """Deadlines of calls.

    Attributes:
        call_s: of one call, including all attempts.
        attempt_s: of one attempt.
        quiet_s: after how long without a byte from the API server, while streams are open, it is
            asked whether it is there; it has `attempt_s` to answer.
        silence_s: longest silence of a watch; API servers send a bookmark each minute.
        lost_s: after how long a stream's connection is broken whose other end acknowledges nothing,
            in whole seconds of at least 3 (TCP keepalive).
        watch_s: duration of a watch, limited so that load spreads over API servers.
        pauses: between attempts of a call.
        watch_pauses: between attempts to open a watch.
    """

    call_s: float = 30.0
    attempt_s: float = 10.0
    quiet_s: float = 5.0
    silence_s: float = 100.0
    lost_s: float = 15.0
    watch_s: float = 300.0
    pauses: RetryDelays = field(default_factory=RetryDelays)
    watch_pauses: RetryDelays = field(default_factory=lambda: RetryDelays(first_s=0.2, most_s=10.0))


class SilenceProbe:
    """Notices an API server that accepts connections and answers nothing. Owner: one event loop.

    A watch is silent while nothing happens, and the kernel acknowledges packets for a process that
    hangs. So while streams are open and nothing arrives, the API server is asked. If it does not
    answer, the streams are ended, and their readers open them again: until it answers, or a load
    balancer chooses another one.

    Args:
        quiet_s: after how long without a byte from the API server it is asked.
        ask: asks it for anything; raises ClusterUnreachable without an answer.
        is_away: whether it did not answer when it was last asked: it is asked again then, also if
            some stream delivers.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        quiet_s: float,
        ask: Callable[[], Awaitable[None]],
        is_away: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._quiet_s = quiet_s
        self._ask = ask
        self._is_away = is_away
        self._open = 0
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def active(self) -> AsyncIterator[None]:
        """Ask in the block, for a stream; several blocks share the requests."""
        self._open += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="probe of the API server")
        try:
            yield
        finally:
            self._open -= 1
            if self._open == 0 and self._task is not None:
                task, self._task = self._task, None
                await cancel_and_wait(task)

    async def _run(self) -> None:
        while True:
            heard = self._transport.heard
            await asyncio.sleep(self._quiet_s)
            if self._transport.heard != heard and not self._is_away():
                continue
            heard = self._transport.heard
            try:
                await self._ask()
            except ClusterUnreachable as error:
                if self._transport.heard == heard:
                    self._transport.end_streams(error)
            except BadCredentials:
                pass  # of a plugin, which says nothing about the API server


class ApiCalls:
    """Makes calls over a transport. Owner: one event loop; calls may run concurrently. `chance`,
    `clock` and `sleep` inject randomness and time."""

    def __init__(
        self,
        transport: Transport,
        *,
        patience: CallDeadlines,
        chance: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.transport = transport
        self.patience = patience
        self.chance = chance
        self.clock = clock
        self.sleep = sleep
        self._away_at: float | None = None
        self._away_since: float | None = None
        self._answered_at = -math.inf
        self._probe = SilenceProbe(
            transport,
            quiet_s=patience.quiet_s,
            ask=self._ask,
            is_away=lambda: self._away_since is not None,
        )

    def note(self, error: ClusterError, waited_s: float = 0.0) -> None:
        """Remember that the API server did not answer for `waited_s`, or was starting. One that has
        answered another request meanwhile is not away."""
        if isinstance(error, ClusterUnreachable) or error.status == 503:
            self._away_at = self.clock()
            since = self._away_at - waited_s
            if self._away_since is None and self._answered_at <= since:
                self._away_since = since

    @property
    def away_s(self) -> float:
        """For how long the API server has not answered; 0 if it did when it was last asked."""
        return 0.0 if self._away_since is None else self.clock() - self._away_since

    async def call(
        self,
        deed: ApiRequest,
        method: str,
        *,
        path: str | None = None,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        content_type: str = "application/json",
        is_conditional: bool = False,
        timeout_s: float | None = None,
    ) -> ApiResponse:
        """Make a call, with retries.

        Args:
            path: of the URL, if it is not the deed's own.
            is_conditional: whether a conflict is an answer (`retry_policy.is_retryable`).
            timeout_s: of all attempts together; None = `patience.call_s`.

        Raises:
            ClusterError: the error of the last attempt.
        """
        ends_at = self.clock() + (self.patience.call_s if timeout_s is None else timeout_s)
        attempt = 0
        while True:
            attempt += 1
            try:
                left_s = max(0.001, min(self.patience.attempt_s, ends_at - self.clock()))
                answer = await self.transport.call(
                    deed,
                    method,
                    path=path,
                    query=query,
                    body=body,
                    content_type=content_type,
                    timeout_s=left_s,
                )
                await self.check(deed, answer)
                if not answer.body.lstrip().startswith(b"{"):
                    said = (
                        f"cannot {deed}: the response is not from an API server: check for a "
                        f"proxy in between"
                    )
                    raise ClusterUnreachable(said, deed=deed)
            except ClusterError as error:
                self.note(error)
                await self._pause_or_raise(
                    error, deed, attempt, ends_at, is_conditional=is_conditional
                )
            else:
                return answer

    @contextlib.asynccontextmanager
    async def stream(
        self, deed: ApiRequest, *, query: Mapping[str, str], silence_s: float | None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Stream the response of a GET: one attempt, without a deadline of its end.

        Args:
            silence_s: timeout between two pieces; None = unlimited.

        Raises:
            ClusterError: it was refused, or broke.
        """
        patience = self.patience
        async with (
            self._probe.active(),
            self.transport.stream(
                deed,
                query=query,
                open_s=patience.attempt_s,
                silence_s=silence_s,
                lost_s=patience.lost_s,
            ) as (answer, pieces),
        ):
            await self.check(deed, answer)
            yield pieces

    async def check(self, deed: ApiRequest, answer: ApiResponse) -> None:
        """Raise ClusterError for a response that is not a success."""
        self._record_answer(answer)
        if answer.status == 401:
            await self.transport.credentials.renew()
        if not 200 <= answer.status <= 299:
            raise error_from_response(deed, answer)

    def _record_answer(self, answer: ApiResponse) -> None:
        if answer.status != 503:
            self._away_since, self._answered_at = None, self.clock()

    async def _ask(self) -> None:
        """Ask for the version; any answer will do, also a refusal. Raises ClusterUnreachable."""
        deed, timeout_s = ApiRequest(verb="get", kind=VERSION), self.patience.attempt_s
        try:
            answer = await self.transport.call(deed, "GET", path=VERSION_PATH, timeout_s=timeout_s)
        except ClusterUnreachable as error:
            self.note(error, timeout_s)
            raise
        self._record_answer(answer)

    async def _pause_or_raise(
        self,
        error: ClusterError,
        deed: ApiRequest,
        attempt: int,
        ends_at: float,
        *,
        is_conditional: bool,
    ) -> None:
        """Wait before the next attempt, or raise if there is none."""
        is_first_401 = isinstance(error, BadCredentials) and error.status == 401 and attempt == 1
        was_away = self._away_at is not None and self.clock() - self._away_at < RESTARTED_S
        repeat = is_first_401 or is_retryable(
            error, verb=deed.verb, is_conditional=is_conditional, was_away=was_away
        )
        pauses = self.patience.pauses
        pause_s = pauses.pause_s(attempt, chance=self.chance(), retry_after_s=error.retry_after_s)
        if not repeat or attempt >= pauses.attempts or self.clock() + pause_s >= ends_at:
            raise error
        logger.info(
            "asked again deed=%s attempt=%d pause_s=%.2f error=%s",
            deed,
            attempt,
            pause_s,
            error.reason or error.status,
        )
        await self.sleep(pause_s)
