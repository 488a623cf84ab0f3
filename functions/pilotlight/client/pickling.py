"""Serialization of arguments and results, with errors that name the argument: cloudpickle, or JSON
for functions of other tenants."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pilotlight.errors import InvalidInput

_PICKLING_ERRORS = (
    pickle.PicklingError,
    TypeError,
    AttributeError,
    ValueError,
    RecursionError,
    NotImplementedError,
    RuntimeError,
)
"""Exceptions that `__reduce__` implementations are known to raise for values that cannot be pickled
(sockets: TypeError, torch: RuntimeError, …)."""
_UNPICKLING_ERRORS = (
    *_PICKLING_ERRORS,
    pickle.UnpicklingError,
    ImportError,
    EOFError,
    IndexError,
    KeyError,
)


def _cloudpickle() -> Any:
    return importlib.import_module("cloudpickle")  # untyped; not needed before the first call


class UnpicklingFailed(Exception):
    """Raised when bytes cannot be unpickled in this process, mostly because a class or package is
    missing."""


def dumps(value: Any) -> bytes:
    """Pickle a value with cloudpickle, in a protocol that every supported Python can read. Raises
    InvalidInput."""
    try:
        return bytes(_cloudpickle().dumps(value, protocol=pickle.DEFAULT_PROTOCOL))
    except _PICKLING_ERRORS as e:
        raise InvalidInput(
            f"a value of type {type(value).__name__} cannot be serialised: {e}"
        ) from e


def loads(data: bytes) -> Any:
    """Unpickle a value. Only for bytes from workers of the own tenant. Raises UnpicklingFailed."""
    try:
        return _cloudpickle().loads(data)
    except _UNPICKLING_ERRORS as e:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UnpicklingFailed(
            f"{type(e).__name__}: {e} (this process runs Python {python}; the class must be "
            f"importable both in it and in the sender)"
        ) from e


def dump_arguments(
    what: str, parameters: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bytes:
    """Pickle `(args, kwargs)`. Raises InvalidInput naming the first argument of `what` that cannot
    be pickled."""
    try:
        return bytes(_cloudpickle().dumps((args, dict(kwargs)), protocol=pickle.DEFAULT_PROTOCOL))
    except _PICKLING_ERRORS as e:
        name, value = _culprit(parameters, args, kwargs)
        raise InvalidInput(
            f"{what}: argument {name!r} of type {type(value).__name__} cannot be serialised: {e}. "
            "Pass plain data, and create files, connections and locks inside the function.",
            parameter=name,
        ) from e


def dump_json_arguments(what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Encode the arguments of a call to a function of another tenant: an object by name, or an
    array by position.

    Raises InvalidInput if both are given, or naming the first argument of `what` that is not a JSON
    value."""
    if args and kwargs:
        raise InvalidInput(
            f"{what}: functions of other tenants are called with JSON, which cannot mix arguments "
            "by position and by name: pass all by name, or all by position"
        )
    try:
        return json.dumps(kwargs or list(args), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as e:
        name, value = _no_json(
            [(f"#{i + 1}", value) for i, value in enumerate(args)] + list(kwargs.items())
        )
        raise InvalidInput(
            f"{what}: argument {name!r} of type {type(value).__name__} is not a JSON value: {e}. "
            "Functions of other tenants are called with JSON: pass None, booleans, numbers, "
            "strings, lists, and dictionaries with string keys.",
            parameter=name,
        ) from e


def _no_json(arguments: Sequence[tuple[str, Any]]) -> tuple[str, Any]:
    for name, value in arguments:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return name, value
    return "arguments", arguments


def _culprit(
    parameters: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, Any]:
    named = [
        (parameters[i] if i < len(parameters) else f"#{i + 1}", value)
        for i, value in enumerate(args)
    ]
    for name, value in [*named, *kwargs.items()]:
        try:
            dumps(value)
        except InvalidInput:
            return name, value
    return "arguments", (args, kwargs)
