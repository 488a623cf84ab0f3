"""`with pilotlight.span("tokenise", tokens=12):` records a named part of a call in its trace.
Outside a call in a worker it does nothing.

Spans nest by context variable, so nesting is correct in `async` code, in call threads, in
`asyncio.to_thread` and across the items of a generator. Before Python 3.14, a thread that user code
starts has an empty context: run it in `contextvars.copy_context()`."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


class SpanRecorder(Protocol):
    """Records the spans of one call. Thread-safe."""

    def begin(self, begun: span, parent: span | None) -> str:
        """Return the id of a new span; "" if the call has reached its limit of spans."""

    def end(self, ended: span) -> None:
        """Record the end of a span."""


class span:  # noqa: N801 - it reads as a statement
    """A named part of a call, as a context manager (`with` and `async with`) or a decorator.

    Attributes:
        id: 16 hex digits; "" while not recorded.
        parent: id of the enclosing span; "" = the call itself.
        began_ns, ended_ns: `time.perf_counter_ns()`.
        error: type of the exception that ended it; "" = none.
        attributes: strings, numbers and booleans; `set` adds more."""

    __slots__ = (
        "_outer",
        "_recorder",
        "attributes",
        "began_ns",
        "ended_ns",
        "error",
        "id",
        "name",
        "parent",
    )

    def __init__(self, name: str, /, **attributes: Any) -> None:
        self.name = name
        self.attributes = attributes
        self.id = ""
        self.parent = ""
        self.error = ""
        self.began_ns = 0
        self.ended_ns = 0
        self._recorder: SpanRecorder | None = None
        self._outer: Current = None

    def __repr__(self) -> str:
        return (
            f"<span {self.name!r} "
            f"{'ended' if self.ended_ns else 'open' if self.began_ns else 'new'}>"
        )

    def set(self, /, **attributes: Any) -> Self:
        """Add attributes to the span."""
        self.attributes.update(attributes)
        return self

    def __enter__(self) -> Self:
        outer = CURRENT_RECORDER.get()
        if outer is None:
            return self
        around = outer if isinstance(outer, span) else None
        recorder = around._recorder if around is not None else outer
        self._outer, self._recorder = outer, cast(SpanRecorder, recorder)
        self.id = self._recorder.begin(self, around)
        self.parent = around.id if around is not None else ""
        if self.id:
            CURRENT_RECORDER.set(self)
        self.began_ns = time.perf_counter_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.id or self.ended_ns or self._recorder is None:
            return
        self.ended_ns = time.perf_counter_ns()
        if kind is not None and not issubclass(
            kind, GeneratorExit | StopIteration | StopAsyncIteration
        ):
            self.error = kind.__qualname__
        # otherwise it ends in another context or before an inner span: nothing to restore
        if CURRENT_RECORDER.get() is self:
            CURRENT_RECORDER.set(self._open_outer())
        self._recorder.end(self)

    def _open_outer(self) -> Current:
        """The innermost enclosing span that is open: spans of generators may end before inner
        ones."""
        outer = self._outer
        while isinstance(outer, span) and outer.ended_ns:
            outer = outer._outer
        return outer

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, traceback)

    def __call__(self, function: _Function) -> _Function:
        """Decorate a function so that each call of it is a span."""
        name, attributes = self.name, dict(self.attributes)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__qualname__} is a generator: use `with pilotlight.span({name!r}):` "
                "inside it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def waiting(*args: Any, **kwargs: Any) -> Any:
                with span(name, **attributes):
                    return await function(*args, **kwargs)

            return cast(_Function, waiting)

        @functools.wraps(function)
        def calling(*args: Any, **kwargs: Any) -> Any:
            with span(name, **attributes):
                return function(*args, **kwargs)

        return cast(_Function, calling)


Current = span | SpanRecorder | None
CURRENT_RECORDER: ContextVar[Current] = ContextVar("pilotlight_span", default=None)
"""The innermost open span; without one, the recorder of the call; None outside calls."""


def current_span_id() -> str:
    """Return the id of the innermost open span; "" where none is recorded."""
    current = CURRENT_RECORDER.get()
    return current.id if isinstance(current, span) else ""
