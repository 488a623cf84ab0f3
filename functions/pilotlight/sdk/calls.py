"""`FunctionCall`: a submitted call, which lives on without its caller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, TypeVar

from pilotlight.client import sessions
from pilotlight.client.client import LONG_POLL_S
from pilotlight.client.responses import is_finished, parse_record_result
from pilotlight.protocol import CallRecord
from pilotlight.sdk.sync_async import SyncAsyncMethod

R = TypeVar("R")

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


def poll_delays_s() -> Iterator[float]:
    """Seconds between looks at a call, where the server does not hold the look open: doubling from
    20 ms to 1 s."""
    pause = _FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(_LONGEST_PAUSE_S, pause * 2)


class FunctionCall(Generic[R]):
    """A call by its id. `get()` waits for its result, in this or any other process; it runs at
    least once (`attempts()`).

    `pickles` False: it is a call to another tenant's function, whose result is JSON and never
    unpickled."""

    def __init__(self, call_id: str, pickles: bool = True) -> None:
        self.id = call_id
        self._pickles = pickles
        self.get = SyncAsyncMethod(self._get, self._get_aio)
        self.stream = SyncAsyncMethod(self._stream, self._stream_aio)
        self.cancel = SyncAsyncMethod(self._cancel, self._cancel_aio)
        self.record = SyncAsyncMethod(self._record, self._record_aio)
        self.attempts = SyncAsyncMethod(self._attempts, self._attempts_aio)
        self.redrive = self._redrive
        self.feedback = SyncAsyncMethod(self._feedback, self._feedback_aio)

    def __repr__(self) -> str:
        return f"<FunctionCall {self.id}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return FunctionCall, (self.id, self._pickles)

    @property
    def object_id(self) -> str:
        """Modal's name for `id`."""
        return self.id

    @classmethod
    def from_id(cls, call_id: str) -> FunctionCall[Any]:
        """The handle of a call submitted before."""
        return FunctionCall(call_id)

    @staticmethod
    def gather(*calls: FunctionCall[Any], timeout: float | None = None) -> list[Any]:
        """Results of all, in order. Raises the first failure in that order; `timeout` is for all
        together."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return [
            call.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            for call in calls
        ]

    def _get(self, timeout: float | None = None) -> R:
        """The result. Raises what the function raised; TimeoutError after `timeout` seconds (the
        call goes on; 0 looks once)."""
        client, deadline = sessions.client(), _deadline(timeout)
        for pause in poll_delays_s():
            asked = time.monotonic()
            record = client.call(self.id, wait_s=_patience(deadline, asked))
            if is_finished(record):
                result: R = parse_record_result(record, pickles=self._pickles)
                return result
            time.sleep(self._pause(pause, asked, deadline, record.state))
        raise AssertionError("pauses never end")

    async def _get_aio(self, timeout: float | None = None) -> R:
        """As `get`."""
        client, deadline = await sessions.async_client(), _deadline(timeout)
        for pause in poll_delays_s():
            asked = time.monotonic()
            record = await client.call(self.id, wait_s=_patience(deadline, asked))
            if is_finished(record):
                result: R = parse_record_result(record, pickles=self._pickles)
                return result
            await asyncio.sleep(self._pause(pause, asked, deadline, record.state))
        raise AssertionError("pauses never end")

    def _stream(self, *, after: str = "") -> Iterator[Any]:
        """Items of a generator as it makes them, or the result of another function; from the
        beginning, whenever this is asked.

        Raises what the function raised, once all before it was read. Lost connections are made
        again. `after`: id of an event of `GET /v1/calls/{id}/stream`. An attempt that is made again
        begins again, and so do its items."""
        return sessions.client().call_stream(self.id, after=after, pickles=self._pickles)

    async def _stream_aio(self, *, after: str = "") -> AsyncIterator[Any]:
        """As `stream`."""
        async for item in (await sessions.async_client()).call_stream(
            self.id, after=after, pickles=self._pickles
        ):
            yield item

    def _pause(self, pause: float, asked: float, deadline: float | None, state: str) -> float:
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            raise TimeoutError(
                f"call {self.id} is not finished: it is {state}; it goes on, get() can be called again"
            )
        waited_there = now - asked
        left = pause if deadline is None else min(pause, deadline - now)
        return max(0.0, left - waited_there)

    def _cancel(self) -> None:
        """Cancel it, queued or running."""
        sessions.client().cancel(self.id)

    async def _cancel_aio(self) -> None:
        """As `cancel`."""
        await (await sessions.async_client()).cancel(self.id)

    def _feedback(self, label: str | None = None, **metrics: float) -> None:
        """Tell its outcome, once per metric: `call.feedback(label="good", rating=5)`. Raises
        Conflict when it was told otherwise before."""
        sessions.client().feedback(self.id, label=label, metrics=metrics)

    async def _feedback_aio(self, label: str | None = None, **metrics: float) -> None:
        """As `feedback`."""
        await (await sessions.async_client()).feedback(self.id, label=label, metrics=metrics)

    def _record(self) -> CallRecord:
        """What is known of it now: its state, times, cost, and result."""
        return sessions.client().call(self.id)

    async def _record_aio(self) -> CallRecord:
        """As `record`."""
        return await (await sessions.async_client()).call(self.id)

    def _attempts(self) -> int:
        """How often it was tried so far; it runs at least once, and again as its function's
        `retries` say."""
        return self._record().attempt

    async def _attempts_aio(self) -> int:
        """As `attempts`."""
        return (await self._record_aio()).attempt

    def _redrive(self) -> None:
        """Send it again, if it failed for the last time and waits as a dead letter. Raises Conflict
        when it does not."""
        sessions.client().redrive(self.id)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _patience(deadline: float | None, now: float) -> float:
    return LONG_POLL_S if deadline is None else max(0.0, min(LONG_POLL_S, deadline - now))
