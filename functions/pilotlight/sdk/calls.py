"""`FunctionCall`: the handle of a background call, which continues without its caller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, TypeVar

from pilotlight.client import sessions
from pilotlight.client.responses import LONG_POLL_S, is_finished, parse_record_result
from pilotlight.protocol import CallRecord
from pilotlight.sdk.sync_async import SyncAsyncMethod, with_short_errors
from pilotlight.sdk.unsupported import refuse_attributes

R = TypeVar("R")

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


def poll_delays_s() -> Iterator[float]:
    """Yield delays in seconds between polls of a call, for when the server does not long-poll: they
    double from 20 ms to 1 s."""
    pause = _FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(_LONGEST_PAUSE_S, pause * 2)


@refuse_attributes
class FunctionCall(Generic[R]):
    """The handle of a background call, started with `Function.spawn`.

    `get()` waits for the result, in this or any other process (`FunctionCall.from_id(call.id)`).
    The call runs at least once (see `attempts()`). Methods have asynchronous forms, such as `await
    call.get.aio()`.

    `pickles` is False for a call to a function of another tenant, whose result is JSON and never
    unpickled."""

    def __init__(self, call_id: str, pickles: bool = True) -> None:
        self.id = call_id
        self._pickles = pickles
        self.get = SyncAsyncMethod(self._get, self._get_aio)
        self.stream = SyncAsyncMethod(self._stream, self._stream_aio)
        self.cancel = SyncAsyncMethod(self._cancel, self._cancel_aio)
        self.record = SyncAsyncMethod(self._record, self._record_aio)
        self.attempts = SyncAsyncMethod(self._attempts, self._attempts_aio)
        self.redrive = with_short_errors(self._redrive)
        self.feedback = SyncAsyncMethod(self._feedback, self._feedback_aio)

    def __repr__(self) -> str:
        return f"<FunctionCall {self.id}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return FunctionCall, (self.id, self._pickles)

    @property
    def object_id(self) -> str:
        """Alias of `id`, for compatibility with Modal."""
        return self.id

    @classmethod
    def from_id(cls, call_id: str) -> FunctionCall[Any]:
        """Return the handle of a call submitted earlier. Makes no request."""
        return FunctionCall(call_id)

    @staticmethod
    def gather(*calls: FunctionCall[Any], timeout: float | None = None) -> list[Any]:
        """Wait for several calls and return their results in order.

        Raises the first failure in that order. `timeout` in seconds applies to all calls
        together."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return [
            call.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            for call in calls
        ]

    def _get(self, timeout: float | None = None) -> R:
        """Wait for the result and return it. Raises the exception of the function.

        Raises TimeoutError after `timeout` seconds; the call continues. 0 checks once, None waits
        without limit."""
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
        """Asynchronous form of `get`."""
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
        """Iterate over the items of a generator as they are produced, from the first one; for other
        functions, over the single result.

        Lost connections are reestablished. Raises the exception of the function after all earlier
        items. If the call is retried, its items start again from the first. `after` resumes after
        the event of `GET /v1/calls/{id}/stream` with that id."""
        return sessions.client().call_stream(self.id, after=after, pickles=self._pickles)

    async def _stream_aio(self, *, after: str = "") -> AsyncIterator[Any]:
        """Asynchronous form of `stream`."""
        async for item in (await sessions.async_client()).call_stream(
            self.id, after=after, pickles=self._pickles
        ):
            yield item

    def _pause(self, pause: float, asked: float, deadline: float | None, state: str) -> float:
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            raise TimeoutError(
                f"call {self.id} is not finished, its state is {state}: it continues, call get() "
                "again"
            )
        waited_there = now - asked
        left = pause if deadline is None else min(pause, deadline - now)
        return max(0.0, left - waited_there)

    def _cancel(self) -> None:
        """Cancel the call, whether queued or running."""
        sessions.client().cancel(self.id)

    async def _cancel_aio(self) -> None:
        """Asynchronous form of `cancel`."""
        await (await sessions.async_client()).cancel(self.id)

    def _feedback(self, label: str | None = None, **metrics: float) -> None:
        """Report the outcome of the call, once per metric: `call.feedback(label="good", rating=5)`.

        Raises Conflict if a different value was reported before."""
        sessions.client().feedback(self.id, label=label, metrics=metrics)

    async def _feedback_aio(self, label: str | None = None, **metrics: float) -> None:
        """Asynchronous form of `feedback`."""
        await (await sessions.async_client()).feedback(self.id, label=label, metrics=metrics)

    def _record(self) -> CallRecord:
        """Return the current record of the call: state, times, cost and result."""
        return sessions.client().call(self.id)

    async def _record_aio(self) -> CallRecord:
        """Asynchronous form of `record`."""
        return await (await sessions.async_client()).call(self.id)

    def _attempts(self) -> int:
        """Return the number of attempts so far. A call runs at least once, and is retried as the
        `retries` of its function say."""
        return self._record().attempt

    async def _attempts_aio(self) -> int:
        """Asynchronous form of `attempts`."""
        return (await self._record_aio()).attempt

    def _redrive(self) -> None:
        """Run a dead-lettered call again, whose retries are exhausted. Raises Conflict for other
        calls."""
        sessions.client().redrive(self.id)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _patience(deadline: float | None, now: float) -> float:
    return LONG_POLL_S if deadline is None else max(0.0, min(LONG_POLL_S, deadline - now))
