"""Runs hooks and the warm-up, in the order of SnapStart: enter(snap=True), warm up, drop caches …
snapshot … enter(snap=False), serve, exit.

Before the snapshot, asynchronous code runs in a temporary event loop, since none may exist at the
snapshot point; objects that an `async def` enter(snap=True) keeps must not be bound to that loop.
After the snapshot, hooks run in the serving loop.

Each hook has a deadline: `timeout_s` of its decorator, otherwise the rest of the startup clock
before the snapshot, and HOOK_S after it. A hook that overruns is interrupted by SIGALRM
(setitimer(2)), in asynchronous code by a cancellation, so that its traceback shows where it hung;
code that does not return from C is ended by the node agent's clock."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import linecache
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from pilotlight.current_call.context import CURRENT_CALL
from pilotlight.spec.features.sources import PARAMETER
from pilotlight.worker.batching.runner import answer_alone
from pilotlight.worker.process import tensor_memory
from pilotlight.worker.user_code import user_errors
from pilotlight.worker.user_code.current_call import example
from pilotlight.worker.user_code.example_check import ExpectedAnswer
from pilotlight.worker.user_code.source_locations import definition_of
from pilotlight.worker.user_code.target import Hook, Method, Target, marks_of
from pilotlight.worker.user_code.user_errors import HOOK_NOTE

HOOK_S = 10.0
"""Default timeout of a hook after the snapshot, and of an exit hook; SnapStart's limit for
after-restore hooks."""
_AGAIN_S = 1.0
"""Interval at which the interrupt is repeated, for a hook that swallows it."""


class HookTimedOut(BaseException):
    """Raised inside a hook that exceeded its deadline. A BaseException, so that `except Exception`
    in a retry loop does not swallow it."""


class CheckFailed(Exception):
    """Raised when a method's `check=` rejects the method's own answer to its example, since it
    would then reject every snapshot."""


def run_before_snapshot(target: Target, *, within_s: float) -> None:
    """Run all enter(snap=True) hooks within `within_s`. Raises what a hook raises, and
    HookTimedOut."""
    ends_at = time.monotonic() + within_s
    with asyncio.Runner() as runner:
        for hook in target.enter_before_snapshot:
            with _clock(hook, max(0.001, ends_at - time.monotonic())) as limit_s:
                value = hook()
                if inspect.isawaitable(value):
                    runner.run(_awaited(value, limit_s, hook))


def warm_up(target: Target) -> dict[str, ExpectedAnswer]:
    """Call each method that declares an example once; returns the answers for later comparison.
    Raises what a method raises, and CheckFailed."""
    known = {}
    with asyncio.Runner() as runner:
        for name, method in target.examples.items():
            answer = runner.run(answer_example(method))
            _check(method, answer)
            known[name] = ExpectedAnswer.of(method, answer)
    return known


async def answer_example(method: Method) -> Any:
    """Call the method with its example; returns its answer, a generator's items as a list."""
    CURRENT_CALL.set(example())
    args, kwargs = method.binder.from_document(example_document(method.example))
    if method.features is not None:
        kwargs = {**kwargs, PARAMETER: method.features.defaults()}
    if method.batch is not None:
        return await answer_alone(method, args, kwargs)
    value = method.call(*args, **kwargs)
    if inspect.isawaitable(value):
        value = await value
    if inspect.isasyncgen(value):
        return [item async for item in value]
    return list(value) if inspect.isgenerator(value) else value


async def run_after_wake(hooks: Sequence[Hook], *, each_s: float) -> None:
    """Run enter(snap=False) or exit hooks in the serving loop. Raises what a hook raises, and
    HookTimedOut."""
    for hook in hooks:
        with _clock(hook, each_s) as limit_s:
            value = hook()
            if inspect.isawaitable(value):
                await _awaited(value, limit_s, hook)


