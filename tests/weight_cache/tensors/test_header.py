"""What a safetensors header may say, and what is refused: it is read before anybody trusts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hypothesis_profiles import examples
from weight_cache.errors import TensorsInvalid
from weight_cache.tensors.header import (
    BITS_OF,
    MAX_HEADER_BYTES,
    Header,
    header_bytes,
    parse_header,
    read_tensors,
)
from weight_cache.types import Tensor


def framed(header: bytes, *, data_bytes: int = 0) -> bytes:
    """A file with that header."""
    return len(header).to_bytes(8, "little") + header + bytes(data_bytes)


def row(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    """One tensor, as the header describes it."""
    shape = list(shape) if isinstance(shape, tuple) else shape
    return {
        "dtype": dtype,
        "shape": shape,
        "data_offsets": list(offsets) if isinstance(offsets, tuple) else offsets,
    }


def parsed(header: Any, *, data_bytes: int = 8) -> tuple[Tensor, ...]:
    """What is read out of a file with that header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = framed(raw, data_bytes=data_bytes)
    return parse_header(file, file_bytes=len(file))


def test_tensors_come_in_the_order_of_their_bytes_with_offsets_from_the_begin_of_the_file() -> None:
    header = {
        "b": row("BF16", (2, 2), (8, 16)),
        "__metadata__": {"format": "pt"},
        "a": row("F32", (2,), (0, 8)),
        "scalar": row("U8", (), (16, 17)),
    }
    base = 8 + len(json.dumps(header).encode())

    tensors = parsed(header, data_bytes=17)

    assert tensors == (
        Tensor(name="a", dtype="F32", shape=(2,), offset_bytes=base, length_bytes=8),
        Tensor(name="b", dtype="BF16", shape=(2, 2), offset_bytes=base + 8, length_bytes=8),
        Tensor(name="scalar", dtype="U8", shape=(), offset_bytes=base + 16, length_bytes=1),
    )


def test_empty_tensors_and_padding_are_fine() -> None:
    assert [
        t.length_bytes for t in parsed({"none": row(shape=(0, 7), offsets=(0, 0)), "a": row()})
    ] == [0, 8]
    assert [t.name for t in parsed(json.dumps({"a": row()}).encode() + b"      ")] == ["a"]
    assert parsed({}, data_bytes=0) == ()


def test_what_the_format_itself_wrote_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    state = {
        "weight": torch.arange(6.0).reshape(2, 3),
        "mask": torch.ones(5, dtype=torch.bool),
        "none": torch.empty(0, 4),
    }
    save_file(state, tmp_path / "m.safetensors", metadata={"format": "pt"})

    tensors = {t.name: t for t in read_tensors(tmp_path / "m.safetensors")}

    assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == {
        "weight": ("F32", (2, 3)),
        "mask": ("BOOL", (5,)),
        "none": ("F32", (0, 4)),
    }
    whole = (tmp_path / "m.safetensors").read_bytes()
    at = tensors["weight"].offset_bytes
    assert whole[at : at + 24] == state["weight"].numpy().tobytes()


