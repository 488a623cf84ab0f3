"""Converts between tensors of the Open Inference Protocol (version 2) and JSON values. Pure.

A tensor has a name, a shape, a datatype and its elements, nested or flat in row-major order."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from pilotlight.core.binary_tensors import (
    ELEMENT_BYTES,
    MAX_DIMENSION,
    MAX_DIMENSIONS,
    Buffer,
    InvalidTensor,
    Tensor,
    check_size,
    decode,
    encode,
    is_shape,
)
from pilotlight.errors import InvalidInput
from pilotlight.protocol import CONTENT_NPY

MAX_ELEMENTS = 250_000
"""Maximum elements of one tensor, more than an image of 224 x 224 x 3 has: each takes up to a
microsecond of the event loop."""
MAX_LISTS = 250_000
"""Maximum lists of all inputs together: a dimension of 1 is two bytes of a shape, but a list around
each element."""
_INTEGERS = {
    **{f"INT{bits}": (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
}
DATATYPES = (*ELEMENT_BYTES, "BYTES")
_JSON_TYPES = {"boolean": "BOOL", "integer": "INT64", "number": "FP64", "string": "BYTES"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """An input tensor of a request, without its data.

    Attributes:
        data: its elements as JSON, nested or flat; None = they follow the JSON.
        binary_bytes: size of the data that follows the JSON; 0 without.
    """

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None
    binary_bytes: int = 0

    def elements(self) -> list[Any]:
        """Return the elements of `data`, flat. Raises InvalidInput."""
        self._require_few()
        elements = list(_leaves(self.data or []))
        if len(elements) != math.prod(self.shape):
            raise _wrong(
                self.name,
                f"shape {self.shape} has {math.prod(self.shape)} elements, data {len(elements)}",
            )
        for element in elements:
            if not _is_of(self.datatype, element):
                raise _wrong(self.name, f"{element!r} is not of datatype {self.datatype}")
        return elements

    def value(self) -> Any:
        """Return the elements of `data`, nested as the shape requires. Raises InvalidInput."""
        return _nested(self.elements(), self.shape)

    def tensor(self, data: Buffer) -> Tensor:
        """Return the tensor with these bytes. Raises InvalidInput naming both sizes."""
        try:
            check_size(self.datatype, self.shape, len(data))
        except InvalidTensor as e:
            raise _wrong(self.name, str(e)) from e
        return Tensor(self.name, self.datatype, tuple(self.shape), data)

    def encoded(self) -> Tensor:
        """Return the tensor of the elements of `data`. Raises InvalidInput."""
        try:
            return self.tensor(encode(self.datatype, self.elements()))
        except InvalidTensor as e:
            raise _wrong(self.name, str(e)) from e

    def decoded(self, data: Buffer) -> Any:
        """Return the elements in these bytes as JSON values, nested. Raises InvalidInput."""
        self._require_few()
        tensor = self.tensor(data)
        try:
            elements = decode(self.datatype, tensor.data, math.prod(self.shape))
            if self.datatype == "BYTES":
                elements = [element.decode() for element in elements]
        except UnicodeDecodeError as e:
            raise _wrong(
                self.name, f"an element is not UTF-8: annotate the parameter as bytes ({e.reason})"
            ) from e
        except InvalidTensor as e:
            raise _wrong(self.name, str(e)) from e
        return _nested(elements, self.shape)

    def single(self, data: Buffer) -> Tensor:
        """Return the tensor of a parameter that takes bytes: the one element of BYTES, or the
        elements of UINT8. Raises InvalidInput."""
        tensor = self.tensor(data)
        if self.datatype == "UINT8":
            return Tensor(self.name, "UINT8", (len(data),), data)
        if self.datatype != "BYTES" or math.prod(self.shape) != 1:
            raise _wrong(
                self.name,
                f"shape {self.shape} of {self.datatype}: the parameter takes bytes: one element "
                f"of BYTES, or elements of UINT8",
            )
        try:
            (element,) = decode("BYTES", tensor.data, 1)
        except InvalidTensor as e:
            raise _wrong(self.name, str(e)) from e
        return Tensor(self.name, "UINT8", (len(element),), element)

    def _require_few(self) -> None:
        count = math.prod(self.shape)
        if count > MAX_ELEMENTS:
            raise _wrong(
                self.name,
                f"shape {self.shape} has {_format_count(count)} elements: at most {MAX_ELEMENTS}; "
                f"annotate the parameter as numpy.ndarray and send binary data to pass more",
            )


def input_of(tensor: Any) -> Input:
    """Parse an input but its data. Raises InvalidInput naming tensor, limit and actual value."""
    if (
        not isinstance(tensor, Mapping)
        or not isinstance(tensor.get("name"), str)
        or not tensor["name"]
    ):
        raise InvalidInput(
            "inputs: each is an object with name, shape, datatype and data", parameter="inputs"
        )
    name, shape, datatype = tensor["name"], tensor.get("shape"), tensor.get("datatype")
    if not is_shape(shape):
        raise _wrong(name, f"shape = {shape!r}: a list of at most {MAX_DIMENSIONS} whole numbers")
    if datatype not in DATATYPES:
        raise _wrong(name, f"datatype = {datatype!r}: must be one of {', '.join(DATATYPES)}")
    size, data = _binary_bytes(name, tensor.get("parameters")), tensor.get("data")
    if size is None and not isinstance(data, list):
        raise _wrong(
            name,
            "data must be a list, nested or flat, or parameters must have binary_data_size",
        )
    if size is not None and data is not None:
        raise _wrong(name, "has data and binary_data_size: send one of them")
    return Input(
        name=name,
        shape=list(shape or ()),
        datatype=datatype,
        data=data,
        binary_bytes=size or 0,
    )


def _binary_bytes(name: str, parameters: Any) -> int | None:
    if not isinstance(parameters, Mapping):
        return None
    for refused in ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"):
        if refused in parameters:
            raise _wrong(name, f"{refused} is not supported: send the data with the request")
    size = parameters.get("binary_data_size")
    if size is not None and not (type(size) is int and 0 <= size <= MAX_DIMENSION):
        raise _wrong(name, f"binary_data_size = {size!r}: a number of bytes")
    return size


def value_of(tensor: Any) -> tuple[str, Any]:
    """Name and value of an input with data in JSON: lists nested as the shape requires. Raises
    InvalidInput naming tensor, limit and actual value."""
    given = input_of(tensor)
    return given.name, given.value()


def kind_of(schema: Any) -> str:
    """How a parameter with this schema takes a tensor: "array", "bytes", or "" = as JSON."""
    if not isinstance(schema, Mapping):
        return ""
    if options := schema.get("anyOf"):
        kinds = {kind_of(option) for option in options if option != {"type": "null"}}
        return kinds.pop() if len(kinds) == 1 else ""
    if str(schema.get("contentMediaType", "")).startswith(CONTENT_NPY):
        return "array"
    return "bytes" if schema.get("contentEncoding") == "base64" else ""


def require_few_lists(shapes: Iterable[Sequence[int]]) -> None:
    """Raises InvalidInput if the shapes require more lists than MAX_LISTS."""
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


def output_of(tensor: Tensor, *, is_binary: bool) -> dict[str, Any]:
    """Convert a tensor that a function returned to an output tensor, with its elements unless it
    is binary. Raises InvalidInput for one that JSON cannot have."""
    output: dict[str, Any] = {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "datatype": tensor.datatype,
    }
    if is_binary:
        return output
    count = math.prod(tensor.shape)
    where, hint = f"output {tensor.name[:80]!r}", "request binary data"
    if count > MAX_ELEMENTS:
        raise InvalidInput(
            f"{where}: {count} elements, at most {MAX_ELEMENTS} as JSON: {hint}",
            parameter="outputs",
        )
    try:
        elements = decode(tensor.datatype, tensor.data, count)
        if tensor.datatype == "BYTES":
            elements = [element.decode() for element in elements]
    except (InvalidTensor, UnicodeDecodeError) as e:
        raise InvalidInput(f"{where}: {e}: {hint}", parameter="outputs") from e
    return {**output, "data": elements}


def take_data(output: dict[str, Any]) -> bytes:
    """Remove the elements of an output tensor, and return them as bytes. Raises InvalidInput."""
    try:
        return encode(output["datatype"], output.pop("data"))
    except InvalidTensor as e:
        raise InvalidInput(f"output {output['name'][:80]!r}: {e}", parameter="outputs") from e


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
    if not dimensions and kind_of(schema) == "array":
        return {"name": name, "datatype": _array_datatype(schema), "shape": [-1]}
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return {
        "name": name,
        "datatype": _JSON_TYPES.get(str(kind), "BYTES"),
        "shape": [-1] * dimensions or [1],
    }


def _array_datatype(schema: Mapping[str, Any]) -> str:
    options = schema.get("anyOf", [schema])
    said = next(str(one["contentMediaType"]) for one in options if "contentMediaType" in one)
    datatype = said.rpartition("=")[2]
    return datatype if datatype in DATATYPES else "FP32"


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
