"""One call that a worker runs: its arguments, its deadline, and what stops it."""

from __future__ import annotations

import asyncio
import contextvars
import types
from collections.abc import Mapping
from typing import Any

from pilotlight.current_call.context import CURRENT_CALL as RUNNING
from pilotlight.current_call.spans import CURRENT_RECORDER
from pilotlight.protocol import HEADER_ATTEMPT, HEADER_CALL, HEADER_DEADLINE, HEADER_PRIORITY
from pilotlight.worker.http.connection import Request
from pilotlight.worker.process.call_threads import CallThread, Job
from pilotlight.worker.user_code import output
from pilotlight.worker.user_code.current_call import RunningCall
from pilotlight.worker.user_code.spans import CallSpans
from pilotlight.worker.user_code.target import Method

CALL_ID = HEADER_CALL.encode()
_ATTEMPT = HEADER_ATTEMPT.encode()
_DEADLINE = HEADER_DEADLINE.encode()
_PRIORITY = HEADER_PRIORITY.encode()


class Call(RunningCall):
    """One running call. Owned by the event loop. What few calls need has its default in the class.

    Attributes:
        speaks_pickle: whether the caller is the SDK of the function's own tenant: it sent
            cloudpickle, and gets it back.
        seconds: remaining time of the execution clock; 0 for no limit.
        expires_at: the event loop's time at which it expires; set by ExecutionDeadlines.
        stopped: None, or why it was stopped: `left` or `deadline`.
        spans: spans that its own code records.
        variables: the context variables in which the function runs, if not those of a task.
        task: None if the function does not run in the event loop.
        is_awaiting: whether a stop cancels it: not while an item of a stream is being sent.
        job, thread: what a stop interrupts.
        is_bound: whether its arguments fit the function.
        takes_tensors: whether its body is CONTENT_TENSORS.
        line: a further header line of its response, with CRLF.
    """

    seconds = 0.0
    expires_at = 0.0
    stopped: str | None = None
    task: asyncio.Task[Any] | None = None
    is_awaiting = False
    job: Job | None = None
    thread: CallThread | None = None
    variables: contextvars.Context
    is_bound = False
    takes_tensors = False
    line = b""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = types.MappingProxyType({})

    def __init__(
        self, request: Request, method: Method, *, speaks_pickle: bool, slow_s: float
    ) -> None:
        headers = request.headers
        self.id = identity = headers[CALL_ID].decode("latin-1") if CALL_ID in headers else ""
        self.spans = CallSpans(
            identity, headers.get(b"traceparent"), headers.get(_ATTEMPT), slow_s=slow_s
        )
        super().__init__(headers, self.spans)
        self.request = request
        self.method = method
        self.speaks_pickle = speaks_pickle
        if _DEADLINE in headers:
            self.seconds = _seconds(headers[_DEADLINE])

    def __repr__(self) -> str:
        return f"<Call {self.id} {self.stopped or 'running'}>"

    @property
    def priority(self) -> bytes | None:
        """From the activator, for methods whose calls are batched."""
        return self.request.headers.get(_PRIORITY)

    def enter(self) -> None:
        """Make it the current call of these context variables, and take its arguments from the
        body. Raises InvalidInput, and what the user's own types raise."""
        output.CALL.set(self.id)
        RUNNING.set(self)
        CURRENT_RECORDER.set(self.spans)
        self.spans.make_current()
        binder = self.method.binder
        if self.speaks_pickle:
            self.args, self.kwargs = binder.from_pickle(self.request.body)
        elif self.takes_tensors:
            # arrays share this memory, and may be written to
            self.args, self.kwargs = binder.from_tensors(bytearray().join(self.request.parts))
        else:
            self.args, self.kwargs = binder.from_json(self.request.body)
        self.is_bound = True

    def leave(self) -> None:
        """Stop the call: the caller has disconnected."""
        self.request.disconnected = True
        self._stop("left")

    def expire(self) -> None:
        """Stop the call: its deadline has passed."""
        self._stop("deadline")

    def _stop(self, reason: str) -> None:
        if self.stopped is None:
            self.stopped = reason
            if self.job is not None:
                self.job.interrupt()
            elif self.thread is not None:
                self.thread.interrupt()
            elif self.task is not None and self.is_awaiting:
                self.task.cancel()


def _seconds(value: bytes) -> float:
    try:
        return float(value)
    except ValueError:
        return 0.0
