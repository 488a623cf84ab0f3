"""Threads for synchronous user functions, created after the fork, reused, and at most as many as
calls may run at once.

Calls wait in one queue. A thread that has ended one takes the next without going to sleep, and
wakes another before it begins if more are waiting: calls that only compute share a thread, which
has the interpreter's lock anyway, and one that blocks holds none up. Outcomes that are there
together reach the event loop by one wake-up. A generator, and a batch, have a thread to themselves
(`acquire`).

An abandoned call is interrupted by raising CallCancelled inside it (PyThreadState_SetAsyncExc). The
exception takes effect between two bytecodes, so a call inside C code (a long `time.sleep`, a matrix
product) ends only when that returns. What is raised in a finalizer or a callback of C code is lost,
and code may catch everything; so it is raised again, some times, while the function neither ends
nor handles it. A thread is idle again only when the function has ended."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context
from queue import SimpleQueue
from typing import Any

from pilotlight.worker.user_code.user_errors import CallCancelled

_AGAIN_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""After which pauses a call that goes on is interrupted again. One that does not end after that
stays until its instance is replaced."""
_CONTEXTS = 100
"""How many exceptions are followed to the one during whose handling they were raised: user code may
make a circle of them."""

_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc

Outcome = tuple[bool, Any]
"""(True, value) or (False, exception)."""


class Job:
    """One run of a function in a thread.

    The interrupt must hit its own job and no later one, without a lock that a dying thread could
    hold: the canceller sets `cancelling` and then reads `begun` and `finished`; the thread sets
    each of these and then reads `cancelling`. The second of the two sees the other's write."""

    __slots__ = (
        "args",
        "begun",
        "cancelling",
        "context",
        "done",
        "finished",
        "function",
        "is_shared",
        "kwargs",
        "sent",
        "thread_id",
    )

    def __init__(
        self,
        context: Context,
        function: Callable[..., Any],
        args: Any,
        kwargs: Mapping[str, Any],
        done: Callable[[Outcome], None],
        *,
        is_shared: bool,
    ) -> None:
        """`done`: called in the event loop with the outcome; `is_shared`: any thread may run it."""
        self.context = context
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.done = done
        self.is_shared = is_shared
        self.thread_id = 0
        self.begun = False
        self.cancelling = False
        self.finished = False
        self.sent: threading.Event | None = None

    def __repr__(self) -> str:
        return f"<Job {'finished' if self.finished else 'begun' if self.begun else 'waiting'}>"

    def interrupt(self) -> None:
        """Raise CallCancelled in the function, if it runs; it does not begin if it has not. Called
        from the event loop."""
        if self.cancelling:
            return
        self.sent = threading.Event()
        self.cancelling = True
        if self.begun:
            self._send(self.sent)
            asyncio.get_running_loop().call_later(_AGAIN_S[0], self._interrupt_again, 0)
        self.sent.set()

    def _interrupt_again(self, count: int) -> None:
        if self.finished or self.sent is None:
            return
        if not _is_handling(self.thread_id):
            self._send(self.sent)
        if count + 1 < len(_AGAIN_S):
            asyncio.get_running_loop().call_later(
                _AGAIN_S[count + 1], self._interrupt_again, count + 1
            )

    def _send(self, sent: threading.Event) -> None:
        sent.clear()
        if not self.finished:
            _raise_in(self.thread_id)
        sent.set()

    def run(self, thread_id: int) -> Outcome:
        """Run it in this thread, whose id that is."""
        self.thread_id = thread_id
        try:
            outcome = self._perform()
            self._finish()
        except CallCancelled as e:  # raised in the few instructions around the job
            outcome = (False, e)
            self._finish()
        return outcome

    def _perform(self) -> Outcome:
        self.begun = True
        if self.cancelling:
            return False, CallCancelled()
        try:
            return True, self.context.run(self.function, *self.args, **self.kwargs)
        except (
            BaseException
        ) as e:  # user code may raise anything, SystemExit too; it is reported as data
            return False, e

    def _finish(self) -> None:
        while True:
            try:
                self.finished = True
                if self.cancelling and self.sent is not None:
                    self.sent.wait()
                    _raise_in(self.thread_id)  # takes one that has not taken effect yet
                return
            except CallCancelled:
                continue


