"""Records of specifications as JSON: errors name the key, its value and what was expected."""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from pilotlight.errors import InvalidInput

if typing.TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = typing.TypeVar("T", bound="DataclassInstance")

MAX_DEPTH = 150
"""Maximum nesting of stored JSON values, since parsers use stack per level. Schemas have a lower
limit."""


def canonical_json(value: Any) -> bytes:
    """Encode JSON with sorted keys and no spaces, so that equal values have equal bytes and
    hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def to_json(record: Any) -> Any:
    """Convert a record to JSON values, recursively."""
    if is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_json(getattr(record, f.name)) for f in fields(record)}
    if isinstance(record, Mapping):
        return {str(k): to_json(v) for k, v in record.items()}
    if isinstance(record, list | tuple):
        return [to_json(v) for v in record]
    return record


def check_plain(value: Any, where: str) -> None:
    """Raise InvalidInput for a JSON value that cannot be encoded again: nested deeper than
    MAX_DEPTH, or with a lone surrogate."""
    ahead = [(value, 0)]
    while ahead:
        one, depth = ahead.pop()
        if depth > MAX_DEPTH:
            raise InvalidInput(
                f"{where}: nested deeper than {MAX_DEPTH} lists and objects", parameter=where
            )
        if isinstance(one, str):
            try:
                one.encode()
            except UnicodeEncodeError as e:  # a lone surrogate, which JSON escapes can express
                raise InvalidInput(
                    f"{where}: {one[e.start]!a} is half of a surrogate pair: use UTF-8",
                    parameter=where,
                ) from e
        elif isinstance(one, Mapping):
            ahead += [(each, depth + 1) for pair in one.items() for each in pair]
        elif isinstance(one, list | tuple):
            ahead += [(each, depth + 1) for each in one]


def from_json(kind: type[T], body: Any, where: str = "") -> T:
    """Parse JSON values to the record `kind`. Raises InvalidInput naming the key, its value and the
    expected type."""
    check_plain(body, where or kind.__name__)
    return _record(kind, body, where)


def _record(kind: type[T], body: Any, where: str) -> T:
    where = where or kind.__name__
    if not isinstance(body, Mapping):
        raise InvalidInput(
            f"{where}: expected an object, got {type(body).__name__}", parameter=where
        )
    hints = _HINTS.get(kind)
    # cached, since resolving annotations takes longer than parsing a record
    if hints is None:
        hints = _HINTS[kind] = typing.get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}
    if unknown := sorted(set(body) - set(known)):
        raise InvalidInput(
            f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}",
            parameter=unknown[0],
        )
    for name, f in known.items():
        if name not in body and f.default is MISSING and f.default_factory is MISSING:
            raise InvalidInput(f"{where}: {name!r} is missing", parameter=name)
    values = {name: _value(hints[name], v, f"{where}.{name}") for name, v in body.items()}
    return kind(**values)


_HINTS: dict[type, dict[str, Any]] = {}


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _one_of(args, value, where)
    if origin is tuple:
        _require(isinstance(value, list | tuple), "a list", value, where)
        return tuple(_value(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        _require(isinstance(value, Mapping), "an object", value, where)
        return {str(k): _value(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if is_dataclass(hint):
        return _record(typing.cast("type[Any]", hint), value, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        _require(
            value in [m.value for m in hint], f"one of {[m.value for m in hint]}", value, where
        )
        return hint(value)
    if hint is float:
        _require(
            isinstance(value, int | float) and not isinstance(value, bool), "a number", value, where
        )
        return float(value)
    matches = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    _require(
        matches,
        {int: "a whole number", str: "a string", bool: "true or false"}.get(hint, str(hint)),
        value,
        where,
    )
    return value


def _one_of(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in choices:
        return None
    failure: InvalidInput | None = None
    for choice in choices:
        if choice is not type(None):
            try:
                return _value(choice, value, where)
            except InvalidInput as e:
                failure = failure or e
    raise failure or InvalidInput(f"{where}: null is not allowed", parameter=where)


def _require(condition: bool, wanted: str, value: Any, where: str) -> None:
    if not condition:
        raise InvalidInput(f"{where} = {value!r}: expected {wanted}", parameter=where)
