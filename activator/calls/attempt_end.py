"""How an attempt that was answered ends: its usage record is closed as its worker ended the
response, as an error that interrupted it, or as a disconnect of its caller.

`ResponseReader` decides that alone, for every API and for submitted calls. `ResponseFilter`s change
bytes and report a status; a `ResponseFormat` decides nothing. A caller that leaves before its
worker answers cancels its task, and `calls.runner` ends the attempt; the fast path has
`FastPathCall.abandon`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Final, Self

from activator.calls.attempt import outcome_of, status_of
from activator.calls.call import AnsweredCall, ResponseFilter
from activator.worker_client.connection import WorkerConnectionLost
from pilotlight import errors
from pilotlight.protocol import HEADER_FINISH

_FINISH: Final = HEADER_FINISH.encode()
_FINISHES: Final = {"ok": "stop", "cancelled": "cancelled"}


class ResponseReader:
    """The response of one attempt. Owner: the task of its call.

        with ResponseReader(attempt) as response:  # ends the attempt
            async for piece in response:
                await send(piece)
            await send(response.end())

    Attributes:
        status, outcome: of the attempt's record, once it has ended.
        first_byte_ms: of a stream, from the call's beginning to its first piece; 0 = none.
    """

    __slots__ = ("_attempt", "_filter", "_is_sent", "first_byte_ms", "outcome", "status")

    def __init__(
        self,
        attempt: AnsweredCall,
        response_filter: ResponseFilter | None = None,
        *,
        is_sent: bool = False,
    ) -> None:
        """`response_filter`: None = its bytes are passed on as they are. `is_sent`: the caller gets
        them as they arrive; False: once all are there, or none."""
        self._attempt = attempt
        self._is_sent = is_sent
        self._filter = response_filter
        self.first_byte_ms = 0.0
        self.status, self.outcome = 499, "cancelled"

    def __repr__(self) -> str:
        return f"<ResponseReader {self.status} of {self._attempt!r}>"

    @property
    def is_inside(self) -> bool:
        """Whether a part of an event was returned, and its end was not."""
        return self._filter is not None and self._filter.is_inside

    @property
    def finish(self) -> str:
        """Why the response ended: stop, cancelled or error."""
        return _FINISHES.get(self.outcome, "error")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        attempt = self._attempt
        is_stream = attempt.answer.body is None
        if error is None:
            attempt.close(
                status=self.status,
                outcome=self.outcome,
                bytes_out=attempt.bytes_out,
                finish=self.finish if is_stream else "",
            )
            return
        if not isinstance(error, WorkerConnectionLost | errors.PilotlightError):
            error = asyncio.CancelledError()  # its caller left, or it could not be sent
        error = attempt.cut_by or error
        self.status, self.outcome = status_of(error), outcome_of(error)
        finish = "length" if isinstance(error, errors.TooLarge) else self.finish
        attempt.fail(error, finish=finish if is_stream else "", is_noted=not self._is_sent)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the pieces of a streamed response as they arrive. Raises WorkerConnectionLost."""
        attempt, response_filter = self._attempt, self._filter
        async for piece in attempt.answer.chunks():
            if response_filter is not None:
                piece = response_filter.feed(piece, time.monotonic_ns())
                if not piece:
                    continue
            self._count(piece)
            yield piece

    def end(self) -> bytes:
        """Take the outcome of a stream that its worker ended, and return its last bytes. Raises
        WorkerConnectionLost where it is incomplete."""
        status, rest = self._worker_status, b""
        if self._filter is not None:
            status, rest = self._filter.end(status)
        if rest:
            self._count(rest)
        self.status, self.outcome = status, "ok" if status < 400 else "error"
        return rest

    def whole(self, body: bytes | None = None) -> bytes:
        """Take the outcome of a response that was received, or collected as `body`, and return its
        body. Raises WorkerConnectionLost where it is incomplete."""
        answer = self._attempt.answer
        status, whole = (
            (answer.status, answer.body or b"") if body is None else (self._worker_status, body)
        )
        if self._filter is not None:
            status, whole = self._filter.collected(status, whole)
        self._attempt.bytes_out = len(whole)
        self.status, self.outcome = status, "ok" if status < 400 else "error"
        return whole

    @property
    def _worker_status(self) -> int:
        """The status of its head, or 500 where user code failed in the stream behind it."""
        answer = self._attempt.answer
        if answer.status < 400 and answer.header(_FINISH) == b"error":
            return 500
        return answer.status

    def _count(self, piece: bytes) -> None:
        attempt = self._attempt
        if not self.first_byte_ms:
            self.first_byte_ms = (time.monotonic_ns() - attempt.call.began_ns) / 1e6
        attempt.bytes_out += len(piece)
