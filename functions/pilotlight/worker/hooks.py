"""Hooks and the warm-up, in the order of SnapStart: enter(snap=True), warm up, drop caches … snapshot … enter(snap=False), serve, exit.

Before the snapshot asynchronous code runs in an event loop of its own that is closed again, since none may exist at the snapshot point;
whatever an `async def` enter(snap=True) keeps must not be bound to that loop. After it, hooks run in the loop that serves.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from pilotlight.worker.target import Hook, Method, Target


class CheckFailed(Exception):
    """Raised when a method's `check=` rejects the method's own answer to its example: then it would reject every snapshot."""


def run_before_snapshot(target: Target) -> None:
    """enter(snap=True). Raises what a hook raises."""
    with asyncio.Runner() as runner:
        for hook in target.enter_before_snapshot:
            value = hook()
            if inspect.isawaitable(value):
                runner.run(_awaited(value))


def warm_up(target: Target) -> None:
    """Call each method that declares an example, once. Raises what it raises, and CheckFailed."""
    with asyncio.Runner() as runner:
        for method in target.methods.values():
            if method.example is not None:
                answer = runner.run(answer_example(method))
                _check(method, answer)


async def answer_example(method: Method) -> Any:
    """The method's answer to its example; a generator's items as a list."""
    args, kwargs = method.binder.from_document(_document(method.example))
    value = method.call(*args, **kwargs)
    if inspect.isawaitable(value):
        value = await value
    if inspect.isasyncgen(value):
        return [item async for item in value]
    return list(value) if inspect.isgenerator(value) else value


async def run_after_wake(hooks: Sequence[Hook]) -> None:
    """enter(snap=False) or exit, in the serving loop. Raises what a hook raises."""
    for hook in hooks:
        value = hook()
        if inspect.isawaitable(value):
            await value


def drop_caches() -> None:
    """Give back what the start left behind, stop tqdm's monitor, and freeze the heap so that forks share its pages."""
    tqdm = sys.modules.get("tqdm")
    bar = getattr(tqdm, "tqdm", None)
    if bar is not None:
        bar.monitor_interval = 0
        if getattr(bar, "monitor", None) is not None:
            bar.monitor.exit()
            bar.monitor = None
    gc.collect()
    _trim()
    gc.freeze()


def _trim() -> None:
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _document(example: Any) -> Any:
    return list(example) if isinstance(example, tuple) else dict(example) if isinstance(example, dict) else example


def _check(method: Method, answer: Any) -> None:
    if method.check is not None and method.check(answer, answer) is False:
        name = method.name or getattr(method.call, "__name__", "the function")
        raise CheckFailed(f"check= of {name} says that the answer to its example differs from itself: {answer!r:.200}")


async def _awaited(value: Any) -> Any:
    return await value
