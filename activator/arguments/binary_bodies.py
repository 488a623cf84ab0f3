"""Bodies that are the one argument of a call: bytes, or an array as `numpy.save` writes it
(`numpy.lib.format`, versions 1.0 to 3.0). Pure; the header is parsed without numpy, and nothing is
unpickled."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from activator.arguments.tensors import kind_of
from activator.arguments.translations import properties
from pilotlight import errors
from pilotlight.core.binary_tensors import (
    MAX_DIMENSIONS,
    InvalidTensor,
    Tensor,
    check_size,
    is_shape,
    pack,
)
from pilotlight.protocol import CONTENT_BYTES, CONTENT_NPY
from pilotlight.spec.function import MethodSpec

MAX_NPY_HEADER_BYTES: Final = 4096
_MAGIC: Final = b"\x93NUMPY"
_LENGTH_BYTES: Final = {1: 2, 2: 4, 3: 4}
"""Size of the header's length, by the version of the format."""
_HEADER: Final = re.compile(
    r"\{'descr': ?'([<>=|]?[?a-zA-Z]\d{0,5})', ?'fortran_order': ?(True|False), ?"
    r"'shape': ?\(([0-9, ]*)\),? ?\} *\n?"
)
_DATATYPES: Final[Mapping[str, str]] = {
    "|b1": "BOOL",
    "|i1": "INT8",
    "|u1": "UINT8",
    **{f"<i{size}": f"INT{size * 8}" for size in (2, 4, 8)},
    **{f"<u{size}": f"UINT{size * 8}" for size in (2, 4, 8)},
    **{f"<f{size}": f"FP{size * 8}" for size in (2, 4, 8)},
}
_KINDS: Final = {CONTENT_BYTES: "bytes", CONTENT_NPY: "array"}


def parameter_of(content_type: str, spec: MethodSpec) -> str:
    """Return the parameter that a body of this type (CONTENT_BYTES, CONTENT_NPY) is the argument
    for: the only one that takes such, where no other is required; "" if there is none."""
    taking = [
        name for name, schema in properties(spec).items() if kind_of(schema) == _KINDS[content_type]
    ]
    required = (spec.schema or {}).get("required", [])
    return taking[0] if len(taking) == 1 and set(required) <= set(taking) else ""


def packed(content_type: str, parameter: str, body: bytes) -> bytes:
    """Return the body for a worker (CONTENT_TENSORS). Raises InvalidInput."""
    if content_type == CONTENT_NPY:
        tensor = _array(parameter, body)
    else:
        tensor = Tensor(parameter, "UINT8", (len(body),), body)
    return pack(json.dumps({parameter: None}).encode(), [tensor])


def _array(parameter: str, body: bytes) -> Tensor:
    length_bytes = _LENGTH_BYTES.get(body[6]) if len(body) > 8 else None
    if length_bytes is None or body[:6] != _MAGIC:
        raise _invalid("it does not begin as numpy.save writes it")
    at = 8 + length_bytes
    length = int.from_bytes(body[8:at], "little")
    if length > MAX_NPY_HEADER_BYTES:
        raise _invalid(f"its header has {length} bytes, at most {MAX_NPY_HEADER_BYTES}")
    header = body[at : at + length].decode("latin-1")
    found = _HEADER.fullmatch(header)
    if found is None:
        raise _invalid(f"its header cannot be read: {header[:120]!r}")
    descr, fortran_order, sizes = found.groups()
    datatype = _DATATYPES.get(descr)
    if datatype is None:
        raise _invalid(f"its dtype is {descr!r}: must be one of {', '.join(_DATATYPES)}")
    shape = [int(size) for size in sizes.replace(" ", "").split(",") if size]
    if not is_shape(shape):
        raise _invalid(f"its shape has more than {MAX_DIMENSIONS} dimensions, or too large ones")
    if fortran_order == "True" and len(shape) > 1:
        raise _invalid("its elements are in Fortran order: save numpy.ascontiguousarray of it")
    data = memoryview(body)[at + length :]
    try:
        check_size(datatype, shape, len(data))
    except InvalidTensor as e:
        raise _invalid(str(e)) from e
    return Tensor(parameter, datatype, tuple(shape), data)


def _invalid(why: str) -> errors.InvalidInput:
    return errors.InvalidInput(f"the body is not a valid array ({CONTENT_NPY}): {why}")


def not_taken(content_type: str) -> errors.UnsupportedMediaType:
    """Return the error for a body that the function has no parameter for."""
    kind = "numpy.ndarray" if content_type == CONTENT_NPY else "bytes"
    return errors.UnsupportedMediaType(
        f"content-type {content_type}: the function must have exactly one parameter that is "
        f"annotated as {kind}, and require no other: send JSON",
        parameter="content-type",
    )
