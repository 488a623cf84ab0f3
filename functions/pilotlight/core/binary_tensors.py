"""Tensors as bytes: little-endian elements in row-major order, as the binary tensor data extension
of the Open Inference Protocol defines them, and the body that activators and workers exchange.
Pure; without numpy.

Each element of datatype BYTES is preceded by its length, four bytes. BF16 is the upper half of a
float of 32 bits.

A body (CONTENT_TENSORS) has two JSON texts, each preceded by its length in four bytes, then the
data of its tensors: an object whose members are values, null for each tensor; and the list of the
tensors, `[name, datatype, shape, bytes]`, in the order of their data."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

ELEMENT_BYTES: Final = {
    "BOOL": 1,
    **{f"{sign}INT{bits}": bits // 8 for sign in ("", "U") for bits in (8, 16, 32, 64)},
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
}
"""Size of an element, for all datatypes but BYTES."""
MAX_DIMENSIONS: Final = 32
MAX_DIMENSION: Final = (1 << 63) - 1
_FORMATS: Final = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
"""Formats of `struct`."""
_LENGTH: Final = struct.Struct("<I")
_ALIGNMENT: Final = 16
"""The data begins at a multiple of it, so that an array can share the memory of the body."""
Buffer = bytes | bytearray | memoryview


class InvalidTensor(ValueError):
    """Raised when bytes are not what a tensor's datatype and shape, or a body's texts, require."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor. `data`: its elements."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer


def is_shape(given: Any) -> bool:
    """Whether a JSON value is a shape: a list of at most MAX_DIMENSIONS sizes."""
    return (
        isinstance(given, list)
        and len(given) <= MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size <= MAX_DIMENSION for size in given)
    )


def check_size(datatype: str, shape: Sequence[int], size: int) -> None:
    """Check that `size` bytes can be the data of a tensor. Raises InvalidTensor with both sizes."""
    count = math.prod(shape)
    if datatype == "BYTES":
        if 4 * count > size:
            raise InvalidTensor(
                f"shape {list(shape)} has {_shown(count)} elements of BYTES, which take at least "
                f"{_shown(4 * count)} bytes: the data has {size}"
            )
    elif count * ELEMENT_BYTES[datatype] != size:
        raise InvalidTensor(
            f"shape {list(shape)} of {datatype} takes {_shown(count * ELEMENT_BYTES[datatype])} "
            f"bytes: the data has {size}"
        )


def decode(datatype: str, data: Buffer, count: int) -> list[Any]:
    """Return the elements, those of BYTES as bytes. Raises InvalidTensor."""
    check_size(datatype, [count], len(data))
    if datatype == "BYTES":
        return _decode_bytes(data, count)
    if datatype == "BF16":
        data, datatype = _widened(data), "FP32"
    return list(struct.unpack(f"<{count}{_FORMATS[datatype]}", data))


def encode(datatype: str, elements: Sequence[Any]) -> bytes:
    """Return the data of elements, those of BYTES as text or bytes. Raises InvalidTensor for an
    element that is not of the datatype."""
    try:
        if datatype == "BYTES":
            return b"".join(map(_counted, elements))
        if datatype == "BF16":
            data = struct.pack(f"<{len(elements)}f", *elements)
            return b"".join(data[at + 2 : at + 4] for at in range(0, len(data), 4))
        return struct.pack(f"<{len(elements)}{_FORMATS[datatype]}", *elements)
    except (struct.error, OverflowError, TypeError, AttributeError, UnicodeError) as e:
        raise InvalidTensor(f"an element is not of datatype {datatype}: {e}") from e


def _counted(element: str | bytes) -> bytes:
    data = element if isinstance(element, bytes) else element.encode()
    return _LENGTH.pack(len(data)) + data


def _decode_bytes(data: Buffer, count: int) -> list[bytes]:
    elements: list[bytes] = []
    at, size = 0, len(data)
    while len(elements) < count:
        end = at + 4
        if end <= size:
            (length,) = _LENGTH.unpack_from(data, at)
            at, end = end, end + length
        if end > size:
            raise InvalidTensor(
                f"element {len(elements)} of BYTES ends at byte {end}: the data has {size} bytes"
            )
        elements.append(bytes(data[at:end]))
        at = end
    if at != size:
        raise InvalidTensor(f"{size - at} bytes follow the {count} elements of BYTES")
    return elements


def _widened(data: Buffer) -> bytes:
    """Convert BF16 to FP32."""
    wide = bytearray(2 * len(data))
    wide[2::4], wide[3::4] = data[::2], data[1::2]
    return bytes(wide)


def _shown(count: int) -> str:
    return str(count) if count < 10**12 else "more than 10^12"


# -- bodies ----------------------------------------------------------------------------------------
def pack(values: bytes, tensors: Sequence[Tensor]) -> bytes:
    """Return a body. `values`: the JSON object, with null for each tensor."""
    listed = json.dumps([[t.name, t.datatype, t.shape, len(t.data)] for t in tensors]).encode()
    listed += b" " * (-(len(values) + len(listed) + 8) % _ALIGNMENT)
    return b"".join(
        (
            _LENGTH.pack(len(values)),
            values,
            _LENGTH.pack(len(listed)),
            listed,
            *(tensor.data for tensor in tensors),
        )
    )


def values_of(body: Buffer) -> bytes:
    """Return the JSON object of a body. Raises InvalidTensor."""
    return bytes(_texts(body)[0])


def texts_bytes(body: Buffer) -> int:
    """Return the size of a body's texts, lengths included. Raises InvalidTensor."""
    values, listed, _ = _texts(body)
    return len(values) + len(listed) + 8


def unpack(body: Buffer) -> tuple[bytes, list[Tensor]]:
    """Return the JSON object and the tensors, whose data are parts of the body. The sizes of the
    tensors are checked. Raises InvalidTensor."""
    values, listed, data = _texts(body)
    try:
        entries = json.loads(bytes(listed))
    except (ValueError, RecursionError) as e:
        raise InvalidTensor(f"the list of tensors is not JSON: {e}") from e
    tensors: list[Tensor] = []
    at = 0
    for entry in entries if isinstance(entries, list) else ():
        tensor = _listed(entry, data[at:])
        at += len(tensor.data)
        tensors.append(tensor)
    if at != len(data):
        raise InvalidTensor(f"{len(data) - at} bytes follow the tensors")
    return bytes(values), tensors


def _listed(entry: Any, data: memoryview) -> Tensor:
    match entry:
        case [str(name), str(datatype), list(shape), int(size)] if (
            is_shape(shape)
            and 0 <= size <= len(data)
            and (datatype == "BYTES" or datatype in ELEMENT_BYTES)
        ):
            check_size(datatype, shape, size)
            return Tensor(name, datatype, tuple(shape), data[:size])
    raise InvalidTensor(f"not a tensor of the body: {repr(entry)[:80]}")


def _texts(body: Buffer) -> tuple[memoryview, memoryview, memoryview]:
    whole = memoryview(body)
    found: list[memoryview] = []
    at = 0
    for _ in range(2):
        length = _LENGTH.unpack_from(whole, at)[0] if len(whole) >= at + 4 else len(whole)
        at += 4
        if at + length > len(whole):
            raise InvalidTensor(f"the body ends before byte {at + length}")
        found.append(whole[at : at + length])
        at += length
    return found[0], found[1], whole[at:]
