"""Tensors as bytes: there and back nothing is lost, and what is not whole is refused with the
reason."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.core.binary_tensors import (
    ELEMENT_BYTES,
    InvalidTensor,
    Tensor,
    decode,
    encode,
    pack,
    unpack,
    values_of,
)


@pytest.mark.parametrize("datatype", sorted(ELEMENT_BYTES))
def test_elements_of_each_datatype_are_as_numpy_has_them(datatype: str) -> None:
    numbers = [0, 1, 1, 0]
    dtype = {"BOOL": "?", "BF16": "f4"}.get(datatype, datatype.lower().replace("fp", "float"))
    expected = np.array(numbers, dtype).tobytes()
    if datatype == "BF16":
        expected = b"".join(expected[at + 2 : at + 4] for at in range(0, 16, 4))
    data = encode(datatype, numbers)
    assert (data, decode(datatype, data, 4)) == (expected, numbers)


@given(st.lists(st.binary(max_size=20)))
def test_bytes_are_preceded_by_their_length(elements: list[bytes]) -> None:
    data = encode("BYTES", elements)
    assert len(data) == sum(4 + len(element) for element in elements)
    assert decode("BYTES", data, len(elements)) == elements


@pytest.mark.parametrize(
    "datatype,data,count,told",
    [
        ("FP32", b"1234567", 2, "takes 8 bytes: the data has 7"),
        ("INT64", b"", 10**30, "takes more than 10^12 bytes"),
        ("BYTES", b"\x05\0\0\0abc", 1, "ends at byte 9: the data has 7"),
        ("BYTES", b"\xff\xff\xff\xffabc", 1, "ends at byte 4294967299"),
        ("BYTES", b"\0\0\0", 1, "at least 4 bytes"),
        ("BYTES", b"\0\0\0\0x", 1, "1 bytes follow the 1 elements"),
        ("BYTES", b"\x04\0\0\0\0\0\0\0", 2, "ends at byte 12"),
    ],
)
def test_data_that_is_not_what_the_shape_says_is_refused(
    datatype: str, data: bytes, count: int, told: str
) -> None:
    with pytest.raises(InvalidTensor) as refused:
        decode(datatype, data, count)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    "datatype,element", [("INT8", 128), ("UINT8", -1), ("FP16", 1e6), ("INT64", "a"), ("BYTES", 1)]
)
def test_an_element_of_another_type_is_refused(datatype: str, element: object) -> None:
    with pytest.raises(InvalidTensor):
        encode(datatype, [element])


def test_a_body_has_values_and_tensors() -> None:
    tensors = [Tensor("a", "FP32", (2, 1), b"12345678"), Tensor("b", "BYTES", (0,), b"")]
    body = pack(b'{"a": null, "n": 1}', tensors)
    values, found = unpack(bytearray(body))
    assert (values, values_of(body)) == (b'{"a": null, "n": 1}',) * 2
    assert [(t.name, t.datatype, t.shape, bytes(t.data)) for t in found] == [
        ("a", "FP32", (2, 1), b"12345678"),
        ("b", "BYTES", (0,), b""),
    ]
    assert (len(body) - 8) % 16 == 0, "arrays are aligned"


@given(st.binary(max_size=64))
def test_a_body_of_any_bytes_is_refused_or_read(data: bytes) -> None:
    for body in (data, struct.pack("<I", 2) + b"{}" + data):
        try:
            unpack(body)
        except InvalidTensor:
            pass


@pytest.mark.parametrize(
    "listed",
    [
        b"x",
        b'[["a", "FP32", [2], 4]]',
        b'[["a", "FP32", [1], 5]]',
        b'[["a", "FP99", [1], 4]]',
        b'[["a", "FP32", [-1], 4]]',
        b'[["a", "FP32", [1], -4]]',
        b"[" * 100_000,
        b"[]",
    ],
)
def test_a_list_of_tensors_that_is_not_of_the_data_is_refused(listed: bytes) -> None:
    head = struct.pack("<I", 2) + b"{}" + struct.pack("<I", len(listed)) + listed
    with pytest.raises(InvalidTensor):
        unpack(head + b"1234")