@pytest.mark.parametrize(
    "header, data_bytes, why",
    [
        pytest.param(b"", 0, "does not begin", id="no header at all"),
        pytest.param(b"[]", 0, "does not begin", id="a list"),
        pytest.param(b' {"a": 1}', 0, "does not begin", id="space before"),
        pytest.param(b'{"a": ', 0, "not JSON", id="cut off"),
        pytest.param(b"{}{}", 0, "not JSON", id="two objects"),
        pytest.param(b'{"\xff": 1}', 0, "not JSON", id="not UTF-8"),
        pytest.param(b'{"a":' + b"[" * 200_000, 0, "not JSON", id="deeply nested"),
        pytest.param(b'{"a":' + b'{"a":' * 100_000, 0, "not JSON", id="deeply nested objects"),
        pytest.param(
            b'{"a":[' + b"[]," * 4_100_000 + b"[]]}", 0, "more values", id="a bomb of lists"
        ),
        pytest.param(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,' + b"9" * 9000 + b"]}}",
            8,
            "not JSON",
            id="thousands of digits",
        ),
        pytest.param(
            b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', 8, "NaN", id="not a number"
        ),
        pytest.param(
            b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
            1,
            "twice",
            id="name twice",
        ),
        pytest.param(
            b'{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}',
            1,
            "twice",
            id="key twice",
        ),
        pytest.param(
            b'{"\\ud800":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
            1,
            "UTF-8",
            id="half a surrogate pair",
        ),
        pytest.param({"a": 1}, 8, "expected dtype", id="no object"),
        pytest.param({"a": {"dtype": "F32", "shape": [2]}}, 8, "expected dtype", id="no offsets"),
        pytest.param(
            {"a": row() | {"more": 1}}, 8, "expected dtype", id="more than there should be"
        ),
        pytest.param({"a": row("F33")}, 8, "dtype 'F33'", id="unknown dtype"),
        pytest.param({"a": row(["F32"])}, 8, "dtype", id="dtype that cannot be hashed"),
        pytest.param({"a": row(shape=2)}, 8, "a shape is", id="shape no list"),
        pytest.param({"a": row(shape=(-2,))}, 8, "a shape is", id="negative shape"),
        pytest.param({"a": row(shape=(2.0,))}, 8, "a shape is", id="fraction as shape"),
        pytest.param({"a": row("U8", (True,), (0, 1))}, 1, "a shape is", id="truth as shape"),
        pytest.param({"a": row(shape=(2**64,))}, 8, "a shape is", id="shape beyond 64 bits"),
        pytest.param({"a": row(shape=(1,) * 65)}, 8, "a shape is", id="too many dimensions"),
        pytest.param(
            {"a": row(shape=(2**40, 2**40, 0), offsets=(0, 0))},
            0,
            "more than",
            id="overflow hidden behind a zero",
        ),
        pytest.param(
            {"a": row(shape=(2**62 + 2,))},
            8,
            "takes",
            id="overflow that would wrap to the right length",
        ),
        pytest.param({"a": row(offsets=(8, 0))}, 8, "data_offsets are", id="backwards"),
        pytest.param({"a": row(offsets=(-8, 0))}, 8, "data_offsets are", id="before the data"),
        pytest.param({"a": row(offsets=(0, 8, 16))}, 8, "data_offsets are", id="three offsets"),
        pytest.param({"a": row(offsets=(0, True))}, 8, "data_offsets are", id="truth as offset"),
        pytest.param({"a": row(offsets=(0, 4))}, 4, "takes 8 bytes", id="shorter than its shape"),
        pytest.param({"a": row(shape=(1,))}, 8, "takes 4 bytes", id="longer than its shape"),
        pytest.param({"a": row("F4", (3,), (0, 1))}, 1, "takes 1.5 bytes", id="half a byte"),
        pytest.param(
            {"a": row(offsets=(0, 8)), "b": row(offsets=(4, 12))}, 12, "overlaps", id="overlap"
        ),
        pytest.param(
            {"a": row(offsets=(0, 8)), "b": row(offsets=(0, 8))},
            8,
            "overlaps",
            id="the same bytes twice",
        ),
        pytest.param(
            {"a": row(offsets=(0, 8)), "b": row(offsets=(16, 24))}, 24, "leaves a gap", id="gap"
        ),
        pytest.param({"a": row(offsets=(8, 16))}, 16, "leaves a gap", id="gap before the first"),
        pytest.param({"a": row()}, 7, "cut off", id="beyond the end of the file"),
        pytest.param({"a": row()}, 9, "belongs to no tensor", id="a tail that nobody owns"),
        pytest.param({"__metadata__": []}, 0, "__metadata__", id="metadata no object"),
        pytest.param({"__metadata__": {"a": 1}}, 0, "__metadata__", id="metadata of numbers"),
    ],
)
def test_a_header_that_lies_is_refused(header: Any, data_bytes: int, why: str) -> None:
    with pytest.raises(TensorsInvalid, match=why):
        parsed(header, data_bytes=data_bytes)


@pytest.mark.parametrize(
    "head, file_bytes, why",
    [
        pytest.param(b"", 0, "not a safetensors file", id="empty file"),
        pytest.param(b"\x02\0\0", 3, "not a safetensors file", id="three bytes"),
        pytest.param(
            (2**64 - 1).to_bytes(8, "little"), 2**65, "at most", id="the longest length there is"
        ),
        pytest.param(
            (MAX_HEADER_BYTES + 1).to_bytes(8, "little"),
            10**10,
            "at most",
            id="just over the bound",
        ),
        pytest.param((100).to_bytes(8, "little"), 50, "cut off", id="longer than the file"),
    ],
)
def test_a_length_that_lies_is_refused_before_anything_is_read(
    head: bytes, file_bytes: int, why: str
) -> None:
    with pytest.raises(TensorsInvalid, match=why):
        header_bytes(head, file_bytes=file_bytes)


def test_a_head_that_is_too_short_says_what_is_missing() -> None:
    file = framed(json.dumps({"a": row()}).encode(), data_bytes=8)
    assert header_bytes(file[:8], file_bytes=len(file)) == len(file) - 8
    with pytest.raises(TensorsInvalid, match="only 20 were given"):
        parse_header(file[:20], file_bytes=len(file))


def test_a_refused_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(framed(b"[]"))
    with pytest.raises(TensorsInvalid, match=r"bad\.safetensors: the header"):
        read_tensors(file)