class CallThread:
    """One thread. It runs the jobs that it is given, or those that wait in the shared queue."""

    def __init__(self, threads: CallThreads, *, number: int) -> None:
        self._threads = threads
        self._own: SimpleQueue[Job | None] = SimpleQueue()
        self._current: Job | None = None
        self._thread = threading.Thread(target=self._work, name=f"call-{number}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<CallThread {self._thread.name} {'busy' if self._current else 'idle'}>"

    def run(
        self, context: Context, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> asyncio.Future[Outcome]:
        """Start a job in this thread, which was taken; the future's result is its outcome, it never
        raises. One at a time."""
        future = asyncio.get_running_loop().create_future()

        def done(outcome: Outcome) -> None:
            self._current = None
            if not future.done():
                future.set_result(outcome)

        self._current = job = Job(context, function, args, kwargs, done, is_shared=False)
        self._own.put(job)
        return future

    def interrupt(self) -> None:
        """Raise CallCancelled in the job that `run` started, if any; later jobs are not
        affected."""
        if self._current is not None:
            self._current.interrupt()

    def wake(self) -> None:
        """Have it look into the shared queue."""
        self._own.put(None)

    def _work(self) -> None:
        threads, own, identity = self._threads, self._own, threading.get_ident()
        try:
            while True:
                job = own.get()
                if job is None:
                    threads.run_waiting(self, identity)
                else:
                    threads.finish(job, job.run(identity))
                del job  # keep no reference to a caller's objects while waiting
        except RuntimeError:  # the loop is closed: the process is exiting
            return


class CallThreads:
    """The threads, the most recently used first. Owned by the event loop's thread; what call
    threads do here says so, and needs no lock: each step that two threads may take is one operation
    of a list or deque, and where one announces something and another looks for it, both announce
    first and look then."""

    def __init__(self) -> None:
        self._idle: list[CallThread] = []
        self._waiting: deque[Job] = deque()
        self._finished: deque[tuple[Job, Outcome]] = deque()
        self._loop: Any = None  # the event loop, set with the first thread
        self._made = 0
        self._open = 0
        self._taken = 0
        self._is_waking = False
        self._is_told = False

    def __repr__(self) -> str:
        return (
            f"<CallThreads idle={len(self._idle)} made={self._made} waiting={len(self._waiting)}>"
        )

    def start(
        self,
        context: Context,
        function: Callable[..., Any],
        args: Any,
        kwargs: Mapping[str, Any],
        done: Callable[[Outcome], None],
    ) -> Job:
        """Run a function in some thread; the caller limits how many run at once."""
        job = Job(context, function, args, kwargs, done, is_shared=True)
        self._open += 1
        self._waiting.append(job)
        if self._made < self._open + self._taken:
            self._idle.append(self._make())
        self._wake_one()
        return job

    def acquire(self) -> CallThread:
        """An idle thread, or a new one, for the caller alone, who limits how many run at once."""
        self._taken += 1
        if self._made >= self._open + self._taken:  # enough are left for the calls that wait
            with contextlib.suppress(IndexError):
                return self._idle.pop()
        return self._make()

    def release(self, thread: CallThread) -> None:
        """Return a thread that was taken and whose job has ended."""
        self._taken -= 1
        self._idle.append(thread)
        if self._waiting:
            self._wake_one()

    def make_ahead(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create an idle thread before the first call."""
        self._loop = loop
        self._idle.append(self._make())

    def _make(self) -> CallThread:
        self._loop = self._loop or asyncio.get_running_loop()
        self._made += 1
        return CallThread(self, number=self._made)

    def _wake_one(self) -> None:
        """Wake an idle thread unless one is on its way. From any thread."""
        if self._is_waking:
            return
        try:
            thread = self._idle.pop()
        except IndexError:
            return  # all are at work: the first that is ready takes what waits
        self._is_waking = True
        thread.wake()

    # -- from call threads -------------------------------------------------------------------------
    def run_waiting(self, thread: CallThread, identity: int) -> None:
        """Run what waits; returns when nothing does and the thread is among the idle ones."""
        self._is_waking = False
        while True:
            try:
                job = self._waiting.popleft()
            except IndexError:
                self._idle.append(thread)
                if not self._waiting:
                    return
                try:  # it came before the thread could be found
                    self._idle.remove(thread)
                except ValueError:
                    return  # it was found after all, and is woken
                continue
            if self._waiting:
                self._wake_one()
            self.finish(job, job.run(identity))
            del job

    def finish(self, job: Job, outcome: Outcome) -> None:
        """Hand an outcome to the event loop. Raises RuntimeError when that is closed."""
        self._finished.append((job, outcome))
        if not self._is_told:
            self._is_told = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_told = False
        try:
            while self._finished:
                job, outcome = self._finished.popleft()
                self._open -= job.is_shared
                job.done(outcome)
        finally:
            if self._finished:
                self._loop.call_soon(self._deliver)


def _raise_in(thread_id: int) -> None:
    """Raise CallCancelled in another thread, or take the one that is pending in this thread.

    One is raised in this thread, too, and caught: only an exception that takes effect resets the
    interpreter's flag (before CPython 3.13). To revoke one (NULL) leaves the flag set, and so does
    a thread that is inside C code. While it is set, all threads are slower, and one that is traced
    or profiled enters no function: it loops at the first bytecode. That may be this thread, so no
    function is entered between the two. A thread with a pending exception sets the flag again when
    it gets the interpreter's lock."""
    other, own = ctypes.c_ulong(thread_id), ctypes.c_ulong(threading.get_ident())
    raised = ctypes.py_object(CallCancelled)
    try:
        _set_async_exc(other, raised)
        _set_async_exc(own, raised)  # in place of one that is pending
        for _ in range(1000):  # it takes effect in an instruction or two
            pass
    except CallCancelled:
        return


def _is_handling(thread_id: int) -> bool:
    """Whether the thread is in a `finally` or `except` block that CallCancelled has led to."""
    found: Any = sys._current_exceptions().get(thread_id)
    error = found[1] if isinstance(found, tuple) else found  # a tuple before 3.12
    for _ in range(_CONTEXTS):
        if error is None or isinstance(error, CallCancelled):
            break
        error = error.__context__
    return isinstance(error, CallCancelled)