def run_all(hooks: Sequence[Hook], *, each_s: float, reports: bool = False) -> None:
    """Run enter(snap=False) or exit hooks in an event loop of their own. `reports`: report what a
    hook raises, and go on; otherwise it is raised."""
    with asyncio.Runner() as runner:
        for hook in hooks:
            try:
                runner.run(run_after_wake([hook], each_s=each_s))
            except BaseException as e:  # user code may raise anything
                if not reports:
                    raise
                user_errors.report(e)


def run_limited(call: Callable[[], Any], *, within_s: float, message: str) -> None:
    """Call user code. Raises what it raises, and HookTimedOut with `message` when its time is
    up."""

    def strike() -> NoReturn:
        raise HookTimedOut(message)

    with _alarm(max(0.001, within_s), strike):
        call()


def drop_caches() -> None:
    """Release unused memory, stop helper threads, and freeze the heap so that forks share its
    pages."""
    stop_helpers()
    linecache.clearcache()
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        # a checkpoint copies all GPU memory of the process, including torch's cache
        torch.cuda.empty_cache()
    _trim()
    gc.freeze()


def stop_helpers() -> None:
    """End dispensable helper threads of libraries: a process with threads cannot be forked."""
    tensor_memory.stop_reading_ahead()
    bars = [getattr(sys.modules.get("tqdm"), "tqdm", None)]
    # every subclass has its own monitor: transformers and huggingface_hub define some
    for bar in bars:
        if bar is not None:
            bar.monitor_interval = 0
            if getattr(bar, "monitor", None) is not None:
                bar.monitor.exit()
                bar.monitor = None
            bars += bar.__subclasses__()


def _trim() -> None:
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def example_document(example: Any) -> Any:
    """An example as the JSON document that a caller would send."""
    return (
        list(example)
        if isinstance(example, tuple)
        else dict(example)
        if isinstance(example, dict)
        else example
    )


def _check(method: Method, answer: Any) -> None:
    if method.check is not None and method.check(answer, answer) is False:
        name = method.name or getattr(method.call, "__name__", "the function")
        raise CheckFailed(
            f"check= of {name} rejects the answer to its example when compared with itself: "
            f"{answer!r:.200}"
        )


async def _awaited(value: Any, limit_s: float, hook: Hook) -> None:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            await value
    except TimeoutError as e:
        if limit.expired():
            raise _timed_out(hook, limit_s) from e
        raise


@contextlib.contextmanager
def _clock(hook: Hook, default_s: float) -> Iterator[float]:
    """Interrupt the hook when its time is up; add its name to any exception. Yields its timeout in
    seconds."""
    limit_s = _own_limit_s(hook) or default_s
    grace_s = _AGAIN_S if inspect.iscoroutinefunction(hook) else 0.0  # the cancellation comes first
    try:
        with _alarm(limit_s + grace_s, lambda: _strike(hook, limit_s)):
            yield limit_s
    except BaseException as e:
        e.add_note(f"{HOOK_NOTE}{_title(hook)}")
        raise


@contextlib.contextmanager
def _alarm(seconds: float, strike: Callable[[], NoReturn]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda *_: strike())
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)


def _strike(hook: Hook, limit_s: float) -> NoReturn:
    raise _timed_out(hook, limit_s)


def _timed_out(hook: Hook, limit_s: float) -> HookTimedOut:
    return HookTimedOut(f"{_title(hook)} did not return within {limit_s:.3g} s")


def _own_limit_s(hook: Hook) -> float | None:
    marks = marks_of(hook)
    mark = marks.get("enter") or marks.get("exit")
    limit_s = mark.get("timeout_s") if isinstance(mark, dict) else None
    return None if limit_s is None else float(limit_s)


def _title(hook: Hook) -> str:
    mark = marks_of(hook).get("enter")
    decorator = "@exit()" if mark is None else f"@enter(snap={bool(mark.get('snap', True))})"
    return f"{definition_of(hook)}, marked {decorator},"
