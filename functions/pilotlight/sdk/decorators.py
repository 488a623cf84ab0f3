"""Decorators that mark functions and classes: `enter, exit, method, concurrent, batched, asgi_app`.

A mark is an entry in the dictionary `_pilotlight_marks` of the function or class itself.
`@app.function()` and `@app.cls()` read marks at declaration, the worker reads them at run time. No
decorator wraps its target: a marked function is called as before."""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from pilotlight.errors import InvalidInput
from pilotlight.spec.policies import BatchPolicy

if TYPE_CHECKING:
    from pilotlight.sdk.function import Function

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

METADATA_ATTRIBUTE = "_pilotlight_marks"
_REMOTE_VERBS = ("remote", "remote_gen", "map", "starmap", "for_each", "spawn", "local")


class PilotlightWarning(UserWarning):
    """Warns of an option that is accepted but has no effect."""


def metadata_of(target: Any) -> Mapping[str, Any]:
    """Return the marks of a function or class itself, without those of base classes."""
    found = vars(target).get(METADATA_ATTRIBUTE, {}) if hasattr(target, "__dict__") else {}
    return found if isinstance(found, Mapping) else {}


def set_metadata(target: Any, key: str, value: Any) -> None:
    """Add one mark to `target`. Raises InvalidInput if `target` already has it."""
    marks = dict(metadata_of(target))
    if key in marks:
        raise InvalidInput(f"{describe_target(target)} is marked @{key} twice: remove one")
    setattr(target, METADATA_ATTRIBUTE, {**marks, key: value})


