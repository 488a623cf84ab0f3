"""`parameter()`: the values that objects of a class are made with: `Model(size="large")`. Each set
of values has instances of its own."""

from __future__ import annotations

import base64
import dataclasses
import inspect
import typing
from collections.abc import Mapping
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.sdk.schema import DIALECT

_NO_DEFAULT: Any = object()
_KINDS: Mapping[type, Mapping[str, str]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    bytes: {"type": "string", "contentEncoding": "base64"},
}
PARAMETERS_ATTRIBUTE = "_pilotlight_parameters"
"""Of a declared class: its parameters, by name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter: its type, and its default; `has_default` False for a required one."""

    kind: type
    default: Any = None
    has_default: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Mark:
    """What `parameter()` leaves in the body of a class."""

    default: Any
    init: bool


def parameter(*, default: Any = _NO_DEFAULT, init: bool = True) -> Any:
    """Declare a parameter in the body of a class: `size: str = pilotlight.parameter()`.

    The annotation is `str`, `int`, `float`, `bool` or `bytes`. `Model(size="large")` makes an
    object with that value, which methods read as `self.size`.

    Args:
        default: value of objects that name none; without it, each object must name one.
        init: False declares an attribute that objects are not made with."""
    return _Mark(default, init)


def take_parameters(kind: type) -> Mapping[str, Parameter]:
    """Replace the marks of a class by the defaults, and return its parameters in the order of their
    declaration. Raises InvalidInput for an unsupported type, and for a class with a constructor of
    its own."""
    marks = {
        name: (base, found)
        for base in reversed(kind.__mro__)
        for name, found in vars(base).items()
        if isinstance(found, _Mark)
    }
    inherited = getattr(kind, PARAMETERS_ATTRIBUTE, {})
    hints = typing.get_type_hints(kind) if marks else {}
    found = {**inherited}
    for name, (owner, mark) in marks.items():
        if mark.init:
            found[name] = _parameter_of(kind, name, mark, hints.get(name))
        if mark.default is not _NO_DEFAULT:
            setattr(kind, name, mark.default)
        elif owner is kind:
            delattr(kind, name)
    if found and "__init__" in {name for base in kind.__mro__[:-1] for name in vars(base)}:
        raise InvalidInput(
            f"class {kind.__qualname__} has parameters and an __init__: move its body to a method "
            "with @pilotlight.enter()"
        )
    if found:
        setattr(kind, PARAMETERS_ATTRIBUTE, found)
    return found


def parameters_schema(parameters: Mapping[str, Parameter]) -> dict[str, Any] | None:
    """Return the JSON Schema of these parameters as one object; None for none."""
    if not parameters:
        return None
    properties = {
        name: {
            **_KINDS[one.kind],
            **({"default": _to_json(one.default)} if one.has_default else {}),
        }
        for name, one in parameters.items()
    }
    required = [name for name, one in parameters.items() if not one.has_default]
    return {
        "$schema": DIALECT,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def encode_arguments(
    title: str, parameters: Mapping[str, Parameter] | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments as JSON values. `parameters`: None = of a class that is only known by name,
    whose arguments the platform checks. Raises InvalidInput naming the argument."""
    if parameters is not None:
        _check(title, parameters, arguments)
    return {name: _to_json(value) for name, value in arguments.items()}


def missing_arguments(kind: type, arguments: Mapping[str, Any]) -> list[str]:
    """Return the parameters of a declared class that have neither an argument nor a default."""
    parameters: Mapping[str, Parameter] = getattr(kind, PARAMETERS_ATTRIBUTE, {})
    return [n for n, one in parameters.items() if not one.has_default and n not in arguments]


def set_arguments(instance: Any, arguments: Mapping[str, Any]) -> None:
    """Set JSON arguments on an object of a declared class."""
    parameters: Mapping[str, Parameter] = getattr(type(instance), PARAMETERS_ATTRIBUTE, {})
    for name, value in arguments.items():
        is_text = parameters[name].kind is bytes and isinstance(value, str)
        setattr(instance, name, base64.b64decode(value) if is_text else value)


def _parameter_of(kind: type, name: str, mark: _Mark, hint: Any) -> Parameter:
    if hint not in _KINDS:
        shown = inspect.formatannotation(hint) if hint is not None else "not annotated"
        raise InvalidInput(
            f"{kind.__qualname__}.{name} is {shown}: a parameter is str, int, float, bool or bytes;"
            " pass other values to the method",
            parameter=name,
        )
    has_default = mark.default is not _NO_DEFAULT
    if has_default and not _fits(mark.default, hint):
        raise InvalidInput(
            f"{kind.__qualname__}.{name}: its default {mark.default!r} is not {hint.__name__}",
            parameter=name,
        )
    return Parameter(
        kind=hint, default=mark.default if has_default else None, has_default=has_default
    )


def _check(title: str, parameters: Mapping[str, Parameter], arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in parameters:
            known = ", ".join(parameters) or "it has none: declare one with pilotlight.parameter()"
            raise InvalidInput(f"{title} has no parameter {name!r}: {known}", parameter=name)
        if not _fits(value, parameters[name].kind):
            raise InvalidInput(
                f"{title}({name}={value!r}): must be {parameters[name].kind.__name__}",
                parameter=name,
            )
    missing = [n for n, one in parameters.items() if not one.has_default and n not in arguments]
    if missing:
        raise InvalidInput(
            f"{title}(…) needs an argument for {missing[0]}: {title}({missing[0]}=…)",
            parameter=missing[0],
        )


def _fits(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _to_json(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
