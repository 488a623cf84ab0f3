"""`Declaration`: the options of one decorated function or class, before packaging."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pilotlight.errors import InvalidInput
from pilotlight.sdk.batches import batch_policy, check_batched, item_hints
from pilotlight.sdk.binding.parameters import PARAMETERS_ATTRIBUTE, parameters_schema
from pilotlight.sdk.decorator_metadata import describe_target, metadata_of, undecorated
from pilotlight.sdk.options import CheckedOptions
from pilotlight.sdk.schema import arguments_schema, returns_schema
from pilotlight.spec.bound import is_bound
from pilotlight.spec.engines import TokenLimits
from pilotlight.spec.features.sources import PARAMETER
from pilotlight.spec.function import FunctionKind, MethodSpec
from pilotlight.spec.identifiers import require_name
from pilotlight.spec.web_servers import WebServerSpec

_MAIN = "__main__"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Declaration(CheckedOptions):
    """One declared function, class or web application.

    Attributes:
        app: name of the app that declares it.
        name: its name in the app.
        raw: the undecorated callable or class.
        member: the method of a class that is a web application, where the class has several
            callables and each web application is a function of its own; "" otherwise."""

    app: str
    name: str
    raw: Any
    kind: FunctionKind
    member: str = ""

    @property
    def qualname(self) -> str:
        """What a worker loads: of the module, or of the pickle where it is deployed by value."""
        own = "" if self.by_value else str(self.raw.__qualname__)
        return ".".join(part for part in (own, self.member) if part)

    @property
    def parameters(self) -> dict[str, Any] | None:
        """JSON Schema of the parameters of a class; None for none."""
        return parameters_schema(getattr(self.raw, PARAMETERS_ATTRIBUTE, {}))

    @property
    def module(self) -> str:
        """Name of the module that defines it."""
        return str(self.raw.__module__)

    @property
    def by_value(self) -> bool:
        """Whether it is deployed as a pickle: functions of a script or notebook cannot be imported
        by a worker."""
        return self.module == _MAIN

    @property
    def file(self) -> Path | None:
        """The file that defines it; None in a notebook or an interactive session."""
        file = getattr(sys.modules.get(self.module), "__file__", None)
        return Path(file).resolve() if file else None

    def method_names(self) -> tuple[str, ...]:
        """Names of the callables: of a class, its marked methods; otherwise only ""."""
        return (
            tuple(name for name, marks, _ in members(self.raw) if is_entry(marks))
            if self.kind is FunctionKind.CLASS
            else ("",)
        )

    def methods(self) -> tuple[MethodSpec, ...]:
        """The callables with their schemas. Raises InvalidInput for an unsupported feature."""
        if self.kind is FunctionKind.ASGI:
            return (MethodSpec(),)
        if self.kind is FunctionKind.FUNCTION:
            return (_method_spec("", self.raw, is_method=False, online=self._has_online),)
        return tuple(
            _method_spec(name, function, is_method=True, online=self._has_online)
            for name, marks, function in members(self.raw)
            if is_entry(marks)
        )

    @property
    def _has_online(self) -> bool:
        """Whether it has online features."""
        features = self.policies.get("features")
        return features is not None and bool(features.online)

    def is_generator(self, method: str) -> bool:
        """Whether the callable is a generator."""
        return _is_generator(getattr(self.raw, method) if method else self.raw)


def members(kind: type) -> Iterator[tuple[str, Mapping[str, Any], Callable[..., Any]]]:
    """Yield (name, marks, function) of every marked method, those of base classes first, each in
    the position of its first definition."""
    for name in dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base)):
        found = undecorated(inspect.getattr_static(kind, name, None))
        if inspect.isfunction(found) and (marks := metadata_of(found)):
            yield name, marks, found


class StartedServer(NamedTuple):
    """The web server that a web application starts, and the limits of its tokens; None: it is
    another kind, and it has none."""

    server: WebServerSpec | None = None
    limits: TokenLimits | None = None


def web_server_of(raw: Any, member: str = "") -> StartedServer:
    """What `@web_server` says of a web application. `member`: as in a declaration."""
    if not inspect.isclass(raw):
        mark = metadata_of(raw).get("asgi")
    else:
        web = {name: marks["asgi"] for name, marks, _ in members(raw) if "asgi" in marks}
        mark = web.get(member) or next(iter(web.values()), None)
    if not isinstance(mark, Mapping):
        return StartedServer()
    return StartedServer(mark.get("web_server"), mark.get("limits"))


def is_entry(marks: Mapping[str, Any]) -> bool:
    """Whether a method with these marks can be called remotely."""
    return "method" in marks or "batched" in marks


def check_function(raw: Any, decorator: str) -> None:
    """Raise InvalidInput unless `raw` is a function that can be deployed."""
    if hasattr(raw, "__pilotlight__"):
        raise InvalidInput(f"{raw!r} is already declared: remove one @{decorator}()")
    if inspect.isclass(raw):
        raise InvalidInput(
            f"@{decorator}() decorates functions; {describe_target(raw)} is a class: use @app.cls()"
        )
    if isinstance(raw, staticmethod | classmethod) or not inspect.isfunction(raw):
        raise InvalidInput(
            f"@{decorator}() decorates functions; {describe_target(raw)} is a {type(raw).__name__}"
        )
    if "enter" in metadata_of(raw) or "exit" in metadata_of(raw):
        raise InvalidInput(
            f"{describe_target(raw)} is a function: use @enter and @exit only on methods of an "
            "@app.cls() class"
        )
    if "method" in metadata_of(raw):
        raise InvalidInput(
            f"{describe_target(raw)} is a function: @method() is for methods of a class; pass "
            f"example= and check= to @{decorator}()"
        )
    if "batched" in metadata_of(raw):
        check_batched(raw, is_method=False)
    check_place(raw)


def check_class(raw: Any, decorator: str) -> None:
    """Raise InvalidInput unless `raw` is a class that can be deployed: importable, constructible
    without arguments, with a callable method."""
    if hasattr(raw, "__pilotlight__") and not inspect.isclass(raw):
        raise InvalidInput(f"{raw!r} is already declared: remove one @{decorator}()")
    if not inspect.isclass(raw):
        raise InvalidInput(
            f"@{decorator}() decorates classes; {describe_target(raw)} is a {type(raw).__name__}: "
            "use @app.function()"
        )
    for function in (function for _, marks, function in members(raw) if "batched" in marks):
        check_batched(function, is_method=True)
    if not any(is_entry(marks) or "asgi" in marks for _, marks, _ in members(raw)):
        raise InvalidInput(
            f"class {raw.__qualname__} has no callable method: mark its methods with "
            f"@pilotlight.method()"
        )
    if needed := _required_arguments(raw):
        raise InvalidInput(
            f"class {raw.__qualname__}: instances are constructed without arguments, but __init__ "
            f"requires {', '.join(needed)}: add defaults, read the values from env= or secrets=, "
            "or load them in @pilotlight.enter()"
        )
    check_place(raw)


def check_place(raw: Any) -> None:
    """Raise InvalidInput unless a worker can import the function or class from its module."""
    if raw.__name__ == "<lambda>":
        raise InvalidInput(
            f"{describe_target(raw)}: a lambda has no name to be deployed under: use def"
        )
    if "<locals>" in raw.__qualname__ and raw.__module__ != _MAIN:
        raise InvalidInput(
            f"{describe_target(raw)} is defined inside a function, so workers cannot import it: "
            "move it to the top level of its module"
        )


def check_declared_name(raw: Any, name: str | None) -> str:
    """Return the name to deploy under: `name`, or that of the object. Raises InvalidInput."""
    found = name or raw.__qualname__.rpartition("<locals>.")[2].replace(".", "-")
    if is_bound(found):
        raise InvalidInput(
            f"function name {found!r}: names that end like this one are those of bound functions: "
            "choose another",
            parameter="name",
        )
    return require_name("function", found, parameter="name")


def _required_arguments(kind: type) -> list[str]:
    try:
        parameters = inspect.signature(kind).parameters.values()
    except ValueError:
        return []  # an extension class without a signature
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _takes_features(function: Callable[..., Any]) -> bool:
    """Whether a callable has the parameter of online features. Raises InvalidInput where arguments
    could come behind it."""
    parameters = list(inspect.signature(function).parameters.values())
    found = next((p for p in parameters if p.name == PARAMETER), None)
    if found is None:
        return False
    behind = [p for p in parameters[parameters.index(found) + 1 :] if p.kind == found.kind]
    if found.kind is not found.KEYWORD_ONLY and (
        found.kind is not found.POSITIONAL_OR_KEYWORD or behind
    ):
        raise InvalidInput(
            f"{describe_target(function)}: online features are passed by name: declare the "
            f"parameter {PARAMETER!r} last, or behind *",
            parameter=PARAMETER,
        )
    return True


def _method_spec(
    name: str, function: Callable[..., Any], *, is_method: bool, online: bool
) -> MethodSpec:
    takes_features = online and _takes_features(function)
    marks = metadata_of(function)
    batch = batch_policy(function)
    hints = None if batch is None else item_hints(function)
    schema, parameters = arguments_schema(
        function, is_method=is_method, hints=hints, hidden=PARAMETER if takes_features else ""
    )
    mark = marks.get("method") or {}
    is_generator = _is_generator(function)
    return MethodSpec(
        name=name,
        is_generator=is_generator,
        schema=schema,
        parameters=parameters,
        example=mark.get("example"),
        has_check=mark.get("check") is not None,
        returns=returns_schema(function, is_generator=is_generator, hints=hints),
        batch=batch,
        takes_features=takes_features,
    )


def _is_generator(function: Any) -> bool:
    inner = inspect.unwrap(function)
    return inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner)
