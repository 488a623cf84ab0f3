"""Decorators that mark what they are put on, and change nothing: `enter, exit, method, concurrent,
batched, asgi_app`.

A mark is an entry in the dictionary `_pilotlight_marks` of the function (or class) itself;
`@app.function()` and `@app.cls()` read the marks when they declare, the worker reads them when it
runs. None of them wraps: a marked function is called as before."""

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
    """Warned when something was accepted and has no effect here."""


def metadata_of(target: Any) -> Mapping[str, Any]:
    """The marks put on a function or class itself; a class does not show its bases' marks."""
    found = vars(target).get(METADATA_ATTRIBUTE, {}) if hasattr(target, "__dict__") else {}
    return found if isinstance(found, Mapping) else {}


def set_metadata(target: Any, key: str, value: Any) -> None:
    """Put one mark on `target`. Raises InvalidInput when it is there already."""
    marks = dict(metadata_of(target))
    if key in marks:
        raise InvalidInput(f"{describe_target(target)} is marked @{key} twice: remove one")
    setattr(target, METADATA_ATTRIBUTE, {**marks, key: value})


def describe_target(target: Any) -> str:
    """`name (file:line)` of a function or class, as far as known; for error messages."""
    name = getattr(target, "__qualname__", None) or repr(target)
    code = getattr(target, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else str(name)


def refuse_bare(decorator: str, target: Any) -> None:
    """Raise InvalidInput when a decorator was used without its parentheses, which makes `target`
    what it decorates."""
    if target is not None:
        raise InvalidInput(
            f"@{decorator} was written without parentheses on {describe_target(target)}: write "
            f"@{decorator}()"
        )


def _function(decorator: str, target: Any) -> Any:
    if hasattr(target, "__pilotlight__"):
        raise InvalidInput(
            f"@{decorator} must stand below @app.function() or @app.cls(), nearer to the "
            f"definition, on {target!r}"
        )
    if not inspect.isfunction(target):
        raise InvalidInput(
            f"@{decorator} goes on a function or method, not on {type(target).__name__} "
            f"{describe_target(target)}"
        )
    return target


def enter(
    func: None = None, /, *, snap: bool = True, timeout_s: float | None = None
) -> Callable[[F], F]:
    """Run this method when an instance comes up, before it takes calls.

    With `snap=True` (the default) it runs before the snapshot, once: imports, loading, warming up.
    With `snap=False` it runs after every fork or restore: connections, credentials, anything that
    must not be shared.

    `timeout_s` bounds it; None: what is left of the startup timeout before the snapshot, 10 s after
    it (with `snapshot=False` the startup timeout). One that overruns fails the start with an error
    that names it."""
    refuse_bare("pilotlight.enter", func)
    options = {"snap": bool(snap), **_limit("pilotlight.enter", timeout_s)}

    def mark(method: F) -> F:
        set_metadata(_function("pilotlight.enter", method), "enter", options)
        return method

    return mark


def exit(func: None = None, /, *, timeout_s: float | None = None) -> Callable[[F], F]:  # noqa: A001 - the word that users know
    """Run this method when an instance goes away in good order, for at most `timeout_s` (None: 10
    s), never beyond the stop's own grace."""
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
    """Make this method callable from outside.

    Type checkers see the handle that `Class().name` is, because they do not follow class
    decorators; at run time the plain function stays.

    `example` (a list of positional arguments, or an object by name, JSON values) warms each
    instance up and proves snapshots; `check(answer, expected) -> bool` compares its answers where
    equality is too strict. `is_generator` is found out, not told."""
    refuse_bare("pilotlight.method", func)
    if is_generator is not None:
        warn_ignored("is_generator", "the function itself says whether it yields")
    options = method_metadata(example=example, check=check)

    def mark(method: Callable[Concatenate[Any, P], R]) -> Function[P, R]:
        set_metadata(_function("pilotlight.method", method), "method", options)
        for verb in _REMOTE_VERBS:
            setattr(method, verb, _Undeclared(verb, method))
        return cast("Function[P, R]", method)

    return mark


def method_metadata(*, example: Any, check: Callable[[Any, Any], bool] | None) -> dict[str, Any]:
    """The mark of a callable: its example and check, validated. Raises InvalidInput."""
    if example is not None and not isinstance(example, list | tuple | dict):
        raise InvalidInput(
            f"example = {example!r}: write the arguments as a list, example=[{example!r}], or by "
            f"name as a dict",
            parameter="example",
        )
    try:
        json.dumps(example)
    except (TypeError, ValueError) as e:
        raise InvalidInput(
            f"example = {example!r} is not made of JSON values: {e}", parameter="example"
        ) from e
    if check is not None and not callable(check):
        raise InvalidInput(
            f"check = {check!r}: must be a function check(answer, expected) -> bool",
            parameter="check",
        )
    if check is not None and example is None:
        raise InvalidInput(
            "check= compares answers to the example: give example= as well", parameter="check"
        )
    return {"example": list(example) if isinstance(example, tuple) else example, "check": check}


class _Undeclared:
    """Stands where a handle's verb would be, on a method that was looked up on a plain object; says
    so when used."""

    def __init__(self, verb: str, method: Callable[..., Any]) -> None:
        self._verb = verb
        self._method = method.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner, _, name = self._method.rpartition(".")
        owner = owner.rpartition(".")[2] or "Class"
        raise InvalidInput(
            f"{self._method}.{self._verb}(…) was called on a plain {owner} object. From outside: "
            f"decorate the class with @app.cls() and "
            f"write {owner}().{name}.{self._verb}(…). Inside the class itself: call "
            f"self.{name}(…), it runs in the same instance."
        )

    def aio(self, *args: Any, **kwargs: Any) -> Any:
        """The same refusal."""
        return self(*args, **kwargs)


def concurrent(
    func: None = None, /, *, max_inputs: int, target_inputs: int | None = None
) -> Callable[[T], T]:
    """Let one instance take up to `max_inputs` calls at once; the autoscaler aims at
    `target_inputs` (None: max_inputs).

    Goes on a class or a function, below @app.cls() or @app.function().
    """
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
    """What `@batched(…)` does to the types: a body over lists is called with single values."""

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
    """Gather single calls into one: callers send one value for each parameter, the body gets lists
    and returns a list, in their order.

    An item that failed is an exception in its place. Goes on a function below @app.function(), or
    on a method (with or without @method()).

    Args:
        max_batch_size: calls in one batch at most. wait_ms: how long the first of a batch waits for
        others at most, where it could run. buckets: lengths up to which calls share a batch,
        rising, such as (64, 256); of the first argument, where that has a length. adaptive: wait
        only where the measured cost of batches says that it pays; False: as long as `wait_ms` says.
        retry_alone: when the body raises, each of its calls is tried once more alone; False: the
        error is everybody's.
    """
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
        raise InvalidInput(f"batched: max_batch_size, wait_ms and buckets are numbers: {e}") from e
    options = {**dataclasses.asdict(policy), "buckets": list(policy.buckets)}

    def mark(method: Any) -> Any:
        set_metadata(_function("pilotlight.batched", method), "batched", options)
        return method

    return cast("BatchedDecorator", mark)


def asgi_app(
    func: None = None, /, *, example: str | None = None, **ignored_options: Any
) -> Callable[[F], F]:
    """The function returns an ASGI application (FastAPI, Starlette, …), served under
    `/fn/{app}/{function}/`.

    `example` (a path, "/health") has it built before the snapshot and asked for that path, so that
    neither is part of a start; it then must build without secrets and answer that path before its
    lifespan ran. None: it is built anew at every start."""
    refuse_bare("pilotlight.asgi_app", func)
    if example is not None and (not isinstance(example, str) or not example.startswith("/")):
        raise InvalidInput(
            f"@pilotlight.asgi_app(example={example!r}): must be a path of the application, like '/'",
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
    """Warn that an option was accepted and does nothing."""
    warnings.warn(
        f"{name}= has no effect on pilotlight: {why}", PilotlightWarning, stacklevel=stacklevel
    )
