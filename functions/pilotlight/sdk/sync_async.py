"""`SyncAsyncMethod`: one operation in two forms, blocking `f(…)` and asynchronous `f.aio(…)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
S_co = TypeVar("S_co", covariant=True)
A_co = TypeVar("A_co", covariant=True)


class SyncAsyncMethod(Generic[P, S_co, A_co]):
    """A blocking callable whose attribute `aio` is its asynchronous counterpart, for `await` or
    `async for`."""

    def __init__(self, blocking: Callable[P, S_co], aio: Callable[P, A_co]) -> None:
        self._blocking = blocking
        self.aio = aio
        self.__doc__ = blocking.__doc__

    def __repr__(self) -> str:
        return (
            f"<{getattr(self._blocking, '__qualname__', 'operation').replace('._', '.')}, and .aio>"
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> S_co:
        return self._blocking(*args, **kwargs)
