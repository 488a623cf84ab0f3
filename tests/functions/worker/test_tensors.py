"""Arrays and bytes of calls that are no JSON: to arguments, and from results."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pilotlight.core.binary_tensors import Tensor, encode, pack, unpack
from pilotlight.errors import InvalidInput
from pilotlight.protocol import CONTENT_NPY, CONTENT_TENSORS
from pilotlight.sdk.schema import arguments_schema
from pilotlight.worker.user_code.arguments import Binder
from pilotlight.worker.user_code.tensors import answer

TENSORS = CONTENT_TENSORS.encode()


def f(
    a: np.ndarray,
    b: npt.NDArray[np.float32] | None = None,
    c: bytes = b"",
    d: bytearray = bytearray(),  # noqa: B008 - a default that is only read
    n: int = 1,
) -> None:
    """A function that takes some of each kind."""


def bound(values: bytes, *tensors: Tensor) -> dict[str, Any]:
    _, kwargs = Binder(f).from_tensors(bytearray(pack(values, tensors)))
    return kwargs


def test_tensors_become_arrays_of_their_type_in_the_memory_of_the_body() -> None:
    data = np.arange(6, dtype="i2").tobytes()
    kwargs = bound(
        b'{"a": null, "b": null, "n": 2}',
        Tensor("a", "INT16", (2, 3), data),
        Tensor("b", "FP64", (2,), np.array([0.5, 1]).tobytes()),
    )
    assert (kwargs["a"].dtype, kwargs["a"].tolist()) == (np.int16, [[0, 1, 2], [3, 4, 5]])
    kwargs["a"] += 1  # it may be written to
    assert not kwargs["a"].flags.owndata
    assert (kwargs["b"].dtype, kwargs["b"].tolist(), kwargs["n"]) == (np.float32, [0.5, 1], 2)


@pytest.mark.parametrize(
    "datatype,elements,dtype",
    [
        ("BF16", [0.5, -2.0], "float32"),
        ("FP16", [0.5, -2.0], "float16"),
        ("BOOL", [True, False], "bool"),
        ("UINT64", [0, 2**64 - 1], "uint64"),
        ("BYTES", [b"a", b"\xff"], "object"),
    ],
)
def test_each_datatype_has_its_type(datatype: str, elements: list[Any], dtype: str) -> None:
    for count in (2, 0):
        data = encode(datatype, elements[:count])
        array = bound(b'{"a": null}', Tensor("a", datatype, (count,), data))["a"]
        assert (array.shape, array.tolist()) == ((count,), elements[:count])
        assert array.dtype == dtype or not count


def test_a_tensor_that_does_not_begin_at_a_multiple_of_its_elements_is_copied() -> None:
    values = np.array([1.5], "f8").tobytes()
    kwargs = bound(
        b'{"a": null, "b": null}',
        Tensor("a", "BOOL", (1,), b"\1"),
        Tensor("b", "FP64", (1,), values),
    )
    assert kwargs["b"].flags.aligned
    assert kwargs["b"].tolist() == [1.5]


def test_bytes_are_bytes() -> None:
    given = Tensor("c", "UINT8", (2,), b"\0\xff"), Tensor("d", "UINT8", (1,), b"x")
    kwargs = bound(b'{"a": [1], "c": null, "d": null}', *given)
    assert (kwargs["c"], kwargs["d"]) == (b"\0\xff", bytearray(b"x"))
    assert type(kwargs["d"]) is bytearray


def test_json_becomes_an_array_where_one_is_annotated() -> None:
    _, kwargs = Binder(f).from_json(b'{"a": [[1, 2]], "b": [1], "d": "eA=="}')
    assert kwargs["a"].tolist() == [[1, 2]]
    assert (kwargs["b"].dtype, kwargs["d"]) == (np.float32, bytearray(b"x"))
    assert Binder(f).from_json(b'{"a": 1, "b": null}')[1]["b"] is None


@pytest.mark.parametrize("value", [b'"text"', b"{}", b"[[1], [2, 3]]", b"null"])
def test_what_is_no_array_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidInput, match="'a'"):
        Binder(f).from_json(b'{"a": %b}' % value)


def test_bytes_elements_that_are_cut_off_are_refused() -> None:
    with pytest.raises(InvalidInput, match="'a'"):
        bound(b'{"a": null}', Tensor("a", "BYTES", (1,), b"\x09\0\0\0abc"))


def test_the_schema_says_which_parameters_take_arrays() -> None:
    schema, _ = arguments_schema(f)
    assert schema is not None
    properties = schema["properties"]
    assert properties["a"] == {"contentMediaType": CONTENT_NPY}
    assert properties["b"]["anyOf"][0] == {"contentMediaType": f"{CONTENT_NPY};datatype=FP32"}


# -- results ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "value,datatype,shape,data",
    [
        (np.ones((2, 1), "f4"), "FP32", (2, 1), np.ones(2, "f4").tobytes()),
        (np.float64(2), "FP64", (), np.float64(2).tobytes()),
        (np.ones(2, ">i4"), "INT32", (2,), np.ones(2, "<i4").tobytes()),
        (np.ones((2, 2), order="F", dtype="u1").T[:1], "UINT8", (1, 2), b"\1\1"),
        (np.zeros((0, 3), "?"), "BOOL", (0, 3), b""),
        (np.array(["a", b"b"], object), "BYTES", (2,), encode("BYTES", ["a", b"b"])),
        (np.array(["ab"]), "BYTES", (1,), encode("BYTES", ["ab"])),
        (b"\xff", "BYTES", (1,), encode("BYTES", [b"\xff"])),
        ([b"a", b""], "BYTES", (2,), encode("BYTES", [b"a", b""])),
    ],
)
def test_a_result_is_a_tensor_of_its_type(
    value: Any, datatype: str, shape: tuple[int, ...], data: bytes
) -> None:
    for result, name in ((value, "output"), ({"x": value, "n": 1}, "x")):
        found = answer(TENSORS, result)
        assert found is not None
        assert found[0] == TENSORS
        _, (tensor,) = unpack(found[1])
        assert (tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)) == (
            name,
            datatype,
            shape,
            data,
        )


def test_a_tensor_of_torch_is_one() -> None:
    torch = pytest.importorskip("torch")
    found = answer(TENSORS, torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16))
    assert found is not None
    _, (tensor,) = unpack(found[1])
    assert (tensor.datatype, tensor.shape) == ("BF16", (1, 2))
    assert bytes(tensor.data) == encode("BF16", [0.5, 2.0])


@pytest.mark.parametrize("value", [None, 1, "a", [1.5], {"a": [1]}, [], {}, [b"a", 1]])
def test_what_is_no_tensor_is_answered_as_json(value: Any) -> None:
    assert answer(TENSORS, value) is None


def test_an_array_is_saved_and_bytes_are_sent_for_callers_that_accept_them() -> None:
    found = answer(b"application/x-npy", np.ones(3))
    assert found is not None
    assert found[0] == b"application/x-npy"
    assert np.load(io.BytesIO(found[1]), allow_pickle=False).tolist() == [1, 1, 1]
    for accept in (b"application/octet-stream", b"text/html, */*;q=0.8"):
        assert answer(accept, bytearray(b"x")) == (b"application/octet-stream", b"x")
    assert answer(b"application/json", b"x") is None
    assert answer(b"*/*", np.ones(3)) is None
