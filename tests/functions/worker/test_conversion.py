"""JSON values become what parameters are annotated with."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import pathlib
import uuid
from typing import Annotated, Any, Literal, NewType, NotRequired, TypedDict

import pydantic
import pytest

from pilotlight.errors import InvalidInput
from pilotlight.worker.user_code.argument_decoding import ArgumentMismatch, converter
from pilotlight.worker.user_code.arguments import Binder


class Colour(enum.Enum):
    """By value."""

    RED = "red"


@dataclasses.dataclass
class Point:
    """With a default."""

    x: int
    y: int = 0


@dataclasses.dataclass
class Tree:
    """Contains itself, bytes, and what it makes of them."""

    data: bytes
    children: list[Tree] = dataclasses.field(default_factory=list)
    size: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        if len(self.data) > 3:
            raise ValueError("at most 3 bytes")


class Options(TypedDict):
    """Keys that may be missing."""

    when: NotRequired[dt.date]
    name: str


class Item(pydantic.BaseModel):
    """A model of pydantic's."""

    name: str


@dataclasses.dataclass
class Basket:
    """A model inside a dataclass."""

    items: list[Item]


Blob = NewType("Blob", bytes)


@pytest.mark.parametrize(
    "hint, value, expected",
    [
        (bytes, "AP8Q", b"\x00\xff\x10"),
        (bytes, "", b""),
        (Blob, "AA==", b"\x00"),
        (Annotated[bytes, "an image"], "AA==", b"\x00"),
        (bytes | None, None, None),
        (bytes | None, "AA==", b"\x00"),
        (list[bytes], ["AA==", "AQ=="], [b"\x00", b"\x01"]),
        (dict[str, bytes], {"a": "AA=="}, {"a": b"\x00"}),
        (tuple[int, bytes], [1, "AA=="], (1, b"\x00")),
        (tuple[int, ...], [1, 2], (1, 2)),
        (set[int], [1, 1], {1}),
        (frozenset[str], ["a"], frozenset({"a"})),
        (Point, {"x": 1}, Point(1)),
        (Point, Point(4), Point(4)),
        (list[Point], [{"x": 1, "y": 2}], [Point(1, 2)]),
        (str | Point, "origin", "origin"),
        (str | Point, {"x": 1}, Point(1)),
        (Point | int, 7, 7),
        (Tree, {"data": "AA==", "children": [{"data": "AQ=="}]}, Tree(b"\x00", [Tree(b"\x01")])),
        (
            Options,
            {"name": "n", "when": "2026-11-21"},
            {"name": "n", "when": dt.date(2026, 11, 21)},
        ),
        (Basket, {"items": [{"name": "x"}]}, Basket([Item(name="x")])),
        (Colour, "red", Colour.RED),
        (dt.datetime, "2026-11-21T02:00:00Z", dt.datetime(2026, 11, 21, 2, tzinfo=dt.UTC)),
        (
            uuid.UUID,
            "12345678123456781234567812345678",
            uuid.UUID("12345678123456781234567812345678"),
        ),
        (pathlib.Path, "a/b", pathlib.Path("a/b")),
        (decimal.Decimal, 1.5, decimal.Decimal("1.5")),
        (decimal.Decimal, "0.10", decimal.Decimal("0.10")),
    ],
)
def test_a_value_becomes_one_of_its_hint(hint: Any, value: object, expected: object) -> None:
    convert = converter(hint)
    assert convert is not None
    converted = convert(value)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    "hint",
    [
        int,
        str,
        float,
        bool,
        None,
        list,
        list[int],
        dict[str, Any],
        int | str,
        Any,
        Literal["a"],
        "Unknown",
        7,
        [],
    ],
)
def test_what_json_carries_as_it_is_costs_nothing(hint: Any) -> None:
    assert converter(hint) is None


@pytest.mark.parametrize(
    "hint, value, path, message",
    [
        (bytes, "not base64!", (), "is not base64"),
        (bytes, 7, (), "is not base64"),
        (list[bytes], ["AA==", "?"], ("1",), "is not base64"),
        (Point, {"x": 1, "z": 2}, ("z",), "has no field 'z'"),
        (Point, {"y": 1}, (), "'x'"),
        (Point, "origin", (), "is not an object"),
        (
            Tree,
            {"data": "AA==", "children": [{"data": "AAAAAAAA"}]},
            ("children", "0"),
            "at most 3 bytes",
        ),
        (tuple[int, bytes], [1], (), "has 1 items, expected 2"),
        (Point | None, {"z": 1}, ("z",), "no field"),
        (dt.date, "tomorrow", (), "is not a date"),
        (Colour, "blue", (), "is not a Colour"),
        (Basket, {"items": [{}]}, ("items", "0", "name"), "required"),
    ],
)
def test_a_value_that_is_none_of_its_hint_says_where_and_why(
    hint: Any, value: object, path: tuple[str, ...], message: str
) -> None:
    convert = converter(hint)
    assert convert is not None
    with pytest.raises(ArgumentMismatch, match=message) as raised:
        convert(value)
    assert raised.value.path == path


def upload(data: bytes, at: Point, note: str = "", mask: bytes = None) -> None:  # type: ignore[assignment]  # noqa: RUF013  # as people write it
    """What a binder sees."""


def test_a_binder_converts_by_name_and_by_position() -> None:
    binder = Binder(upload)
    assert binder.from_json(b'{"data": "AA==", "at": {"x": 1}}') == (
        (),
        {"data": b"\x00", "at": Point(1)},
    )
    assert binder.from_json(b'["AA==", {"x": 1}]') == ((b"\x00", Point(1)), {})


def test_a_default_of_none_may_be_said() -> None:
    assert (
        Binder(upload).from_json(b'{"data": "", "at": {"x": 1}, "mask": null}')[1]["mask"] is None
    )


def test_a_binder_names_the_parameter_and_the_place_in_it() -> None:
    with pytest.raises(InvalidInput, match=r"parameter 'at.z'") as raised:
        Binder(upload).from_json(b'{"data": "", "at": {"x": 1, "z": 1}}')
    assert raised.value.detail["parameter"] == "at"


def test_pickled_arguments_are_taken_as_they_are() -> None:
    import pickle

    assert Binder(upload).from_pickle(pickle.dumps((("AA==", None), {}))) == (("AA==", None), {})
