"""The user's object, prepared to run: its methods and its hooks.

Marks are set by the SDK's decorators on plain functions: `_pilotlight_marks`, a dict with
`enter` ({"snap": bool}), `exit` (True), `method` ({"example", "check", …}), `asgi` (True or
{"example"})."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.sdk.batches import item_hints
from pilotlight.spec.function import FunctionKind, FunctionSpec
from pilotlight.spec.policies import BatchPolicy
from pilotlight.worker.user_code.arguments import Binder
from pilotlight.worker.user_code.asgi import WebApplication

Hook = Callable[[], Any]


class Style(enum.Enum):
    """How a callable runs: THREAD and GENERATOR in a call thread, the others in the event loop."""

    COROUTINE = "coroutine"
    THREAD = "thread"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async_generator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One callable of the function.

    Attributes:
        name: "" for a plain function.
        call: the function, or the bound method.
        binder: checks and converts its arguments.
        example: JSON arguments for the warm-up; None for none.
        check: the user's comparison `check(answer, expected)`, or None.
        batch: how its calls are batched, with a binder for single calls; None = not batched.
    """

    name: str
    call: Callable[..., Any]
    style: Style
    binder: Binder
    example: Any
    check: Callable[[Any, Any], Any] | None
    batch: BatchPolicy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The object to run: methods by name, and hooks in the order in which they run (base classes
    first).

    Attributes:
        web: the web application, for functions of that kind; None for others.
        web_example: requests the application's example; None without one.
    """

    methods: Mapping[str, Method]
    enter_before_snapshot: tuple[Hook, ...] = ()
    enter_after_wake: tuple[Hook, ...] = ()
    exit: tuple[Hook, ...] = ()
    web: WebApplication | None = None
    web_example: Method | None = None

    @property
    def examples(self) -> Mapping[str, Method]:
        """The methods that the warm-up calls, by name."""
        declared = {
            name: method for name, method in self.methods.items() if method.example is not None
        }
        return declared if self.web_example is None else {"": self.web_example}


def make_target(raw: Any, spec: FunctionSpec) -> Target:
    """Prepare the raw callable or class; instantiates a class.

    Raises what its constructor raises, and AttributeError for a missing method.
    """
    if not inspect.isclass(raw):
        if spec.kind is not FunctionKind.ASGI:
            return Target(methods={"": _method("", raw, spec)})
        web = WebApplication(raw)
        return Target(methods={}, web=web, web_example=_web_example(web, raw))
    instance = raw()
    hooks = list(_marked(raw, instance))
    build = next((bound for marks, bound in hooks if marks.get("asgi")), None)
    application = None if build is None else WebApplication(build)
    return Target(
        methods={}
        if spec.kind is FunctionKind.ASGI
        else {m.name: _method(m.name, getattr(instance, m.name), spec) for m in spec.methods},
        enter_before_snapshot=tuple(
            bound for marks, bound in hooks if "enter" in marks and marks["enter"].get("snap", True)
        ),
        enter_after_wake=tuple(
            bound
            for marks, bound in hooks
            if "enter" in marks and not marks["enter"].get("snap", True)
        ),
        exit=tuple(bound for marks, bound in hooks if marks.get("exit")),
        web=application,
        web_example=None if application is None else _web_example(application, build),
    )


def marks_of(function: Any) -> Mapping[str, Any]:
    """The marks on a function or bound method; empty if there are none."""
    marks = getattr(function, "_pilotlight_marks", None)
    return marks if isinstance(marks, Mapping) else {}


def _marked(kind: type, instance: Any) -> Iterator[tuple[Mapping[str, Any], Hook]]:
    # a name keeps the place of its first definition
    names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
    for name in names:
        found = inspect.getattr_static(kind, name, None)
        if inspect.isfunction(found) and (marks := marks_of(found)):
            yield marks, getattr(instance, name)


def _method(name: str, call: Callable[..., Any], spec: FunctionSpec) -> Method:
    declared = spec.method(name)
    mark = marks_of(call).get("method") or {}
    example = mark.get("example")
    if example is None and declared is not None:
        example = declared.example
    batch = declared.batch if declared is not None else None
    binder = Binder(call, hints=item_hints(call) if batch is not None else None)
    return Method(
        name=name,
        call=call,
        style=_style(call),
        binder=binder,
        example=example,
        check=mark.get("check"),
        batch=batch,
    )


def _web_example(web: WebApplication, build: Any) -> Method | None:
    mark = marks_of(build).get("asgi")
    if not isinstance(mark, Mapping) or mark.get("example") is None:
        return None
    call = functools.partial(web.answer_example, mark["example"])
    return Method(
        name=f"GET {mark['example']}",
        call=call,
        style=Style.COROUTINE,
        binder=Binder(call),
        example=[],
        check=None,
    )


def _style(call: Any) -> Style:
    while isinstance(call, functools.partial):
        call = call.func
    if not inspect.isroutine(call):
        call = type(call).__call__
    if inspect.isasyncgenfunction(call):
        return Style.ASYNC_GENERATOR
    if inspect.iscoroutinefunction(call):
        return Style.COROUTINE
    return Style.GENERATOR if inspect.isgeneratorfunction(call) else Style.THREAD
