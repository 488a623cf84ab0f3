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
from typing import TYPE_CHECKING, Any

from pilotlight.errors import InvalidInput
from pilotlight.sdk.batches import item_hints
from pilotlight.sdk.binding.parameters import missing_arguments, set_arguments
from pilotlight.sdk.decorator_metadata import undecorated
from pilotlight.spec.features.sources import PARAMETER
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec
from pilotlight.spec.policies import BatchPolicy
from pilotlight.worker.user_code.arguments import Binder
from pilotlight.worker.user_code.asgi import WebApplication
from pilotlight.worker.user_code.web_endpoints import application_builder

if TYPE_CHECKING:
    from pilotlight.worker.features.reader import FeatureReader

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
        retried: names of the exceptions after which a call is tried again; () = all.
        features: reads the online features that it takes; None = it takes none.
    """

    name: str
    call: Callable[..., Any]
    style: Style
    binder: Binder
    example: Any
    check: Callable[[Any, Any], Any] | None
    batch: BatchPolicy | None = None
    retried: tuple[str, ...] = ()
    features: FeatureReader | None = None

    def is_retried(self, error: BaseException) -> bool:
        """Whether the function's retries are for this exception: by its type or a base class."""
        return not self.retried or any(
            name in self.retried
            for kind in type(error).__mro__
            for name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The object to run: methods by name, and hooks in the order in which they run (base classes
    first).

    Attributes:
        web: the web application, for functions of that kind; None for others.
        web_example: requests the application's example; None without one.
        server: starts the web server, for functions that have one; None for others.
        features: reads online features; None for functions that have none.
    """

    methods: Mapping[str, Method]
    enter_before_snapshot: tuple[Hook, ...] = ()
    enter_after_wake: tuple[Hook, ...] = ()
    exit: tuple[Hook, ...] = ()
    web: WebApplication | None = None
    web_example: Method | None = None
    server: Hook | None = None
    features: FeatureReader | None = None

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
            reader = _feature_reader(spec)
            return Target(methods={"": _method("", raw, spec, reader)}, features=reader)
        if spec.web_server is not None:
            return Target(methods={}, server=raw)
        web = _application(raw)
        return Target(methods={}, web=web, web_example=_web_example(web, raw))
    if missing := missing_arguments(raw, spec.arguments):
        return Target(methods={m.name: _unbound(raw, m, missing[0]) for m in spec.methods})
    instance = raw()
    set_arguments(instance, spec.arguments)
    hooks, reader = list(_marked(raw, instance)), _feature_reader(spec)
    build = _endpoint_of(hooks, spec) if spec.kind is FunctionKind.ASGI else None
    starts = spec.web_server is not None
    application = None if build is None or starts else _application(build)
    return Target(
        methods={}
        if spec.kind is FunctionKind.ASGI
        else {
            m.name: _method(m.name, _bound(instance, m.name), spec, reader) for m in spec.methods
        },
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
        server=build if starts else None,
        features=reader,
    )


def _endpoint_of(hooks: list[tuple[Mapping[str, Any], Hook]], spec: FunctionSpec) -> Hook | None:
    """The method that is the web application: the one that `qualname` ends with, else the only
    one."""
    found = {
        str(getattr(bound, "__name__", "")): bound for marks, bound in hooks if "asgi" in marks
    }
    named = spec.qualname.rpartition(".")[2]
    return found.get(named) or next(iter(found.values()), None)


def _application(build: Hook) -> WebApplication:
    return WebApplication(application_builder(build, marks_of(build).get("asgi")))


def marks_of(function: Any) -> Mapping[str, Any]:
    """The marks on a function or bound method; empty if there are none."""
    marks = getattr(function, "_pilotlight_marks", None)
    return marks if isinstance(marks, Mapping) else {}


def _marked(kind: type, instance: Any) -> Iterator[tuple[Mapping[str, Any], Hook]]:
    # a name keeps the place of its first definition
    names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
    for name in names:
        found = undecorated(inspect.getattr_static(kind, name, None))
        if inspect.isfunction(found) and (marks := marks_of(found)):
            yield marks, _bound(instance, name)


def _unbound(kind: type, declared: MethodSpec, missing: str) -> Method:
    """A method of a class without values for all of its parameters: it starts, and refuses each
    call."""
    name = declared.name
    function = getattr(kind, name)
    parameters = list(inspect.signature(function).parameters.values())

    def refuse(*_: Any, **__: Any) -> Any:
        raise InvalidInput(
            f"{kind.__name__} has no value for its parameter {missing}: call it as "
            f"{kind.__name__}({missing}=…).{name}, or bind it with POST …/{kind.__name__}:bind",
            parameter=missing,
        )

    vars(refuse)["__signature__"] = inspect.Signature(parameters[1:])
    return Method(
        name=name,
        call=refuse,
        style=Style.THREAD,
        binder=Binder(refuse, hidden=PARAMETER if declared.takes_features else ""),
        example=None,
        check=None,
    )


def _bound(instance: Any, name: str) -> Any:
    """The bound method of the plain function, also where `@method()` marks it."""
    found = getattr(instance, name)
    return getattr(found, "local", found)


def _feature_reader(spec: FunctionSpec) -> FeatureReader | None:
    """The reader of a function's online features; None, and nothing imported, for none."""
    if spec.features is None or not spec.features.online:
        return None
    from pilotlight.worker.features.reader import FeatureReader

    return FeatureReader(spec.features)


def _method(
    name: str, call: Callable[..., Any], spec: FunctionSpec, reader: FeatureReader | None
) -> Method:
    declared = spec.method(name)
    mark = marks_of(call).get("method") or {}
    example = mark.get("example")
    if example is None and declared is not None:
        example = declared.example
    batch = declared.batch if declared is not None else None
    takes_features = declared is not None and declared.takes_features
    binder = Binder(
        call,
        hints=item_hints(call) if batch is not None else None,
        hidden=PARAMETER if takes_features else "",
    )
    return Method(
        name=name,
        call=call,
        style=_style(call),
        binder=binder,
        example=example,
        check=mark.get("check"),
        batch=batch,
        retried=spec.retries.exceptions if spec.retries is not None else (),
        features=reader if takes_features else None,
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
