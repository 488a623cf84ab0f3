"""JSON Schema (draft 2020-12) of the arguments and results of a callable, from its signature and
type hints.

A hint that JSON cannot express, or that cannot be evaluated, becomes `{}` (any value): a call must
only be rejected early for arguments that are certainly wrong."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import inspect
import json
import pathlib
import sys
import types
import typing
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pilotlight.protocol import CONTENT_NPY

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_PLAIN: dict[Any, Schema] = {
    type(None): {"type": "null"},
    None: {"type": "null"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bytes: {"type": "string", "contentEncoding": "base64"},
    bytearray: {"type": "string", "contentEncoding": "base64"},
    dt.datetime: {"type": "string", "format": "date-time"},
    dt.date: {"type": "string", "format": "date"},
    dt.time: {"type": "string", "format": "time"},
    uuid.UUID: {"type": "string", "format": "uuid"},
    pathlib.Path: {"type": "string"},
    decimal.Decimal: {"type": ["string", "number"]},
}
_ARRAYS = (
    list,
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Collection,
    collections.abc.MutableSequence,
)
_SETS = (set, frozenset, collections.abc.Set, collections.abc.MutableSet)
_OBJECTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_STREAMS = (
    collections.abc.Iterator,
    collections.abc.Generator,
    collections.abc.Iterable,
    collections.abc.AsyncIterator,
    collections.abc.AsyncGenerator,
    collections.abc.AsyncIterable,
)
_DATATYPES = {
    "bool": "BOOL",
    "bool_": "BOOL",
    **{
        f"{sign}int{bits}": f"{sign}int{bits}".upper()
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
"""Datatypes of the Open Inference Protocol, by the names of numpy's types."""
MAX_RETURNS_BYTES = 65_536
"""Larger schemas of results are omitted: they help no reader."""
_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_BY_POSITION = frozenset(
    {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
)


def arguments_schema(
    function: Callable[..., Any],
    *,
    is_method: bool = False,
    hints: Mapping[str, Any] | None = None,
    hidden: str = "",
) -> tuple[Schema | None, tuple[str, ...]]:
    """Return the schema of the arguments of `function` as one object, and the names of its
    positional parameters in order.

    With `is_method` the first parameter is omitted. The schema is None for a function with `*args`,
    whose arguments an object cannot express. `hints` replace the hints of the function. `hidden`:
    a parameter that is no argument."""
    parameters = list(inspect.signature(function).parameters.values())
    if is_method and parameters and parameters[0].kind in _BY_POSITION:
        parameters = parameters[1:]
    parameters = [p for p in parameters if p.name != hidden]
    names = tuple(p.name for p in parameters if p.kind in _BY_POSITION)
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None, names
    builder = _SchemaBuilder(hints_of(function) if hints is None else hints)
    schema: Schema = {
        "$schema": DIALECT,
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    required: list[str] = []
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            schema["additionalProperties"] = builder.of_parameter(parameter) or True
            continue
        schema["properties"][parameter.name] = builder.of_parameter(parameter)
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    if required:
        schema["required"] = required
    if builder.definitions:
        schema["$defs"] = dict(sorted(builder.definitions.items()))
    return schema, names


def returns_schema(
    function: Callable[..., Any],
    *,
    is_generator: bool = False,
    hints: Mapping[str, Any] | None = None,
) -> Schema | None:
    """Return the schema of the JSON result of `function`, or of one item with `is_generator`; None
    for any value or without a usable hint."""
    hint = (hints_of(function) if hints is None else hints).get("return", Any)
    if is_generator:
        args = typing.get_args(hint)
        hint = args[0] if typing.get_origin(hint) in _STREAMS and args else Any
    builder = _SchemaBuilder({}, is_output=True)
    schema = builder.of(hint)
    if not schema:
        return None
    whole: Schema = {"$schema": DIALECT, **schema}
    if builder.definitions:
        whole["$defs"] = dict(sorted(builder.definitions.items()))
    return whole if len(json.dumps(whole)) <= MAX_RETURNS_BYTES else None


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional parameters in order, () if the signature is unknown."""
    try:
        return tuple(
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind in _BY_POSITION
        )
    except (TypeError, ValueError):
        return ()


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the evaluated annotations, without those that cannot be evaluated at run time."""
    namespace = getattr(inspect.unwrap(function), "__globals__", {})
    found: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            found |= typing.get_type_hints(holder, globalns=namespace, include_extras=True)
        except (NameError, TypeError, SyntaxError, AttributeError, ImportError):
            # a hint for type checkers only (TYPE_CHECKING imports, stubs)
            continue
    return found


class _SchemaBuilder:
    """Translates hints and collects `$defs`, for one schema. With `is_output` it describes values
    as serialized, otherwise as parsed."""

    def __init__(self, hints: Mapping[str, Any], *, is_output: bool = False) -> None:
        self._is_output = is_output
        self.definitions: dict[str, Schema] = {}
        self._names: dict[Any, str] = {}
        self._hints = hints

    def of_parameter(self, parameter: inspect.Parameter) -> Schema:
        """Return the schema of a parameter, with its default if that is a JSON value."""
        schema = self.of(self._hints.get(parameter.name, Any))
        default = parameter.default
        if default is inspect.Parameter.empty or not schema:
            return schema
        if default is None and not _allows_null(schema):
            schema = {"anyOf": [schema, {"type": "null"}]}
        return {**schema, "default": default} if _is_json(default) else schema

    def of(self, hint: Any) -> Schema:
        """Return the schema of a type hint; {} if unknown."""
        try:
            if hint in _PLAIN:
                return dict(_PLAIN[hint])
        except TypeError:
            return {}  # unhashable: not a type
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return self._annotated(args)
        if origin in (typing.Union, types.UnionType):
            return self._union(args)
        if origin is typing.Literal:
            return {"enum": [a.value if isinstance(a, enum.Enum) else a for a in args]}
        if isinstance(hint, TypeVar):
            return self.of(hint.__bound__) if hint.__bound__ is not None else {}
        if isinstance(hint, typing.NewType):
            return self.of(hint.__supertype__)
        if is_array(origin):
            return _array_of(args)
        container = self._container(origin or hint, args)
        return container if container is not None else self._named(hint)

    def _annotated(self, args: tuple[Any, ...]) -> Schema:
        schema = self.of(args[0])
        if not schema:
            return schema
        text = schema.get("type") == "string"
        for item in (m for extra in args[1:] for m in (*getattr(extra, "metadata", ()), extra)):
            for attribute, keyword in _BOUNDS.items():
                if _is_number(value := getattr(item, attribute, None)):
                    schema[keyword] = value
            for attribute in ("min_length", "max_length"):
                if _is_number(value := getattr(item, attribute, None)):
                    schema[attribute[:3] + ("Length" if text else "Items")] = value
        return schema

    def _union(self, args: tuple[Any, ...]) -> Schema:
        options = [self.of(a) for a in args]
        if {} in options:
            return {}
        unique = [o for i, o in enumerate(options) if o not in options[:i]]
        return unique[0] if len(unique) == 1 else {"anyOf": unique}

    def _container(self, origin: Any, args: tuple[Any, ...]) -> Schema | None:
        if origin in _ARRAYS:
            return _array(self.of(args[0]) if args else {})
        if origin in _SETS:
            return {**_array(self.of(args[0]) if args else {}), "uniqueItems": True}
        if origin in _OBJECTS:
            values = self.of(args[1]) if len(args) == 2 else {}
            return (
                {"type": "object", "additionalProperties": values} if values else {"type": "object"}
            )
        if origin is tuple:
            return self._tuple(args)
        return None

    def _tuple(self, args: tuple[Any, ...]) -> Schema:
        if not args or (len(args) == 2 and args[1] is Ellipsis):
            return _array(self.of(args[0]) if args else {})
        items = [self.of(a) for a in args if a != ()]
        return {
            "type": "array",
            "prefixItems": items,
            "items": False,
            "minItems": len(items),
            "maxItems": len(items),
        }

    def _named(self, hint: Any) -> Schema:
        if not isinstance(hint, type):
            return {}
        if is_array(hint):
            return {"contentMediaType": CONTENT_NPY}
        if issubclass(hint, enum.Enum):
            return (
                {"enum": [member.value for member in hint]}
                if all(_is_json(m.value) for m in hint)
                else {}
            )
        if hasattr(hint, "model_json_schema") and "pydantic" in sys.modules:
            return self._pydantic(hint)
        if dataclasses.is_dataclass(hint):
            return self._record(
                hint, _written_fields(hint) if self._is_output else _read_fields(hint)
            )
        if typing.is_typeddict(hint):
            return self._record(hint, _typed_dict_keys(hint))
        return {}

    def _record(self, kind: type, fields: Mapping[str, bool]) -> Schema:
        if kind in self._names:
            return {"$ref": f"#/$defs/{self._names[kind]}"}
        name = self._reserve(kind)
        hints = hints_of_class(kind)
        body: Schema = {
            "type": "object",
            "properties": {field: self.of(_bare(hints.get(field, Any))) for field in fields},
            "additionalProperties": False,
        }
        if required := [field for field, needed in fields.items() if needed]:
            body["required"] = required
        self.definitions[name] = body
        return {"$ref": f"#/$defs/{name}"}

    def _pydantic(self, model: Any) -> Schema:
        if model in self._names:
            return {"$ref": f"#/$defs/{self._names[model]}"}
        name = self._reserve(model)
        how = (
            {"mode": "serialization", "schema_generator": _writes_all()} if self._is_output else {}
        )
        try:
            body = model.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}", **how)
        except RuntimeError:
            # a field of a type without a JSON form (raises PydanticInvalidForJsonSchema)
            body = {}
        for inner, definition in body.pop("$defs", {}).items():
            self.definitions[f"{name}.{inner}"] = definition
        self.definitions[name] = body
        return {"$ref": f"#/$defs/{name}"}

    def _reserve(self, kind: type) -> str:
        name, number = kind.__name__, 2
        while name in self.definitions:
            name, number = f"{kind.__name__}{number}", number + 1
        self._names[kind] = name
        self.definitions[name] = {}
        return name


def is_array(hint: Any) -> bool:
    """Whether a type is `numpy.ndarray`, without importing numpy."""
    return (
        getattr(hint, "__module__", None) == "numpy"
        and getattr(hint, "__name__", None) == "ndarray"
    )


def array_dtype(args: tuple[Any, ...]) -> Any:
    """Return the type of the elements of `numpy.ndarray[…]`, as `numpy.typing.NDArray` writes it;
    None where it names none."""
    dtype = args[1] if len(args) == 2 else None
    found = next(iter(typing.get_args(dtype)), None)
    return found if isinstance(found, type) else None


def _array_of(args: tuple[Any, ...]) -> Schema:
    dtype = array_dtype(args)
    datatype = _DATATYPES.get(getattr(dtype, "__name__", ""))
    if datatype is None:
        return {"contentMediaType": CONTENT_NPY}
    return {"contentMediaType": f"{CONTENT_NPY};datatype={datatype}"}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items} if items else {"type": "array"}


