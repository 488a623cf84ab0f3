"""Converts JSON values to the annotated types of parameters: base64 to bytes, objects to
dataclasses, text to dates, arrays to tuples and numpy's arrays.

The counterpart of `pilotlight.sdk.schema`, which describes the arguments to callers. Converters are
compiled once, before the snapshot; a hint that JSON represents directly, or that is unknown, has no
converter and costs a call nothing. A value that already has the type passes unchanged: examples may
contain Python objects. Pydantic converts parameters that contain its models; it is used only if the
user's code imported it."""

from __future__ import annotations

import base64
import collections.abc
import dataclasses
import datetime as dt
import decimal
import enum
import pathlib
import sys
import types
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pilotlight.sdk.schema import array_dtype, hints_of_class, is_array

Convert = Callable[[Any], Any]


class ArgumentMismatch(ValueError):
    """Raised when a value does not match its hint.

    Attributes:
        path: names and positions that lead to the value, outermost first.
        errors: pydantic's list of errors, if it converted the value.
    """

    def __init__(
        self, message: str, *, path: tuple[str, ...] = (), errors: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        super().__init__(message)
        self.path = path
        self.errors = errors


def converter(hint: Any) -> Convert | None:
    """The function that converts a JSON value to `hint`; None if no conversion is needed."""
    return _Compiler().of(hint)


class _Compiler:
    """Compiles one hint. Recursive types are looked up when a value is converted."""

    def __init__(self) -> None:
        self._records: dict[Any, Convert | None] = {}

    def of(self, hint: Any) -> Convert | None:
        hint = _plain(hint)
        if _holds_model(hint):
            return _by_pydantic(hint)
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self._union(args)
        if is_array(origin or hint):
            return _to_array(array_dtype(args))
        if origin in _COLLECTIONS or hint in _COLLECTIONS:
            return self._collection(_COLLECTIONS[origin or hint], args)
        if origin is tuple or hint is tuple:
            return self._tuple(args)
        if origin in _MAPPINGS and len(args) == 2:
            values = self.of(args[1])
            return None if values is None else _each_value(values)
        return self._named(hint)

    def _named(self, hint: Any) -> Convert | None:
        if not isinstance(hint, type):
            return None
        if hint in _TEXTS:
            return _from_text(hint, _TEXTS[hint])
        if issubclass(hint, enum.Enum):
            return _from_text(hint, hint)
        if dataclasses.is_dataclass(hint):
            return self._record(hint)
        return self._typed_dict(hint) if typing.is_typeddict(hint) else None

    def _union(self, options: tuple[Any, ...]) -> Convert | None:
        choices = [(option, self.of(option)) for option in options]
        return None if all(convert is None for _, convert in choices) else _first_that_fits(choices)

    def _collection(
        self, make: Callable[[list[Any]], Any] | None, args: tuple[Any, ...]
    ) -> Convert | None:
        items = self.of(args[0]) if args else None
        return None if items is None and make is None else _each_item(items or _same, make or _same)

    def _tuple(self, args: tuple[Any, ...]) -> Convert:
        if not args or args[-1] is Ellipsis:
            return _each_item((self.of(args[0]) if args else None) or _same, tuple)
        return _by_position([self.of(arg) or _same for arg in args])

    def _record(self, kind: Any) -> Convert:
        if kind not in self._records:
            self._records[kind] = None
            hints = hints_of_class(kind)
            fields = {
                f.name: self.of(hints.get(f.name, Any)) for f in dataclasses.fields(kind) if f.init
            }
            self._records[kind] = _to_dataclass(kind, fields)
        return self._later(kind)

    def _typed_dict(self, kind: Any) -> Convert | None:
        if kind not in self._records:
            self._records[kind] = None
            fields = {
                name: convert
                for name, hint in hints_of_class(kind).items()
                if (convert := self.of(hint)) is not None
            }
            self._records[kind] = _to_typed_dict(fields) if fields else _same
        return None if self._records[kind] is _same else self._later(kind)

    def _later(self, kind: Any) -> Convert:
        def convert(value: Any) -> Any:
            return (self._records[kind] or _same)(value)

        return self._records[kind] or convert


# -- hints -----------------------------------------------------------------------------------------
def _plain(hint: Any) -> Any:
    """The hint without wrappers that do not affect conversion: Annotated, Required, NotRequired,
    NewType."""
    while True:
        origin = typing.get_origin(hint)
        if origin in _WRAPPERS and not (origin is typing.Annotated and _holds_model(hint)):
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        else:
            return hint if _is_hashable(hint) else Any


def _is_hashable(hint: Any) -> bool:
    try:
        hash(hint)
    except TypeError:
        return False
    return True


def _holds_model(hint: Any) -> bool:
    if isinstance(hint, type) and hasattr(hint, "model_validate"):
        return True
    return any(_holds_model(part) for part in typing.get_args(hint))


def _may_be(hint: Any, value: Any) -> bool:
    """Whether a JSON value matches a hint that needs no conversion."""
    kind = typing.get_origin(_plain(hint)) or _plain(hint)
    wanted = _JSON_KINDS.get(kind)
    if wanted is None:
        return True
    return isinstance(value, wanted) and (kind is bool or not isinstance(value, bool))


# -- converters ------------------------------------------------------------------------------------
def _same(value: Any) -> Any:
    return value


def _from_text(kind: type, parse: Convert) -> Convert:
    def convert(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        try:
            return parse(value)
        except (ValueError, TypeError, AttributeError, ArithmeticError) as e:
            raise ArgumentMismatch(
                f"{_abbreviate(value)} is not {_WANTED.get(kind, f'a {kind.__name__}')}"
            ) from e

    return convert


def _by_pydantic(hint: Any) -> Convert | None:
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not hasattr(pydantic, "TypeAdapter"):
        return None
    adapter = pydantic.TypeAdapter(hint)

    def convert(value: Any) -> Any:
        try:
            return adapter.validate_python(value)
        except pydantic.ValidationError as e:
            found = e.errors(include_url=False, include_context=False, include_input=False)
            raise ArgumentMismatch(
                found[0]["msg"], path=tuple(str(part) for part in found[0]["loc"]), errors=found
            ) from e

    return convert


def _first_that_fits(choices: Sequence[tuple[Any, Convert | None]]) -> Convert:
    def convert(value: Any) -> Any:
        refused: list[ArgumentMismatch] = []
        for option, choice in choices:
            try:
                if choice is not None:
                    return choice(value)
            except ArgumentMismatch as e:
                refused.append(e)
            else:
                if _may_be(option, value):
                    return value
        # report the option that matched deepest, which most likely was intended
        raise max(refused, key=lambda e: len(e.path))

    return convert


def _to_array(dtype: Any) -> Convert:
    numpy = sys.modules["numpy"]
    kinds = (numpy.ndarray, numpy.generic, list, tuple, int, float)

    def convert(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise ArgumentMismatch(f"{_abbreviate(value)} is not an array")
        try:
            return numpy.asarray(value, dtype)
        except (ValueError, TypeError, OverflowError) as e:
            raise ArgumentMismatch(f"{_abbreviate(value)} is not an array: {e}") from e

    return convert


def _each_item(convert: Convert, make: Callable[[list[Any]], Any]) -> Convert:
    def convert_all(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return make([_located(str(i), convert, item) for i, item in enumerate(value)])

    return convert_all


def _by_position(converters: Sequence[Convert]) -> Convert:
    def convert(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if len(value) != len(converters):
            raise ArgumentMismatch(f"has {len(value)} items, expected {len(converters)}")
        return tuple(
            _located(str(i), each, item)
            for i, (each, item) in enumerate(zip(converters, value, strict=True))
        )

    return convert


def _each_value(convert: Convert) -> Convert:
    return lambda value: (
        {k: _located(str(k), convert, v) for k, v in value.items()}
        if isinstance(value, dict)
        else value
    )


def _to_typed_dict(fields: Mapping[str, Convert]) -> Convert:
    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: _located(name, fields.get(name, _same), part) for name, part in value.items()}

    return convert


def _to_dataclass(kind: type, fields: Mapping[str, Convert | None]) -> Convert:
    def convert(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        if not isinstance(value, dict):
            raise ArgumentMismatch(
                f"{_abbreviate(value)} is not an object with the fields of {kind.__name__}"
            )
        if unknown := sorted(map(str, value.keys() - fields.keys())):
            raise ArgumentMismatch(
                f"{kind.__name__} has no field {unknown[0]!r}", path=(unknown[0],)
            )
        parts = {name: _located(name, fields[name] or _same, part) for name, part in value.items()}
        try:
            return kind(**parts)
        except (TypeError, ValueError) as e:  # a field is missing, or the class validates itself
            raise ArgumentMismatch(f"{kind.__name__}: {e}") from e

    return convert


def _located(name: str, convert: Convert, value: Any) -> Any:
    try:
        return convert(value)
    except ArgumentMismatch as e:
        raise ArgumentMismatch(str(e), path=(name, *e.path), errors=e.errors) from e


def _abbreviate(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _utc_z(text: str) -> str:
    # RFC 3339's Z, which fromisoformat does not support before Python 3.11
    return text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text


_TEXTS: dict[Any, Convert] = {
    bytes: lambda text: base64.b64decode(text, validate=True),
    bytearray: lambda given: bytearray(
        given if isinstance(given, bytes) else base64.b64decode(given, validate=True)
    ),
    dt.datetime: lambda text: dt.datetime.fromisoformat(_utc_z(text)),
    dt.date: dt.date.fromisoformat,
    dt.time: lambda text: dt.time.fromisoformat(_utc_z(text)),
    uuid.UUID: uuid.UUID,
    pathlib.Path: pathlib.Path,
    decimal.Decimal: lambda value: decimal.Decimal(str(value)),
}
_WANTED = {
    bytes: "base64",
    bytearray: "base64",
    dt.datetime: "a date and time (ISO 8601)",
    dt.date: "a date (ISO 8601)",
    dt.time: "a time (ISO 8601)",
    decimal.Decimal: "a decimal number",
}
_COLLECTIONS: dict[Any, Callable[[list[Any]], Any] | None] = {
    **dict.fromkeys(
        (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection), None
    ),
    collections.abc.MutableSequence: None,
    **dict.fromkeys((set, collections.abc.Set, collections.abc.MutableSet), set),
    frozenset: frozenset,
}
_WRAPPERS = frozenset({typing.Annotated, typing.Required, typing.NotRequired})
_MAPPINGS = frozenset({dict, collections.abc.Mapping, collections.abc.MutableMapping})
_JSON_KINDS: dict[Any, type | tuple[type, ...]] = {
    type(None): type(None),
    None: type(None),
    bool: bool,
    int: int,
    float: (int, float),
    str: str,
    **dict.fromkeys(
        (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection), list
    ),
    **dict.fromkeys(_MAPPINGS, dict),
}
