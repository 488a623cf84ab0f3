"""Bodies that are the one argument: arrays as numpy writes them, read without numpy."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.arguments.binary_bodies import packed, parameter_of
from pilotlight.core.binary_tensors import unpack
from pilotlight.errors import InvalidInput
from pilotlight.protocol import CONTENT_BYTES, CONTENT_NPY
from pilotlight.spec.function import MethodSpec

ARRAY = {"contentMediaType": f"{CONTENT_NPY};datatype=FP32"}
BYTES = {"type": "string", "contentEncoding": "base64"}
NUMBER = {"type": "number"}


def saved(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def takes(*required: str, **properties: Any) -> MethodSpec:
    return MethodSpec(schema={"properties": properties, "required": list(required)})


@pytest.mark.parametrize(
    "spec,of_bytes,of_array",
    [
        (takes("x", x=ARRAY), "", "x"),
        (takes("x", x=BYTES, k=NUMBER), "x", ""),
        (takes("x", "k", x=BYTES, k=NUMBER), "", ""),
        (takes(x=ARRAY, y=ARRAY), "", ""),
        (takes(x={"anyOf": [ARRAY, {"type": "null"}]}), "", "x"),
        (takes(x=ARRAY, y=BYTES), "y", "x"),
        (MethodSpec(), "", ""),
    ],
)
def test_the_only_parameter_of_the_kind_takes_the_body(
    spec: MethodSpec, of_bytes: str, of_array: str
) -> None:
    assert (parameter_of(CONTENT_BYTES, spec), parameter_of(CONTENT_NPY, spec)) == (
        of_bytes,
        of_array,
    )


@pytest.mark.parametrize(
    "dtype",
    ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (1,) * 32])
def test_an_array_is_read_as_numpy_wrote_it(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    values, (tensor,) = unpack(packed(CONTENT_NPY, "x", saved(array)))
    assert (values, tensor.shape, bytes(tensor.data)) == (b'{"x": null}', shape, array.tobytes())


def test_bytes_are_passed_on_as_they_are() -> None:
    _, (tensor,) = unpack(packed(CONTENT_BYTES, "x", b"\0\xff"))
    assert (tensor.datatype, bytes(tensor.data)) == ("UINT8", b"\0\xff")


def header(text: str, data: bytes = b"1234", *, length: int | None = None) -> bytes:
    size = len(text) if length is None else length
    return b"\x93NUMPY\x02\0" + size.to_bytes(4, "little") + text.encode() + data


@pytest.mark.parametrize(
    "body,told",
    [
        (b"", "does not begin"),
        (b"\x93NUMPY\x09\0" + bytes(20), "does not begin"),
        (saved(np.array([object()], object)), "dtype is '|O'"),
        (saved(np.array(["a"])), "dtype is '<U1'"),
        (saved(np.ones(2, ">f4")), "dtype is '>f4'"),
        (saved(np.ones((2, 3), order="F")), "Fortran order"),
        (saved(np.ones(2, "f4"))[:-1], "takes 8 bytes: the data has 7"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }")[:-1], "has 3"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1," * 33 + ")}"), "shape"),
        (
            header("{'descr': '<f4', 'fortran_order': False, 'shape': (9" + "9" * 99 + ",)}"),
            "shape",
        ),
        (header("__import__('os').abort()"), "cannot be read"),
        (
            header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': ()}"),
            "cannot be read",
        ),
        (header("", length=2**32 - 1), "4294967295 bytes, at most 4096"),
        (header("(" * 4096), "cannot be read"),
    ],
)
def test_what_is_no_array_is_refused_with_the_reason(body: bytes, told: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        packed(CONTENT_NPY, "x", body)
    assert told in str(refused.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    for body in (data, b"\x93NUMPY\x01\0" + data):
        try:
            packed(CONTENT_NPY, "x", body)
        except InvalidInput:
            pass
