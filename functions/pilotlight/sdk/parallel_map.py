"""Parallel calls with bounded concurrency, with results in order or as completed. Leaving the
iteration early cancels the calls in flight.

`run_async` uses tasks of the running loop. `run_sync` is for synchronous callers: the calls run in
the background loop, and the inputs are read in the thread of the caller."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import dataclass
from typing import Any

from pilotlight.errors import InvalidInput

DEFAULT_CONCURRENCY = 64
"""Default calls in flight of one map: enough to start several instances, far below the default
queue limit of 1000."""

Input = tuple[tuple[Any, ...], dict[str, Any]]
AsyncCallable = Callable[..., Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapOptions:
    """Options of a map.

    Attributes:
        concurrency: maximum calls in flight.
        ordered: yield results in the order of inputs, not as they complete.
        return_exceptions: yield exceptions in place of results, instead of raising."""

    concurrency: int = DEFAULT_CONCURRENCY
    ordered: bool = True
    return_exceptions: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= 10_000:
            raise InvalidInput(
                f"concurrency = {self.concurrency!r}: must be 1 to 10000", parameter="concurrency"
            )


def inputs_of(rows: Iterable[Iterable[Any]], kwargs: Mapping[str, Any] | None) -> Iterator[Input]:
    """Yield an input per tuple of arguments, each with `kwargs`."""
    for row in rows:
        yield tuple(row), dict(kwargs or {})


async def zip_inputs(
    iterables: tuple[Iterable[Any] | AsyncIterable[Any], ...], kwargs: Mapping[str, Any] | None
) -> AsyncIterator[Input]:
    """Yield an input per element of the iterables (zipped), each with `kwargs`."""
    sources = [aiter(i) if isinstance(i, AsyncIterable) else _as_async(i) for i in iterables]
    end = object()
    while sources:
        row = [await anext(source, end) for source in sources]
        if any(value is end for value in row):
            return
        yield tuple(row), dict(kwargs or {})


def run_sync(
    call: AsyncCallable,
    inputs: Iterable[Input],
    options: MapOptions,
    loop: asyncio.AbstractEventLoop,
) -> Iterator[Any]:
    """Yield the results of `call(*args, **kwargs)` for every input. The calls run in `loop`, which
    runs in another thread."""
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
            yield _result_of(first.result(), options)
    finally:
        for future in pending:
            future.cancel()


async def run_async(
    call: AsyncCallable, inputs: Iterable[Input] | AsyncIterable[Input], options: MapOptions
) -> AsyncIterator[Any]:
    """Yield the results of `call(*args, **kwargs)` for every input, in the running loop. `inputs`
    may be asynchronous."""
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
            yield _result_of(first.result(), options)
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)


@dataclass(frozen=True, slots=True)
class _Failed:
    """An exception as a value, so that a failed call that is no longer awaited causes no "exception
    was never retrieved" warning."""

    error: Exception


async def _outcome(call: AsyncCallable, item: Input) -> Any:
    args, kwargs = item
    try:
        return await call(*args, **kwargs)
    except Exception as e:  # noqa: BLE001 - errors of the call are results; _result_of handles them
        return _Failed(e)


def _result_of(outcome: Any, options: MapOptions) -> Any:
    if not isinstance(outcome, _Failed):
        return outcome
    if options.return_exceptions:
        return outcome.error
    raise outcome.error


async def _as_async(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item
