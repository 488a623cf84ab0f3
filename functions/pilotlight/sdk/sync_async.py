"""`SyncAsyncMethod`: one operation in two forms, blocking `f(…)` and asynchronous `f.aio(…)`; and
the boundary of the SDK, where errors of the platform lose the stack frames of its client."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Generic, ParamSpec, TypeVar, cast

from pilotlight.errors import DEBUG_VARIABLE, PilotlightError

P = ParamSpec("P")
R = TypeVar("R")
S_co = TypeVar("S_co", covariant=True)
A_co = TypeVar("A_co", covariant=True)


class SyncAsyncMethod(Generic[P, S_co, A_co]):
    """A blocking callable whose method `aio` is its asynchronous counterpart, for `await` or
    `async for`."""

    def __init__(self, blocking: Callable[P, S_co], aio: Callable[P, A_co]) -> None:
        self._blocking = blocking
        self._aio = aio
        self.__doc__ = blocking.__doc__

    def __repr__(self) -> str:
        return (
            f"<{getattr(self._blocking, '__qualname__', 'operation').replace('._', '.')}, and .aio>"
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> S_co:
        try:
            result: Any = self._blocking(*args, **kwargs)
        except PilotlightError as e:
            raise _shortened(e) from _cause(e)
        return cast("S_co", _iterate(result) if isinstance(result, types.GeneratorType) else result)

    def aio(self, *args: P.args, **kwargs: P.kwargs) -> A_co:
        """The asynchronous form."""
        try:
            result: Any = self._aio(*args, **kwargs)
        except PilotlightError as e:
            raise _shortened(e) from _cause(e)
        if isinstance(result, types.CoroutineType):
            return cast("A_co", _await(result))
        return cast(
            "A_co",
            _iterate_async(result) if isinstance(result, types.AsyncGeneratorType) else result,
        )


def with_short_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Raise errors of the platform at the line of the caller, without the frames below."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except PilotlightError as e:
            raise _shortened(e) from _cause(e)

    return call


def _shortened(error: PilotlightError) -> PilotlightError:
    """The error without its stack frames, which are those of the SDK and its HTTP library."""
    return error if os.environ.get(DEBUG_VARIABLE) else error.with_traceback(None)


def _cause(error: PilotlightError) -> BaseException | None:
    """The error's cause, which is printed before it: the message names it already."""
    return error.__cause__ if os.environ.get(DEBUG_VARIABLE) else None


async def _await(result: Coroutine[Any, Any, R]) -> R:
    try:
        return await result
    except PilotlightError as e:
        raise _shortened(e) from _cause(e)


def _iterate(items: Generator[R]) -> Generator[R]:
    try:
        yield from items
    except PilotlightError as e:
        raise _shortened(e) from _cause(e)


async def _iterate_async(items: AsyncGenerator[R]) -> AsyncGenerator[R]:
    try:
        async for item in items:
            yield item
    except PilotlightError as e:
        raise _shortened(e) from _cause(e)
    finally:
        await items.aclose()  # a caller that leaves early ends the generator on the platform
