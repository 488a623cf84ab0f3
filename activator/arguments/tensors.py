"""Converts between tensors of the Open Inference Protocol (version 2, HTTP/REST) and JSON values.
Pure.

A tensor has a name, a shape, a datatype and its elements, nested or flat in row-major order."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from pilotlight.errors import InvalidInput

MAX_ELEMENTS = 250_000
"""Maximum elements of one tensor, more than an image of 224 x 224 x 3 has: each takes up to a
microsecond of the event loop."""
MAX_LISTS = 250_000
"""Maximum lists of all inputs together: a dimension of 1 is two bytes of a shape, but a list around
each element."""
MAX_DIMENSIONS = 32
_INTEGERS = {
    **{f"INT{bits}": (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
}
_FLOATS = ("FP16", "BF16", "FP32", "FP64")
DATATYPES = ("BOOL", *_INTEGERS, *_FLOATS, "BYTES")
_JSON_TYPES = {"boolean": "BOOL", "integer": "INT64", "number": "FP64", "string": "BYTES"}


def value_of(tensor: Any) -> tuple[str, Any]:
    """Name and value of an input: lists nested as the shape requires. Raises InvalidInput naming
    tensor, limit and actual value."""
    if (
        not isinstance(tensor, Mapping)
        or not isinstance(tensor.get("name"), str)
        or not tensor["name"]
    ):
        raise InvalidInput(
            "inputs: each is an object with name, shape, datatype and data", parameter="inputs"
        )
    name = tensor["name"]
    shape, datatype = _shape(name, tensor.get("shape")), tensor.get("datatype")
    if datatype not in DATATYPES:
        raise _wrong(name, f"datatype = {datatype!r}: must be one of {', '.join(DATATYPES)}")
    if not isinstance(tensor.get("data"), list):
        raise _wrong(
            name,
            "data must be a list, nested or flat; binary data after the JSON is not supported",
        )
    elements = list(_leaves(tensor["data"]))
    if len(elements) != math.prod(shape):
        raise _wrong(name, f"shape {shape} has {math.prod(shape)} elements, data {len(elements)}")
    for element in elements:
        if not _is_of(datatype, element):
            raise _wrong(name, f"{element!r} is not of datatype {datatype}")
    return name, _nested(elements, shape)


def require_few_elements(inputs: Iterable[Any]) -> None:
    """Raises InvalidInput if the shapes require more lists than MAX_LISTS. Invalid shapes are
    reported by `value_of`."""
    shapes = [
        given["shape"]
        for given in inputs
        if isinstance(given, Mapping) and _is_shape(given.get("shape"))
    ]
    lists = sum(sum(accumulate(shape[:-1], mul)) for shape in shapes)
    if lists > MAX_LISTS:
        raise InvalidInput(
            f"the shapes of the inputs require {_format_count(lists)} nested lists: at most {MAX_LISTS}; "
            f"leave out dimensions of 1, "
            "or call the function by its own name, whose arguments are not translated",
            parameter="inputs",
        )


def tensor_of(name: str, value: Any) -> dict[str, Any]:
    """Convert a value to an output tensor. A value without a rectangular shape of one type becomes
    JSON text, marked by its parameters."""
    shape = _shape_of(value)
    elements = list(_leaves(value)) if isinstance(value, list) else [value]
    datatype = _datatype_of(elements)
    if shape is None or datatype is None or len(elements) != math.prod(shape):
        parameters = {"content_type": "application/json"}
        return {
            "name": name,
            "shape": [1],
            "datatype": "BYTES",
            "parameters": parameters,
            "data": [json.dumps(value)],
        }
    return {"name": name, "shape": shape, "datatype": datatype, "data": elements}


def tensors_of(value: Any) -> list[dict[str, Any]]:
    """Convert an answer to output tensors: one for each member of an object, otherwise one named
    `output`."""
    if isinstance(value, dict) and value:
        return [tensor_of(name, inner) for name, inner in value.items()]
    return [tensor_of("output", value)]


def is_scalar(schema: Any) -> bool:
    """Whether an argument with this schema is a single number, text or truth value."""
    if not isinstance(schema, Mapping):
        return False
    if options := schema.get("anyOf"):
        return all(is_scalar(option) or option == {"type": "null"} for option in options)
    return schema.get("type") in _JSON_TYPES


def tensor_metadata(name: str, schema: Any) -> dict[str, Any]:
    """The metadata of a tensor with this JSON Schema, as far as known; -1 for dimensions of any
    size."""
    dimensions = 0
    while (
        isinstance(schema, Mapping)
        and schema.get("type") == "array"
        and dimensions < MAX_DIMENSIONS
    ):
        schema, dimensions = schema.get("items"), dimensions + 1
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return {
        "name": name,
        "datatype": _JSON_TYPES.get(str(kind), "BYTES"),
        "shape": [-1] * dimensions or [1],
    }


def _shape(name: str, given: Any) -> list[int]:
    if not _is_shape(given):
        raise _wrong(name, f"shape = {given!r}: a list of at most {MAX_DIMENSIONS} whole numbers")
    if math.prod(given) > MAX_ELEMENTS:
        raise _wrong(
            name,
            f"shape {given} has {_format_count(math.prod(given))} elements: at most {MAX_ELEMENTS}",
        )
    return list(given)


def _is_shape(given: Any) -> bool:
    is_list = isinstance(given, list) and len(given) <= MAX_DIMENSIONS
    return is_list and all(
        isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in given
    )


def _format_count(count: int) -> str:
    return str(count) if count < 10**12 else "more than 10^12"


def _leaves(value: list[Any]) -> Iterator[Any]:
    # Not recursive: the caller chooses the nesting depth.
    pending = [iter(value)]
    while pending:
        for inner in pending[-1]:
            if isinstance(inner, list):
                pending.append(iter(inner))
                break
            yield inner
        else:
            pending.pop()


def _nested(elements: Sequence[Any], shape: Sequence[int]) -> Any:
    parts: list[Any] = list(elements)
    if not shape:
        return parts[0]
    for size in reversed(shape[1:]):
        parts = [parts[n : n + size] for n in range(0, len(parts), size)] if size else []
    return parts


def _is_of(datatype: str, element: Any) -> bool:
    if datatype == "BOOL":
        return isinstance(element, bool) or (type(element) is int and element in (0, 1))
    if datatype == "BYTES":
        return isinstance(element, str)
    if isinstance(element, bool):
        return False
    if datatype in _INTEGERS:
        low, high = _INTEGERS[datatype]
        return isinstance(element, int) and low <= element <= high
    return isinstance(element, int | float)


def _datatype_of(elements: Sequence[Any]) -> str | None:
    kinds = {type(element) for element in elements}
    if kinds == {bool}:
        return "BOOL"
    if kinds == {str}:
        return "BYTES"
    if kinds == {int}:
        low, high = _INTEGERS["INT64"]
        return "INT64" if all(low <= element <= high for element in elements) else None
    return "FP64" if kinds and kinds <= {int, float} else None


def _shape_of(value: Any) -> list[int] | None:
    """Sizes of the first parts, outermost first; [1] for a single value, None for an empty part."""
    shape: list[int] = []
    while isinstance(value, list):
        if not value or len(shape) == MAX_DIMENSIONS:
            return None
        shape.append(len(value))
        value = value[0]
    return shape or [1]


def _wrong(name: str, text: str) -> InvalidInput:
    return InvalidInput(f"input {name[:80]!r}: {text[:400]}", parameter="inputs")
