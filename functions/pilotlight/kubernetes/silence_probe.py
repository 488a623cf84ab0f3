"""Notices an API server that accepts connections and answers nothing.

A watch is silent while nothing happens, and the kernel acknowledges packets for a process that
hangs. So while streams are open and nothing arrives, the API server is asked for its version. If it
does not answer, the streams are ended, and their readers open them again: until the server answers,
or a load balancer chooses another one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from pilotlight.core.threads import cancel_and_wait
from pilotlight.kubernetes.errors import BadCredentials, ClusterUnreachable
from pilotlight.kubernetes.transport import Transport


class SilenceProbe:
    """Asks while streams are open. Owner: one event loop.

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
