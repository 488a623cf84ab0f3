"""Arrays and bytes of calls that are no JSON: arguments from tensors, and results as tensors, as
`numpy.save` writes an array, or as they are.

numpy is used only where the user's code imported it."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Mapping
from typing import Any

from pilotlight.core.binary_tensors import (
    Buffer,
    InvalidTensor,
    Tensor,
    decode,
    encode,
    pack,
)
from pilotlight.errors import InvalidInput
from pilotlight.protocol import CONTENT_BYTES, CONTENT_NPY, CONTENT_TENSORS
from pilotlight.worker.user_code.serialization import ResultNotSerializable, as_json

_BYTES, _NPY, _TENSORS = CONTENT_BYTES.encode(), CONTENT_NPY.encode(), CONTENT_TENSORS.encode()
_ANY = b"*/*"
_BUFFERS = (bytes, bytearray, memoryview)
_DTYPES = {
    "BOOL": "?",
    **{f"INT{size * 8}": f"<i{size}" for size in (1, 2, 4, 8)},
    **{f"UINT{size * 8}": f"<u{size}" for size in (1, 2, 4, 8)},
    **{f"FP{size * 8}": f"<f{size}" for size in (2, 4, 8)},
}
_DATATYPES = {
    ("b", 1): "BOOL",
    **{("i", size): f"INT{size * 8}" for size in (1, 2, 4, 8)},
    **{("u", size): f"UINT{size * 8}" for size in (1, 2, 4, 8)},
    **{("f", size): f"FP{size * 8}" for size in (2, 4, 8)},
}
"""Datatypes by kind and size of numpy's."""


def argument(tensor: Tensor, *, is_array: bool) -> Any:
    """Return the value of a parameter that takes arrays (`is_array`) or bytes. Arrays share the
    memory of the body. Raises InvalidInput."""
    if not is_array:
        return bytes(tensor.data)
    numpy = sys.modules["numpy"]
    datatype, data = tensor.datatype, tensor.data
    if datatype == "BYTES":
        count = math.prod(tensor.shape)
        try:
            elements = decode("BYTES", data, count)
        except InvalidTensor as e:
            raise InvalidInput(f"parameter {tensor.name!r}: {e}", parameter=tensor.name) from e
        array = numpy.empty(count, object)
        array[:] = elements
    elif not len(data):
        array = numpy.empty(0, _DTYPES.get(datatype, "<f4"))
    elif datatype == "BF16":
        halves = numpy.frombuffer(data, "<u2").astype("<u4")
        array = (halves << 16).view("<f4")
    else:
        array = numpy.frombuffer(data, _DTYPES[datatype])
        if not array.flags.aligned:
            array = array.copy()
    return array.reshape(tensor.shape)


def answer(accept: bytes, value: Any) -> tuple[bytes, bytes] | None:
    """Return content type and body of a result for a caller that accepts these types; None for
    JSON. Raises ResultNotSerializable."""
    if accept == _TENSORS:
        body = _packed(value)
        return None if body is None else (_TENSORS, body)
    if isinstance(value, _BUFFERS):
        if _BYTES in accept or _ANY in accept:
            return _BYTES, bytes(value)
    elif _NPY in accept and _is_of(value, "numpy"):
        return _NPY, _saved(value)
    return None


def _saved(value: Any) -> bytes:
    numpy = sys.modules["numpy"]
    file = io.BytesIO()
    try:
        numpy.save(file, value, allow_pickle=False)
    except ValueError as e:
        raise ResultNotSerializable(f"the result cannot be written as {CONTENT_NPY}: {e}") from e
    return file.getvalue()


def _packed(value: Any) -> bytes | None:
    """Return a result as CONTENT_TENSORS: the members of an object, or one that is named `output`;
    None where there is no tensor."""
    members = dict(value) if isinstance(value, Mapping) and value else {"output": value}
    tensors = []
    for name, member in members.items():
        if isinstance(name, str) and (tensor := _tensor(name, member)) is not None:
            tensors.append(tensor)
            members[name] = None
    return pack(as_json(members), tensors) if tensors else None


def _tensor(name: str, value: Any) -> Tensor | None:
    if isinstance(value, _BUFFERS):
        return _of_bytes(name, (1,), [bytes(value)])
    if isinstance(value, list | tuple):
        is_bytes = bool(value) and all(isinstance(element, bytes) for element in value)
        return _of_bytes(name, (len(value),), value) if is_bytes else None
    is_bf16 = False
    if _is_of(value, "torch") and hasattr(value, "detach"):
        torch = sys.modules["torch"]
        value = value.detach().cpu().contiguous()
        is_bf16 = value.dtype == torch.bfloat16
        value = (value.view(torch.int16) if is_bf16 else value).numpy()
    return _of_array(name, value, is_bf16=is_bf16) if _is_of(value, "numpy") else None


def _of_array(name: str, value: Any, *, is_bf16: bool) -> Tensor | None:
    array = sys.modules["numpy"].asarray(value)
    if array.dtype.name == "bfloat16":  # of the package ml_dtypes
        array, is_bf16 = array.view("<u2"), True
    if array.dtype.kind in "OSU":
        elements = array.reshape(-1).tolist()
        if not elements or not all(isinstance(element, str | bytes) for element in elements):
            return None
        return _of_bytes(name, array.shape, elements)
    datatype = "BF16" if is_bf16 else _DATATYPES.get((array.dtype.kind, array.dtype.itemsize))
    if datatype is None:
        return None
    data: Buffer = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return Tensor(name, datatype, array.shape, data)


def _of_bytes(name: str, shape: tuple[int, ...], elements: Any) -> Tensor:
    try:
        return Tensor(name, "BYTES", shape, encode("BYTES", elements))
    except InvalidTensor as e:
        raise ResultNotSerializable(f"the result {name!r} cannot be serialized: {e}") from e


def _is_of(value: Any, package: str) -> bool:
    kind = type(value)
    return kind.__module__.partition(".")[0] == package and hasattr(value, "dtype")
