"""Bound functions: a class with arguments for its parameters, or a function with other options,
which has instances of its own. The controller makes one when it is first asked for; it ends with
the revision that it was made of."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.identifiers import MAX_NAME_LENGTH
from pilotlight.spec.record_json import canonical_json, from_json, to_json

_MARK = "--"
_DIGITS = 12
_BOUND = re.compile(rf"(.+){_MARK}[0-9a-f]{{{_DIGITS}}}\Z")
MAX_BOUND = 100
"""Bound functions of one function: each has instances, snapshots and a route of its own."""
MAX_VALUE_CHARS = 4096
"""Longest text of an argument: every route and every launch document carries it."""
_RECORDS = frozenset({"resources", "scaling", "clocks"})
"""Fields of a spec of which options replace single values."""
_WHOLE = frozenset({"retries", "secrets"})
"""Fields that options replace as a whole."""


def bound_name(function: str, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return the name of a bound function, which follows from what it is bound to."""
    identity = canonical_json({"arguments": arguments, "function": function, "options": options})
    keep = MAX_NAME_LENGTH - len(_MARK) - _DIGITS
    return f"{function[:keep]}{_MARK}{hashlib.sha256(identity).hexdigest()[:_DIGITS]}"


def is_bound(function: str) -> bool:
    """Whether this is the name of a bound function."""
    return _BOUND.match(function) is not None


def bound_prefix(function: str) -> str:
    """Return what the names of the bound functions of `function` begin with."""
    return bound_name(function, {}, {})[:-_DIGITS]


def is_bound_of(function: str, base: str) -> bool:
    """Whether `function` is the name of a bound function of `base`."""
    return is_bound(function) and function[:-_DIGITS] == bound_prefix(base)


def bind(
    spec: FunctionSpec, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> FunctionSpec:
    """Return the spec of a bound function; of `spec` itself where nothing differs.

    `options`: fields of `pilotlight.spec.function.FunctionSpec` as JSON, of `resources`, `scaling`
    and `clocks` single values. Raises InvalidInput naming the argument or option."""
    found = complete_arguments(spec, arguments)
    if not options and found == default_arguments(spec):
        return spec
    body = to_json(spec)
    for name, value in options.items():
        if (name in _RECORDS and isinstance(value, Mapping)) or (
            name == "env" and isinstance(value, Mapping)
        ):
            body[name] = {**body[name], **value}
        elif name in _WHOLE:
            body[name] = value
        else:
            raise InvalidInput(
                f"options: {name[:64]!r} cannot be chosen by a caller; known: "
                f"{', '.join(sorted({*_RECORDS, *_WHOLE, 'env'}))}",
                parameter=name[:64],
            )
    # an instance that is always kept, or a call at a time, is for the declared function alone
    body["scaling"] = {**body["scaling"], "min_instances": 0, "schedules": []}
    body |= {
        "name": bound_name(spec.name, found, options),
        "arguments": found,
        "schedules": [],
    }
    return from_json(FunctionSpec, body)


def default_arguments(spec: FunctionSpec) -> dict[str, Any] | None:
    """Return the arguments of the declared class itself; None if a parameter has no default."""
    properties = (spec.parameters or {}).get("properties", {})
    if any("default" not in one for one in properties.values()):
        return None
    return {name: one["default"] for name, one in properties.items()}


def complete_arguments(spec: FunctionSpec, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the defaults of the others, checked. Raises InvalidInput."""
    properties = (spec.parameters or {}).get("properties", {})
    for name, value in arguments.items():
        if name not in properties:
            known = ", ".join(properties) or "it has none: declare one with pilotlight.parameter()"
            raise InvalidInput(
                f"{spec.name} has no parameter {name[:64]!r}: {known}", parameter=name[:64]
            )
        _check_value(spec.name, name, value, str(properties[name]["type"]))
    found = {
        name: arguments.get(name, one.get("default"))
        for name, one in properties.items()
        if name in arguments or "default" in one
    }
    if missing := [name for name in properties if name not in found]:
        raise InvalidInput(
            f"{spec.name} needs an argument for {missing[0]}: {spec.name}({missing[0]}=…), or bind "
            f"it with POST …/{spec.name}:bind",
            parameter=missing[0],
        )
    return found


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def _check_value(function: str, name: str, value: Any, kind: str) -> None:
    fits = isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
    if not fits:
        raise InvalidInput(
            f"{function}({name}={value!r:.80}): must be of type {kind}", parameter=name
        )
    if isinstance(value, str) and len(value) > MAX_VALUE_CHARS:
        raise InvalidInput(
            f"{function}({name}=…): {len(value)} characters, at most {MAX_VALUE_CHARS}: pass the "
            f"value to the method, or a name of it",
            parameter=name,
        )
