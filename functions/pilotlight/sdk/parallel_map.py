"""Many calls at once, a bounded number in flight, results in order or as they come. Leaving early
cancels what is in flight.

`run_async` owns tasks of the running loop. `run_sync` is the same for synchronous callers: the
calls live in the background loop, the inputs are drawn in the caller's own thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pilotlight.errors import InvalidInput

DEFAULT_CONCURRENCY = 64
"""Calls in flight of one map: enough to wake several instances, far below the platform's default
queue of 1000."""

Input = tuple[tuple[Any, ...], dict[str, Any]]
AsyncCallable = Callable[..., Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapOptions:
    """How a map runs: `concurrency` calls in flight; ordered, or as they finish; exceptions raised,
    or yielded in place."""

    concurrency: int = DEFAULT_CONCURRENCY
    ordered: bool = True
    return_exceptions: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= 10_000:
            raise InvalidInput(
                f"concurrency = {self.concurrency!r}: must be 1 to 10000", parameter="concurrency"
            )


def run_sync(
    call: AsyncCallable,
    inputs: Iterable[Input],
    options: MapOptions,
    loop: asyncio.AbstractEventLoop,
) -> Iterator[Any]:
    """Results of `call(*args, **kwargs)` for every input; the calls run in `loop`, which another
    thread drives."""
    pending: deque[concurrent.futures.Future[Any]] = deque()
    source = iter(inputs)
    exhausted = False
    try:
        while True:
            while not exhausted and len(pending) < options.concurrency:
                item = next(source, None)
                exhausted = item is None
                if item is not None:
                    pending.append(asyncio.run_coroutine_threadsafe(_outcome(call, item), loop))
            if not pending:
                return
            if not options.ordered:
                done, _ = concurrent.futures.wait(
                    pending, return_when=concurrent.futures.FIRST_COMPLETED
                )
                first = next(f for f in pending if f in done)
                pending.remove(first)
            else:
                first = pending.popleft()
            yield _settle(first.result(), options)
    finally:
        for future in pending:
            future.cancel()


async def run_async(
    call: AsyncCallable, inputs: Iterable[Input] | AsyncIterable[Input], options: MapOptions
) -> AsyncIterator[Any]:
    """The same in the running loop; `inputs` may be asynchronous."""
    pending: deque[asyncio.Task[Any]] = deque()
    source = aiter(inputs) if isinstance(inputs, AsyncIterable) else _as_async(inputs)
    exhausted = False
    try:
        while True:
            while not exhausted and len(pending) < options.concurrency:
                item = await anext(source, None)
                exhausted = item is None
                if item is not None:
                    pending.append(asyncio.create_task(_outcome(call, item), name="pilotlight map"))
            if not pending:
                return
            if not options.ordered:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                first = next(t for t in pending if t in done)
                pending.remove(first)
            else:
                first = pending[0]
                await asyncio.wait([first])
                pending.popleft()
            yield _settle(first.result(), options)
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)


@dataclass(frozen=True, slots=True)
class _Failed:
    """An exception as a value, so that a failed call nobody waits for any more leaves no 'never
    retrieved' complaint."""

    error: Exception


async def _outcome(call: AsyncCallable, item: Input) -> Any:
    args, kwargs = item
    try:
        return await call(*args, **kwargs)
    except Exception as e:  # noqa: BLE001 - whatever the remote function raised is a result here; _settle raises or returns it
        return _Failed(e)


def _settle(outcome: Any, options: MapOptions) -> Any:
    if not isinstance(outcome, _Failed):
        return outcome
    if options.return_exceptions:
        return outcome.error
    raise outcome.error


async def _as_async(inputs: Iterable[Input]) -> AsyncIterator[Input]:
    for item in inputs:
        yield item
