"""Parses the arguments of a call: from a body to `(args, kwargs)` that match the callable's
signature.

A Binder is created once per method before the snapshot, so that a call costs two set comparisons.
`argument_decoding` converts values that JSON has no type for to the annotated types.
"""

from __future__ import annotations

import inspect
import json
import pickle
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pilotlight.core.binary_tensors import InvalidTensor, unpack
from pilotlight.errors import InvalidInput
from pilotlight.sdk.schema import hints_of, is_array
from pilotlight.worker.user_code.argument_decoding import ArgumentMismatch, Convert, converter
from pilotlight.worker.user_code.tensors import argument

Bound = tuple[tuple[Any, ...], dict[str, Any]]

_SCAN = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # set in its constructor
"""The scanner behind json.loads, without its handling of white space and of encodings other than
UTF-8 (RFC 8259 §8.1)."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Binder:
    """Checks and converts the arguments of one callable. Immutable after construction."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        hints: Mapping[str, Any] | None = None,
        hidden: str = "",
    ) -> None:
        """`hints` replace the function's own. `hidden`: a parameter that callers do not pass."""
        self._signature = inspect.signature(function)
        if hidden:
            shown = [p for p in self._signature.parameters.values() if p.name != hidden]
            self._signature = self._signature.replace(parameters=shown)
        parameters = self._signature.parameters.values()
        self._positional = [p.name for p in parameters if p.kind in _POSITIONAL]
        self._positional_only = [
            p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY
        ]
        self._named = frozenset(
            p.name for p in parameters if p.kind in (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
        )
        self._required = frozenset(
            p.name for p in parameters if p.name in self._named and p.default is p.empty
        )
        # the common case, which needs no further checks
        self._exactly = None if self._positional_only else self._named
        self._takes_any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self._takes_any_number = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        known = hints_of(function) if hints is None else hints
        self._converters = _converters(function, self._named, known)
        self._arrays = frozenset(name for name, hint in known.items() if _takes_array(hint))

    def __repr__(self) -> str:
        return f"<Binder {self._signature}>"

    def from_json(self, body: bytes) -> Bound:
        """Arguments from JSON: an object has keyword arguments, an array positional ones, an empty
        body none. Raises InvalidInput naming the parameter."""
        if not body:
            return self._check((), {})
        return self.from_document(_parsed(body))

    def from_document(self, document: Any) -> Bound:
        """Like `from_json`, for a parsed document. Raises InvalidInput."""
        if isinstance(document, dict):
            args, kwargs = (
                ((), document) if document.keys() == self._exactly else self._check((), document)
            )
        elif isinstance(document, list):
            args, kwargs = self._check(tuple(document), {})
        else:
            raise InvalidInput(
                f"the body must be a JSON object (arguments by name) or array (by position), not "
                f"{type(document).__name__}"
            )
        return self._converted(args, kwargs) if self._converters else (args, kwargs)

    def from_tensors(self, body: bytearray) -> Bound:
        """Arguments from CONTENT_TENSORS, by name. Raises InvalidInput naming the parameter."""
        try:
            values, found = unpack(body)
        except InvalidTensor as e:
            raise InvalidInput(f"the tensors of the body are not valid: {e}") from e
        document = _parsed(values)
        for tensor in found:
            document[tensor.name] = argument(tensor, is_array=tensor.name in self._arrays)
        return self.from_document(document)

    def from_pickle(self, body: bytes) -> Bound:
        """Arguments from cloudpickle bytes of `(args, kwargs)`. Raises InvalidInput."""
        try:
            args, kwargs = pickle.loads(body) if body else ((), {})
        except Exception as e:  # classes of the caller may raise anything while unpickling
            reason = f"{type(e).__name__}: {e}"
            raise InvalidInput(
                f"the arguments cannot be unpickled in the function's environment: {reason}"
            ) from e
        return self._check(tuple(args), dict(kwargs))

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        names = kwargs.keys()
        if (
            not args
            and self._required <= names
            and (names <= self._named or self._takes_any_name)
            and not self._positional_only
        ):
            return args, kwargs  # the common case, without further checks
        if self._positional_only and not args:
            args, kwargs = self._move_positional_only(kwargs)
        self._complain(args, kwargs)
        return args, kwargs

    def _move_positional_only(self, kwargs: dict[str, Any]) -> Bound:
        moved = []
        for name in self._positional_only:
            if name not in kwargs:
                break
            moved.append(kwargs[name])
        return tuple(moved), {
            k: v for k, v in kwargs.items() if k not in self._positional_only[: len(moved)]
        }

    def _complain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        by_position = self._positional[: len(args)]
        if len(args) > len(self._positional) and not self._takes_any_number:
            raise InvalidInput(
                f"the call has {len(args)} positional arguments, but the function takes "
                f"{len(self._positional)}: {self._signature}"
            )
        if twice := sorted(kwargs.keys() & set(by_position)):
            raise InvalidInput(
                f"parameter {twice[0]!r} is passed both by position and by name: pass it once",
                parameter=twice[0],
            )
        if missing := [
            name
            for name in self._signature.parameters
            if name in self._required - kwargs.keys() - set(by_position)
        ]:
            raise InvalidInput(
                f"parameter {missing[0]!r} is missing: the function's signature is "
                f"{self._signature}",
                parameter=missing[0],
            )
        if not self._takes_any_name and (unknown := sorted(kwargs.keys() - self._named)):
            raise InvalidInput(
                f"unknown parameter {unknown[0]!r}: the function's signature is {self._signature}",
                parameter=unknown[0],
            )

    def _converted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        positions = dict(zip(self._positional, range(len(args)), strict=False))
        values = list(args)
        for name, convert in self._converters.items():
            if name in kwargs:
                kwargs[name] = _of_parameter(name, convert, kwargs[name])
            elif name in positions:
                values[positions[name]] = _of_parameter(name, convert, values[positions[name]])
        return tuple(values), kwargs

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return valid arguments by the names of their parameters, with defaults."""
        defaults = {
            name: p.default
            for name, p in self._signature.parameters.items()
            if p.default is not p.empty
        }
        return {**defaults, **dict(zip(self._positional, args, strict=False)), **kwargs}

    def shapes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return the arguments' types and sizes, such as `text: str of 41, k: int`, without their
        values: a failed call's log may be read by people who may not read its input."""
        positional = [*self._positional, *(f"[{n}]" for n in range(len(args)))]
        named = [*zip(positional, args, strict=False), *kwargs.items()]
        shown = [f"{_name(name)}: {_shape(value)}" for name, value in named[:_SHAPES]]
        more = [f"and {len(named) - _SHAPES} more"] if len(named) > _SHAPES else []
        return ", ".join([*shown, *more]) or "none"


_SHAPES, _NAME_CHARS = 16, 64
_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_ARRAYS = frozenset({"numpy", "torch", "pandas"})
"""Packages whose values have a `shape`."""


def _name(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:_NAME_CHARS])


