"""cloudpickle at the edge: arguments out, results in, with errors that name the argument."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pilotlight.errors import InvalidInput

_PICKLING_ERRORS = (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError, NotImplementedError, RuntimeError)
"""What `__reduce__` implementations are known to raise when a thing cannot travel (sockets: TypeError, torch: RuntimeError, …)."""
_UNPICKLING_ERRORS = (*_PICKLING_ERRORS, pickle.UnpicklingError, ImportError, EOFError, IndexError, KeyError)


def _cloudpickle() -> Any:
    return importlib.import_module("cloudpickle")  # untyped, and not needed before the first call


class Unloadable(Exception):
    """Raised when bytes cannot be unpickled in this process: mostly a class or a package that is missing here."""


def dumps(value: Any) -> bytes:
    """cloudpickle bytes, in the protocol that every supported Python reads. Raises InvalidInput."""
    try:
        return bytes(_cloudpickle().dumps(value, protocol=pickle.DEFAULT_PROTOCOL))
    except _PICKLING_ERRORS as e:
        raise InvalidInput(f"a value of type {type(value).__name__} cannot be serialised: {e}") from e


def loads(data: bytes) -> Any:
    """The reverse of `dumps`; only for bytes of this tenant's own worker. Raises Unloadable."""
    try:
        return _cloudpickle().loads(data)
    except _UNPICKLING_ERRORS as e:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise Unloadable(f"{type(e).__name__}: {e} (this is Python {python}; the same classes must be importable here and there)") from e


def dump_arguments(what: str, parameters: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """`(args, kwargs)` as bytes. Raises InvalidInput naming the first argument of `what` that cannot travel."""
    try:
        return bytes(_cloudpickle().dumps((args, dict(kwargs)), protocol=pickle.DEFAULT_PROTOCOL))
    except _PICKLING_ERRORS as e:
        name, value = _culprit(parameters, args, kwargs)
        raise InvalidInput(
            f"{what}: argument {name!r} of type {type(value).__name__} cannot be serialised: {e}. "
            "Send plain data instead, and open files, connections and locks inside the function.",
            parameter=name,
        ) from e


def _culprit(parameters: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, Any]:
    named = [(parameters[i] if i < len(parameters) else f"#{i + 1}", value) for i, value in enumerate(args)]
    for name, value in [*named, *kwargs.items()]:
        try:
            dumps(value)
        except InvalidInput:
            return name, value
    return "arguments", (args, kwargs)