def describe_target(target: Any) -> str:
    """Return `name (file:line)` of a function or class, as far as known, for error messages."""
    name = getattr(target, "__qualname__", None) or repr(target)
    code = getattr(target, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else str(name)


def refuse_bare(decorator: str, target: Any) -> None:
    """Raise InvalidInput if a decorator was used without parentheses, which passes the decorated
    object as `target`."""
    if target is not None:
        raise InvalidInput(
            f"@{decorator} was written without parentheses on {describe_target(target)}: write "
            f"@{decorator}()"
        )


def _function(decorator: str, target: Any) -> Any:
    if hasattr(target, "__pilotlight__"):
        raise InvalidInput(
            f"@{decorator} must be placed below @app.function() or @app.cls(), closer to the "
            f"definition of {target!r}"
        )
    if not inspect.isfunction(target):
        raise InvalidInput(
            f"@{decorator} decorates functions and methods; {describe_target(target)} is a "
            f"{type(target).__name__}"
        )
    return target


def enter(
    func: None = None, /, *, snap: bool = True, timeout_s: float | None = None
) -> Callable[[F], F]:
    """Run this method when an instance starts, before it receives calls.

    Args:
        snap: True (the default): run once, before the snapshot; for imports, model loading and
            warm-up. False: run after every fork or restore; for connections, credentials and
            everything else that instances must not share.
        timeout_s: time limit of the method. None: before the snapshot, the rest of the startup
            timeout; after it, 10 s (with `snapshot=False`, the startup timeout). A method that
            exceeds its limit fails the start with an error that names it."""
    refuse_bare("pilotlight.enter", func)
    options = {"snap": bool(snap), **_limit("pilotlight.enter", timeout_s)}

    def mark(method: F) -> F:
        set_metadata(_function("pilotlight.enter", method), "enter", options)
        return method

    return mark


def exit(func: None = None, /, *, timeout_s: float | None = None) -> Callable[[F], F]:  # noqa: A001 - the word that users know
    """Run this method when an instance shuts down gracefully.

    It may run for `timeout_s` (None: 10 s), but not beyond the grace period of the shutdown. It
    does not run when an instance is killed or crashes."""
    refuse_bare("pilotlight.exit", func)
    options = _limit("pilotlight.exit", timeout_s) or True

    def mark(method: F) -> F:
        set_metadata(_function("pilotlight.exit", method), "exit", options)
        return method

    return mark


def _limit(decorator: str, timeout_s: float | None) -> dict[str, float]:
    if timeout_s is None:
        return {}
    if (
        isinstance(timeout_s, bool)
        or not isinstance(timeout_s, int | float)
        or not 0 < timeout_s <= 7 * 86_400
    ):
        raise InvalidInput(
            f"@{decorator}(timeout_s={timeout_s!r}): must be more than 0 s and at most 7 days",
            parameter="timeout_s",
        )
    return {"timeout_s": float(timeout_s)}


def method(
    func: None = None,
    /,
    *,
    example: Any = None,
    check: Callable[[Any, Any], bool] | None = None,
    is_generator: bool | None = None,
) -> Callable[[Callable[Concatenate[Any, P], R]], Function[P, R]]:
    """Make this method of an `@app.cls()` class remotely callable: `Class().name.remote(…)`.

    Type checkers see a `Function`, because they do not follow class decorators; at run time the
    method remains a plain function.

    Args:
        example: JSON arguments of an example call, as a list (by position) or a dict (by name). It
            warms up each instance and verifies snapshots.
        check: `check(answer, expected) -> bool` compares the answers to the example where equality
            is too strict.
        is_generator: ignored; detected from the method."""
    refuse_bare("pilotlight.method", func)
    if is_generator is not None:
        warn_ignored("is_generator", "it is detected from the function")
    options = method_metadata(example=example, check=check)

    def mark(method: Callable[Concatenate[Any, P], R]) -> Function[P, R]:
        set_metadata(_function("pilotlight.method", method), "method", options)
        for verb in _REMOTE_VERBS:
            setattr(method, verb, _Undeclared(verb, method))
        return cast("Function[P, R]", method)

    return mark


def method_metadata(*, example: Any, check: Callable[[Any, Any], bool] | None) -> dict[str, Any]:
    """Validate the example and check of a callable and return its mark. Raises InvalidInput."""
    if example is not None and not isinstance(example, list | tuple | dict):
        raise InvalidInput(
            f"example = {example!r}: pass the arguments as a list, example=[{example!r}], or by "
            f"name as a dict",
            parameter="example",
        )
    try:
        json.dumps(example)
    except (TypeError, ValueError) as e:
        raise InvalidInput(
            f"example = {example!r} cannot be encoded as JSON: {e}", parameter="example"
        ) from e
    if check is not None and not callable(check):
        raise InvalidInput(
            f"check = {check!r}: must be a function check(answer, expected) -> bool",
            parameter="check",
        )
    if check is not None and example is None:
        raise InvalidInput(
            "check= compares answers to the example: pass example= as well", parameter="check"
        )
    return {"example": list(example) if isinstance(example, tuple) else example, "check": check}


class _Undeclared:
    """Stands in for a verb such as `.remote` on a marked method of a plain object; raises
    InvalidInput when called."""

    def __init__(self, verb: str, method: Callable[..., Any]) -> None:
        self._verb = verb
        self._method = method.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner, _, name = self._method.rpartition(".")
        owner = owner.rpartition(".")[2] or "Class"
        raise InvalidInput(
            f"{self._method}.{self._verb}(…) was called on a plain {owner} object. Outside the "
            f"class: decorate it with @app.cls() and call {owner}().{name}.{self._verb}(…). Inside "
            f"the class: call self.{name}(…), which runs in the same instance."
        )

    def aio(self, *args: Any, **kwargs: Any) -> Any:
        """Raise InvalidInput."""
        return self(*args, **kwargs)


def concurrent(
    func: None = None, /, *, max_inputs: int, target_inputs: int | None = None
) -> Callable[[T], T]:
    """Let one instance process up to `max_inputs` calls concurrently.

    The autoscaler aims at `target_inputs` calls per instance (None: `max_inputs`). Place the
    decorator on a class or function, below `@app.cls()` or `@app.function()`."""
    refuse_bare("pilotlight.concurrent", func)

    def mark(target: T) -> T:
        if not inspect.isclass(target):
            _function("pilotlight.concurrent", target)
        set_metadata(
            target, "concurrent", {"max_inputs": max_inputs, "target_inputs": target_inputs}
        )
        return target

    return mark


class BatchedDecorator(Protocol):
    """The type of `@batched(…)`: a body that takes lists becomes callable with single values."""

    @overload
    def __call__(
        self, body: Callable[P, Coroutine[Any, Any, Sequence[R]]], /
    ) -> Callable[..., Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, body: Callable[P, Sequence[R]], /) -> Callable[..., R]: ...
    @overload
    def __call__(self, body: Callable[P, Any], /) -> Callable[..., Any]: ...


def batched(
    func: None = None,
    /,
    *,
    max_batch_size: int,
    wait_ms: float,
    buckets: Sequence[int] = (),
    adaptive: bool = True,
    retry_alone: bool = True,
) -> BatchedDecorator:
    """Combine single calls into batches (dynamic batching).

    Each caller passes one value per parameter and gets one result. The body receives a list per
    parameter and returns a list of results in the same order; an exception in the list fails only
    the call in its position. Place the decorator on a function below `@app.function()`, or on a
    method (with or without `@method()`).

    Args:
        max_batch_size: maximum number of calls in one batch.
        wait_ms: how long the first call of a batch waits for others at most, when it could run.
        buckets: ascending length limits, such as (64, 256). Only calls of the same bucket share a
            batch. The length of a call is that of its first argument, if it has one.
        adaptive: wait only if, by the measured cost of batches, waiting pays off. False: always
            wait up to `wait_ms`.
        retry_alone: when the body raises, retry each call of the batch once, alone. False: every
            call of the batch fails with the error."""
    refuse_bare("pilotlight.batched", func)
    try:
        policy = BatchPolicy(
            max_batch_size=max_batch_size,
            wait_ms=float(wait_ms),
            buckets=tuple(buckets),
            adaptive=adaptive,
            retry_alone=retry_alone,
        )
    except (TypeError, ValueError) as e:
        raise InvalidInput(
            f"batched: max_batch_size, wait_ms and buckets must be numbers: {e}"
        ) from e
    options = {**dataclasses.asdict(policy), "buckets": list(policy.buckets)}

    def mark(method: Any) -> Any:
        set_metadata(_function("pilotlight.batched", method), "batched", options)
        return method

    return cast("BatchedDecorator", mark)


def asgi_app(
    func: None = None, /, *, example: str | None = None, **ignored_options: Any
) -> Callable[[F], F]:
    """Serve the ASGI application (FastAPI, Starlette, …) that this function returns, under
    `/fn/{app}/{function}/`.

    `example` is a path of the application, such as "/health". With it, the application is created
    and the path requested before the snapshot, which makes starts faster; the application must then
    work without secrets and answer the path before its lifespan startup. None: the application is
    created at every start."""
    refuse_bare("pilotlight.asgi_app", func)
    if example is not None and (not isinstance(example, str) or not example.startswith("/")):
        raise InvalidInput(
            f"@pilotlight.asgi_app(example={example!r}): must be a path of the application, such "
            "as '/'",
            parameter="example",
        )
    for name in ignored_options:
        warn_ignored(name, "the application is served under /fn/{app}/{function}/")

    def mark(function: F) -> F:
        set_metadata(
            _function("pilotlight.asgi_app", function),
            "asgi",
            True if example is None else {"example": example},
        )
        return function

    return mark


def warn_ignored(name: str, why: str, *, stacklevel: int = 3) -> None:
    """Warn that an option is accepted but has no effect."""
    warnings.warn(
        f"{name}= has no effect on pilotlight: {why}", PilotlightWarning, stacklevel=stacklevel
    )
