"""Runs a batched body over the calls of a batch, or over one of them alone. A run never raises, and
can be stopped."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Any

from pilotlight.sdk.batches import BatchLists
from pilotlight.worker.process.call_threads import CallThread, CallThreads, Outcome
from pilotlight.worker.user_code.target import Method, Style


class BatchRunner:
    """Runs the body of one method, one run at a time. Owned by the event loop."""

    def __init__(self, method: Method, lists: BatchLists, threads: CallThreads) -> None:
        self._method = method
        self._lists = lists
        self._threads = threads
        self._thread: CallThread | None = None
        self._task: asyncio.Task[Outcome] | None = None

    def __repr__(self) -> str:
        return (
            f"<BatchRunner {self._lists.title} "
            f"{'running' if self._thread or self._task else 'idle'}>"
        )

    async def run(self, calls: Sequence[tuple[Any, ...]], context: Context) -> Outcome:
        """Run the body, a synchronous one in a call thread; returns (True, one result per call) or
        (False, exception)."""
        args, kwargs = self._lists.gathered(calls)
        if self._method.style is Style.COROUTINE:
            ok, value = await self._in_task(self._method.call(*args, **kwargs), context)
        else:
            ok, value = await self._in_thread(self._method.call, args, kwargs, context)
            # from a plain function: a decorator without `async`
            if ok and inspect.iscoroutine(value):
                ok, value = await self._in_task(value, context)
        return self._results(value, len(calls)) if ok else (ok, value)

    def stop(self) -> None:
        """Stop the run: no caller waits for it."""
        if self._thread is not None:
            self._thread.interrupt()
        elif self._task is not None:
            self._task.cancel()

    async def _in_task(self, body: Awaitable[Any], context: Context) -> Outcome:
        self._task = asyncio.get_running_loop().create_task(
            _outcome_of(body), context=context, name="batch body"
        )
        try:
            await asyncio.wait([self._task])
            return self._task.result()
        finally:
            self._task = None

    async def _in_thread(
        self, function: Callable[..., Any], args: Any, kwargs: Any, context: Context
    ) -> Outcome:
        self._thread = thread = self._threads.acquire()
        try:
            return await thread.run(context, function, args, kwargs)
        finally:
            self._thread = None
            self._threads.release(thread)

    def _results(self, answer: Any, count: int) -> Outcome:
        try:
            return True, self._lists.results(answer, count)
        except (
            Exception
        ) as e:  # WrongResults, or what the user's own sequence raises when it is read
            return False, e


async def _outcome_of(body: Awaitable[Any]) -> Outcome:
    try:
        return True, await body
    except (
        BaseException
    ) as e:  # user code may raise anything, SystemExit too; it is reported as data
        return False, e


async def answer_alone(method: Method, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run one call as its own batch in the current thread; returns its result. Raises what the
    method raises, and WrongResults."""
    lists = BatchLists(method.call)
    positional, named = lists.gathered([lists.values(args, kwargs)])
    answer = method.call(*positional, **named)
    (result,) = lists.results(await answer if inspect.isawaitable(answer) else answer, 1)
    if isinstance(result, Exception):
        raise result
    return result
