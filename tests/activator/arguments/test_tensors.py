"""Tensors become values and values tensors, and what is no tensor is refused with the reason."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.arguments import tensors
from pilotlight.errors import InvalidInput


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [2, 2], "datatype": "INT64", "data": [1, 2, 3, 4], **changes}


@pytest.mark.parametrize(
    "given,value",
    [
        (tensor(), [[1, 2], [3, 4]]),
        (tensor(data=[[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (tensor(shape=[4]), [1, 2, 3, 4]),
        (tensor(shape=[1], datatype="BYTES", data=["a"]), ["a"]),
        (tensor(shape=[], datatype="FP32", data=[0.5]), 0.5),
        (tensor(shape=[2], datatype="BOOL", data=[True, 0]), [True, 0]),
        (tensor(shape=[0], data=[]), []),
        (tensor(shape=[0, 3], data=[]), []),
        (tensor(shape=[2, 1, 2], datatype="FP64", data=[1, 2.5, 3, 4]), [[[1, 2.5]], [[3, 4]]]),
    ],
)
def test_an_input_is_nested_as_its_shape_says(given: dict[str, Any], value: Any) -> None:
    assert tensors.value_of(given) == ("x", value)


@pytest.mark.parametrize(
    "wrong,told",
    [
        (tensor(shape=[3]), "shape [3] has 3 elements, data 4"),
        (tensor(shape=[-1]), "whole numbers"),
        (tensor(shape=[True]), "whole numbers"),
        (tensor(shape=None), "whole numbers"),
        (tensor(shape=[1] * 33), "at most 32"),
        (tensor(shape=[100_000, 100_000]), "at most 250000"),
        (tensor(datatype="INT128"), "must be one of BOOL, INT8"),
        (tensor(datatype="INT8", data=[1, 2, 3, 128]), "128 is not of datatype INT8"),
        (tensor(datatype="UINT8", data=[1, 2, 3, -1]), "-1 is not of datatype UINT8"),
        (tensor(data=[1, 2, 3, 4.5]), "4.5 is not of datatype INT64"),
        (tensor(data=[1, 2, 3, True]), "True is not of datatype INT64"),
        (tensor(datatype="BYTES"), "1 is not of datatype BYTES"),
        (tensor(datatype="BOOL"), "2 is not of datatype BOOL"),
        (tensor(data=None), "data must be a list"),
        (tensor(name=""), "each is an object"),
        ("x", "each is an object"),
    ],
)
def test_what_is_no_tensor_is_refused_with_the_reason(wrong: Any, told: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        tensors.value_of(wrong)
    assert told in str(refused.value)


def test_deep_nesting_is_only_more_lists() -> None:
    data: Any = [1, 2, 3, 4]
    for _ in range(100_000):
        data = [data]
    assert tensors.value_of(tensor(data=data)) == ("x", [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    "value,shape,datatype,data",
    [
        ([[1, 2], [3, 4]], [2, 2], "INT64", [1, 2, 3, 4]),
        ([0.5, 1], [2], "FP64", [0.5, 1]),
        ("a", [1], "BYTES", ["a"]),
        (True, [1], "BOOL", [True]),
        ([["a"], ["b"]], [2, 1], "BYTES", ["a", "b"]),
        ([[1], [2, 3]], [1], "BYTES", ["[[1], [2, 3]]"]),
        ([1, "a"], [1], "BYTES", ['[1, "a"]']),
        ({"a": 1}, [1], "BYTES", ['{"a": 1}']),
        (None, [1], "BYTES", ["null"]),
        ([], [1], "BYTES", ["[]"]),
        (1 << 70, [1], "BYTES", [str(1 << 70)]),
    ],
)
def test_a_value_is_a_tensor_or_travels_as_json(
    value: Any, shape: list[int], datatype: str, data: list[Any]
) -> None:
    made = tensors.tensor_of("y", value)
    assert (made["shape"], made["datatype"], made["data"]) == (shape, datatype, data)
    assert ("parameters" in made) == (
        datatype == "BYTES" and not isinstance(value, str) and data[0] != "a"
    )


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.lists(
                st.floats(allow_nan=False), min_size=math.prod(shape), max_size=math.prod(shape)
            ),
        )
    )
)
def test_there_and_back_nothing_is_lost(made: tuple[list[int], list[float]]) -> None:
    shape, elements = made
    _, value = tensors.value_of(tensor(shape=shape, datatype="FP64", data=elements))
    back = tensors.tensor_of("x", value)
    assert (back["shape"], back["data"]) == (shape, elements)


def test_a_schema_says_what_its_tensor_looks_like() -> None:
    matrix = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
    assert tensors.tensor_metadata("x", matrix) == {
        "name": "x",
        "datatype": "FP64",
        "shape": [-1, -1],
    }
    assert tensors.tensor_metadata("x", {"type": "boolean"}) == {
        "name": "x",
        "datatype": "BOOL",
        "shape": [1],
    }
    assert tensors.tensor_metadata("x", {}) == {"name": "x", "datatype": "BYTES", "shape": [1]}
    assert tensors.is_scalar({"anyOf": [{"type": "string"}, {"type": "null"}]})
    assert not tensors.is_scalar(matrix)
    assert not tensors.is_scalar(None)
