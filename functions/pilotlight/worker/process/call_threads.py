"""Threads for synchronous user functions, created after the fork, reused, and at most as many as
calls may run at once.

An abandoned call is interrupted by raising CallCancelled inside it (PyThreadState_SetAsyncExc). The
exception takes effect between two bytecodes, so a call inside C code (a long `time.sleep`, a matrix
product) ends only when that returns. A thread is idle again only when the function has ended."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Mapping
from contextvars import Context
from queue import SimpleQueue
from typing import Any

from pilotlight.worker.user_code.user_errors import CallCancelled

Outcome = tuple[bool, Any]
"""(True, value) or (False, exception)."""


class _Job:
    __slots__ = (
        "args",
        "begun",
        "cancelling",
        "context",
        "finished",
        "function",
        "future",
        "kwargs",
        "sent",
    )

    def __init__(
        self,
        future: asyncio.Future[Outcome],
        context: Context,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> None:
        self.future = future
        self.context = context
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.begun = False
        self.cancelling = False
        self.finished = False
        self.sent: threading.Event | None = None


class CallThread:
    """One thread, one job at a time. Owned by the event loop's thread; only `_work` runs elsewhere.

    The interrupt must hit its own job and no later one, without a lock that a dying thread could
    hold: the canceller sets `cancelling` and then reads `begun` and `finished`; the thread sets
    each of these and then reads `cancelling`. The second of the two sees the other's write."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, number: int) -> None:
        self._loop = loop
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._current: _Job | None = None
        self._thread = threading.Thread(target=self._work, name=f"call-{number}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<CallThread {self._thread.name} {'busy' if self._current else 'idle'}>"

    def run(
        self, context: Context, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> asyncio.Future[Outcome]:
        """Start a job; the future's result is its outcome, it never raises. One at a time."""
        job = _Job(self._loop.create_future(), context, function, args, kwargs)
        self._current = job
        self._jobs.put(job)
        return job.future

    def interrupt(self) -> None:
        """Raise CallCancelled in the running job, if any; later jobs are not affected."""
        job = self._current
        if job is None or job.cancelling:
            return
        job.sent = threading.Event()
        job.cancelling = True
        if job.begun and not job.finished:
            _raise_in(self._thread, CallCancelled)
        job.sent.set()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                outcome = _perform(job)
                _settle(job, self._thread)
            except CallCancelled as e:  # raised in the few instructions around the job
                outcome = (False, e)
                _settle(job, self._thread)
            try:
                self._loop.call_soon_threadsafe(self._finish, job, outcome)
            except RuntimeError:  # the loop is closed: the process is exiting
                return
            del job, outcome  # keep no reference to a caller's objects while waiting

    def _finish(self, job: _Job, outcome: Outcome) -> None:
        self._current = None
        if not job.future.done():
            job.future.set_result(outcome)


class CallThreads:
    """The idle threads, most recently used first. Owned by the event loop's thread."""

    def __init__(self) -> None:
        self._idle: list[CallThread] = []
        self._made = 0

    def __repr__(self) -> str:
        return f"<CallThreads idle={len(self._idle)} made={self._made}>"

    def take(self) -> CallThread:
        """An idle thread, or a new one; the caller limits how many calls run at once."""
        return self._idle.pop() if self._idle else self._make(asyncio.get_running_loop())

    def make_ahead(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create an idle thread before the first call."""
        self._idle.append(self._make(loop))

    def _make(self, loop: asyncio.AbstractEventLoop) -> CallThread:
        self._made += 1
        return CallThread(loop, number=self._made)

    def give_back(self, thread: CallThread) -> None:
        """Return a thread whose job has ended."""
        self._idle.append(thread)


def _perform(job: _Job) -> Outcome:
    job.begun = True
    if job.cancelling:
        return False, CallCancelled()
    try:
        return True, job.context.run(job.function, *job.args, **job.kwargs)
    except (
        BaseException
    ) as e:  # user code may raise anything, SystemExit too; it is reported as data
        return False, e


def _settle(job: _Job, thread: threading.Thread) -> None:
    while True:
        try:
            job.finished = True
            if job.cancelling and job.sent is not None:
                job.sent.wait()
                _raise_in(thread, None)  # revokes an interrupt that has not taken effect yet
            return
        except CallCancelled:
            continue


def _raise_in(thread: threading.Thread, kind: type[BaseException] | None) -> None:
    exception = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), exception)