def test_a_message_stays_short_however_long_the_name_is() -> None:
    with pytest.raises(TensorsInvalid) as caught:
        parsed({"n" * 1_000_000: row("no such dtype" * 100_000)})
    assert len(str(caught.value)) < 1000


def test_one_tensor_is_found_without_reading_the_others_and_is_checked_all_the_same() -> None:
    rows = {
        "a": row(),
        "b": row("BF16", (2, 2), (8, 16)),
        "far": row("U8", (9,), (16, 25)),
        "bad": row("F33"),
    }
    raw = json.dumps(rows, separators=(",", ":")).encode()
    file = framed(raw, data_bytes=16)
    header = Header(file, file_bytes=len(file))
    assert header["b"] == Tensor(
        name="b", dtype="BF16", shape=(2, 2), offset_bytes=8 + len(raw) + 8, length_bytes=8
    )
    assert ("a" in header, "c" in header, "__metadata__" in header, 7 in header) == (
        True,
        False,
        False,
        False,
    )
    with pytest.raises(TensorsInvalid, match="'far' ends at byte"):
        header["far"]
    with pytest.raises(TensorsInvalid, match="dtype 'F33'"):
        header["bad"]
    with pytest.raises(KeyError):
        header["c"]
    with pytest.raises(TensorsInvalid, match="dtype 'F33'"):
        header.tensors()


def test_a_row_that_is_a_bomb_is_refused_when_it_is_asked_for() -> None:
    raw = b'{"a":{"shape":' + b"[" * 200_000 + b"}"
    file = framed(raw)
    with pytest.raises(TensorsInvalid, match="not JSON"):
        Header(file, file_bytes=len(file))["a"]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("name", ["plain", 'a"b', "a\\", "ü", "\n", "", 'x,"plain', "tensor}"])
def test_names_of_any_kind_are_found_and_none_is_taken_for_another(
    name: str, separators: tuple[str, str]
) -> None:
    rows = {
        "__metadata__": {"plain": '"plain":{', "b": "{"},
        'z"plain': row("U8", (3,), (0, 3)),
        name: row("U8", (5,), (3, 8)),
    }
    raw = json.dumps(rows, separators=separators).encode()
    file = framed(raw, data_bytes=8)
    assert Header(file, file_bytes=len(file))[name].shape == (5,)


_SHAPES = st.lists(st.integers(0, 5), max_size=4)
_TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda n: n != "__metadata__"),
    st.tuples(st.sampled_from([name for name, bits in BITS_OF.items() if bits >= 8]), _SHAPES),
    max_size=8,
)


@given(tensors=_TENSORS)
def test_whatever_is_laid_side_by_side_is_read_back(
    tensors: dict[str, tuple[str, list[int]]],
) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        length = BITS_OF[dtype] // 8
        for n in shape:
            length *= n
        header[name] = row(dtype, shape, (end, end + length))
        end += length
    file = framed(
        json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode(), data_bytes=end
    )
    alone = Header(file, file_bytes=len(file))
    assert [alone[t.name] for t in alone.tensors()] == list(
        Header(file, file_bytes=len(file)).tensors()
    )
    assert all(Header(file, file_bytes=len(file))[t.name] == t for t in alone.tensors())
    read = {
        t.name: (t.dtype, list(t.shape), t.length_bytes) for t in parsed(header, data_bytes=end)
    }
    assert read == {
        name: (r["dtype"], r["shape"], r["data_offsets"][1] - r["data_offsets"][0])
        for name, r in header.items()
    }


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(sorted(BITS_OF)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(max_examples=examples(300))
@given(
    header=st.dictionaries(st.text(max_size=4), _JSON, max_size=3) | st.binary(max_size=64),
    data_bytes=st.integers(0, 64),
)
def test_nothing_but_a_refusal_comes_out_of_nonsense(header: Any, data_bytes: int) -> None:
    try:
        tensors = parsed(header, data_bytes=data_bytes)
    except TensorsInvalid:
        return
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    assert sum(t.length_bytes for t in tensors) == data_bytes
    assert all(
        8 + len(raw)
        <= t.offset_bytes
        <= t.offset_bytes + t.length_bytes
        <= 8 + len(raw) + data_bytes
        for t in tensors
    )


@settings(max_examples=examples(300))
@given(position=st.integers(0, 200), value=st.integers(0, 255))
def test_a_flipped_byte_never_lets_a_tensor_leave_its_file(position: int, value: int) -> None:
    file = bytearray(
        framed(json.dumps({"a": row(), "b": row("BF16", (3, 4), (8, 32))}).encode(), data_bytes=32)
    )
    file[position % (len(file) - 32)] = value
    try:
        tensors = parse_header(bytes(file), file_bytes=len(file))
    except TensorsInvalid:
        return
    assert all(0 < t.offset_bytes <= t.offset_bytes + t.length_bytes <= len(file) for t in tensors)