def _shape(value: Any) -> str:
    kind = type(value)
    if kind in _SIZED:
        return f"{kind.__name__} of {len(value)}"
    try:
        is_array = kind.__module__.partition(".")[0] in _ARRAYS
        shape = value.shape if is_array else None
        name = _name(kind.__name__)
    except Exception:  # a class of the user's may raise anything; a nested tensor has no shape
        return "object"
    if not isinstance(shape, tuple):
        return name
    return f"{name} of {'x'.join(map(str, shape)) or 'one value'}"


def _parsed(body: bytes) -> Any:
    try:
        text = body.decode()
        try:
            document, end = _SCAN(text, 0)
        except StopIteration:
            end = -1
        # json.loads handles surrounding white space and describes errors
        return document if end == len(text) else json.loads(text)
    except ValueError as e:  # JSONDecodeError, or bytes that are not UTF-8
        raise InvalidInput(f"the body is not JSON: {e}") from e


def _takes_array(hint: Any) -> bool:
    """Whether a parameter takes an array, perhaps within Annotated, or besides None."""
    return is_array(typing.get_origin(hint) or hint) or any(
        map(_takes_array, typing.get_args(hint))
    )


def _converters(
    function: Callable[..., Any], names: frozenset[str], known: Mapping[str, Any]
) -> dict[str, Convert]:
    parameters = inspect.signature(function).parameters
    hints = {name: hint for name, hint in known.items() if name in names}
    for name in [name for name in hints if parameters[name].default is None]:
        hints[name] = hints[name] | None if isinstance(hints[name], type) else hints[name]
    return {
        name: convert for name, hint in hints.items() if (convert := converter(hint)) is not None
    }


def _of_parameter(name: str, convert: Convert, value: Any) -> Any:
    try:
        return convert(value)
    except ArgumentMismatch as e:
        where = ".".join([name, *e.path])
        raise InvalidInput(
            f"parameter {where!r}: {e}", parameter=name, errors=list(e.errors)
        ) from e
