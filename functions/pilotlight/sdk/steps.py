"""Operations that are written once, without input and output, and offered in two forms: blocking,
and with `aio`."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar

from pilotlight.client import sessions
from pilotlight.client.async_client import AsyncClient
from pilotlight.client.client import Client
from pilotlight.errors import PilotlightError
from pilotlight.sdk.sync_async import SyncAsyncMethod

P = ParamSpec("P")
R = TypeVar("R")


class Ask(Protocol):
    """A request, which either client sends."""

    def send(self, client: Client) -> Any:
        """Return its answer."""

    def send_aio(self, client: AsyncClient) -> Awaitable[Any]:
        """Return its answer."""


Steps: TypeAlias = Generator[Ask | float, Any, R]
"""An operation without its input and output: yields requests, which it is sent the answers of, and
pauses in seconds; returns the result."""


class Operation(Generic[P, R]):
    """A method that is written as Steps, and read as a method that blocks, with `aio`."""

    def __init__(self, steps: Callable[Concatenate[Any, P], Steps[R]]) -> None:
        self._steps = steps
        functools.update_wrapper(self, steps)  # type: ignore[arg-type]

    def __get__(self, instance: object, owner: type) -> SyncAsyncMethod[P, R, Awaitable[R]]:
        steps = self._steps

        @functools.wraps(steps)
        def blocking(*args: P.args, **kwargs: P.kwargs) -> R:
            return run(steps(instance, *args, **kwargs))

        async def aio(*args: P.args, **kwargs: P.kwargs) -> R:
            return await run_aio(steps(instance, *args, **kwargs))

        return SyncAsyncMethod(blocking, aio)


def run(steps: Steps[R]) -> R:
    """Run an operation, blocking."""
    client = sessions.client()
    try:
        step = next(steps)
        while True:
            if isinstance(step, float | int):
                time.sleep(step)
                step = next(steps)
                continue
            try:
                answer = step.send(client)
            except PilotlightError as e:
                step = steps.throw(e)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: R = end.value
        return result


async def run_aio(steps: Steps[R]) -> R:
    """Run an operation."""
    client = await sessions.async_client()
    try:
        step = next(steps)
        while True:
            if isinstance(step, float | int):
                await asyncio.sleep(step)
                step = next(steps)
                continue
            try:
                answer = await step.send_aio(client)
            except PilotlightError as e:
                step = steps.throw(e)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: R = end.value
        return result