@functools.cache
def _writes_all() -> type:
    """Return a pydantic schema generator that requires fields with a default too, because they are
    always serialized."""
    from pydantic.json_schema import GenerateJsonSchema

    class Written(GenerateJsonSchema):
        def field_is_required(self, field: Any, total: bool) -> bool:
            return (
                super().field_is_required(field, total)
                if field["type"] == "typed-dict-field"
                else True
            )

    return Written


def _read_fields(kind: Any) -> dict[str, bool]:
    """Map each field that a dataclass is constructed from to whether it is required."""
    fields = [f for f in dataclasses.fields(kind) if f.init]
    return {
        f.name: f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        for f in fields
    }


def _written_fields(kind: Any) -> dict[str, bool]:
    """Map each field that a dataclass is serialized with to True: all are always present."""
    return {f.name: True for f in dataclasses.fields(kind)}


def hints_of_class(kind: type) -> dict[str, Any]:
    """Return the evaluated annotations of a class, {} if one of them cannot be evaluated."""
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError, SyntaxError, AttributeError):
        return {}  # a hint is for type checkers only


def _typed_dict_keys(kind: Any) -> dict[str, bool]:
    """Map each key to whether it is required. With postponed annotations `__required_keys__`
    ignores `NotRequired[…]`."""
    hints = hints_of_class(kind)
    required: frozenset[str] = getattr(kind, "__required_keys__", frozenset())
    origins = {key: typing.get_origin(hints.get(key)) for key in kind.__annotations__}
    return {
        key: o is typing.Required or (key in required and o is not typing.NotRequired)
        for key, o in origins.items()
    }


def _bare(hint: Any) -> Any:
    """Strip `Required[…]` and `NotRequired[…]` from the type of a key."""
    return (
        typing.get_args(hint)[0]
        if typing.get_origin(hint) in (typing.Required, typing.NotRequired)
        else hint
    )


def _allows_null(schema: Schema) -> bool:
    if "anyOf" in schema:
        return any(_allows_null(option) for option in schema["anyOf"])
    kinds = schema.get("type")
    return (
        not schema
        or kinds == "null"
        or (isinstance(kinds, list) and "null" in kinds)
        or None in schema.get("enum", [])
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value) and not isinstance(
            value, enum.Enum
        )
    except (TypeError, ValueError):
        return False
