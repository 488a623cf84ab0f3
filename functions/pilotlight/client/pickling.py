"""Arguments out, results in, with errors that name the argument: cloudpickle, or JSON for another
tenant's function."""

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
"""What `__reduce__` implementations are known to raise when a thing cannot travel (sockets:
TypeError, torch: RuntimeError, …)."""
_UNPICKLING_ERRORS = (
    *_PICKLING_ERRORS,
    pickle.UnpicklingError,
    ImportError,
    EOFError,
    IndexError,
    KeyError,
)


def _cloudpickle() -> Any:
    return importlib.import_module("cloudpickle")  # untyped, and not needed before the first call


class UnpicklingFailed(Exception):
    """Raised when bytes cannot be unpickled in this process: mostly a class or a package that is
    missing here."""


def dumps(value: Any) -> bytes:
    """cloudpickle bytes, in the protocol that every supported Python reads. Raises InvalidInput."""
    try:
        return bytes(_cloudpickle().dumps(value, protocol=pickle.DEFAULT_PROTOCOL))
    except _PICKLING_ERRORS as e:
        raise InvalidInput(
            f"a value of type {type(value).__name__} cannot be serialised: {e}"
        ) from e


def loads(data: bytes) -> Any:
    """The reverse of `dumps`; only for bytes of this tenant's own worker. Raises UnpicklingFailed."""
    try:
        return _cloudpickle().loads(data)
    except _UNPICKLING_ERRORS as e:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UnpicklingFailed(
            f"{type(e).__name__}: {e} (this is Python {python}; the same classes must be "
            f"importable here and there)"
        ) from e


def dump_arguments(
    what: str, parameters: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bytes:
    """`(args, kwargs)` as bytes. Raises InvalidInput naming the first argument of `what` that
    cannot travel."""
    try:
        return bytes(_cloudpickle().dumps((args, dict(kwargs)), protocol=pickle.DEFAULT_PROTOCOL))
    except _PICKLING_ERRORS as e:
        name, value = _culprit(parameters, args, kwargs)
        raise InvalidInput(
            f"{what}: argument {name!r} of type {type(value).__name__} cannot be serialised: {e}. "
            "Send plain data instead, and open files, connections and locks inside the function.",
            parameter=name,
        ) from e


def dump_json_arguments(what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Arguments for another tenant's function: an object by name, or an array by position.

    Raises InvalidInput where both are given, and naming the first argument of `what` that is no
    JSON value."""
    if args and kwargs:
        raise InvalidInput(
            f"{what}: arguments by position and by name together cannot be sent to another "
            f"tenant's function, which is called with JSON: "
            "write all of them by name, or all by position"
        )
    try:
        return json.dumps(kwargs or list(args), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as e:
        name, value = _no_json(
            [(f"#{i + 1}", value) for i, value in enumerate(args)] + list(kwargs.items())
        )
        raise InvalidInput(
            f"{what}: argument {name!r} of type {type(value).__name__} is no JSON value: {e}. "
            f"Another tenant's function is called with "
            "JSON: send None, booleans, numbers, strings, lists, and dictionaries with strings as keys.",
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
