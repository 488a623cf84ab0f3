"""Signatures become JSON Schemas that accept what fits and refuse what does not."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NewType, NotRequired, Optional, TypedDict, TypeVar

import jsonschema_rs
import pydantic
import pytest

from pilotlight.sdk.schema import MAX_RETURNS_BYTES, arguments_schema, returns_schema


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Node:
    name: str
    children: list[Node] = field(default_factory=list)


class Options(TypedDict):
    top_k: int
    seed: NotRequired[int]


class Inner(pydantic.BaseModel):
    size: int


class Request(pydantic.BaseModel):
    text: str
    inner: Inner | None = None


UserId = NewType("UserId", int)
T = TypeVar("T")


def takes(hint: Any, default: Any = ...) -> Callable[..., Any]:
    """A function with one parameter `x` of that hint."""

    def function(x: Any) -> None: ...

    def with_default(x: Any = default) -> None: ...

    chosen = function if default is ... else with_default
    chosen.__annotations__ = {"x": hint}
    return chosen


def accepts(function: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    schema, _ = arguments_schema(function)
    assert schema is not None
    return bool(jsonschema_rs.validator_for(schema).is_valid(arguments))


@pytest.mark.parametrize(
    "hint, good, bad",
    [
        (int, 3, "3"),
        (float, 3, "3"),
        (str, "a", 3),
        (bool, True, 1),
        (bytes, "aGk=", 3),
        (None, None, 0),
        (Optional[int], None, "a"),  # noqa: UP045 - the old spelling is what many users write
        (int | str, "a", 1.5),
        (list[int], [1], ["a"]),
        (Sequence[str], ["a"], "a"),
        (tuple[int, str], [1, "a"], [1]),
        (tuple[int, ...], [1, 2, 3], ["a"]),
        (set[int], [1, 2], [1, 1]),
        (dict[str, int], {"a": 1}, {"a": "b"}),
        (Literal["a", 2], 2, "b"),
        (Colour, "red", "green"),
        (Node, {"name": "a", "children": [{"name": "b"}]}, {"name": "a", "children": [{}]}),
        (Options, {"top_k": 1}, {"seed": 1}),
        (Request, {"text": "a", "inner": {"size": 1}}, {"text": "a", "inner": {"size": "x"}}),
        (list[Request], [{"text": "a"}], [{}]),
        (UserId, 3, "a"),
        (Annotated[int, pydantic.Field(ge=1, le=5)], 5, 6),
        (Annotated[str, pydantic.Field(min_length=2)], "ab", "a"),
        (Annotated[list[int], pydantic.Field(max_length=1)], [1], [1, 2]),
    ],
)
def test_a_hint_accepts_what_fits_and_refuses_what_does_not(hint: Any, good: Any, bad: Any) -> None:
    assert accepts(takes(hint), {"x": good})
    assert not accepts(takes(hint), {"x": bad})


@pytest.mark.parametrize("hint", [Any, T, object, "Invisible", Callable[[int], int], int | Any])
def test_a_hint_that_json_cannot_express_accepts_anything(hint: Any) -> None:
    anything: list[dict[str, Any]] = [{"x": 1}, {"x": "a"}, {"x": None}, {"x": []}, {"x": {}}]

    assert all(accepts(takes(hint), arguments) for arguments in anything)


def test_missing_and_unknown_names_are_refused() -> None:
    def function(a: int, b: str = "x", *, c: float) -> None: ...

    assert accepts(function, {"a": 1, "c": 2})
    assert not accepts(function, {"a": 1})
    assert not accepts(function, {"a": 1, "c": 2, "d": 3})
    schema, names = arguments_schema(function)
    assert schema is not None
    assert names == ("a", "b")
    assert schema["properties"]["b"]["default"] == "x"


def test_keyword_arguments_open_the_object_and_positional_ones_end_the_schema() -> None:
    def keywords(a: int, **rest: int) -> None: ...

    def positional(*values: int) -> None: ...

    assert accepts(keywords, {"a": 1, "z": 2})
    assert not accepts(keywords, {"a": 1, "z": "y"})
    assert arguments_schema(positional) == (None, ())


def test_a_default_of_none_allows_null() -> None:
    assert accepts(takes(int, default=None), {"x": None})


def test_a_method_leaves_its_self_out() -> None:
    class Model:
        def run(self, text: str) -> None: ...

    schema, names = arguments_schema(Model.run, is_method=True)
    assert schema is not None
    assert names == ("text",)
    assert list(schema["properties"]) == ["text"]


def test_two_models_of_one_name_keep_apart() -> None:
    first = pydantic.create_model("Item", a=(int, ...))
    second = pydantic.create_model("Item", b=(str, ...))

    def function(x: Any, y: Any) -> None: ...

    function.__annotations__ = {"x": first, "y": second}
    assert accepts(function, {"x": {"a": 1}, "y": {"b": "s"}})
    assert not accepts(function, {"x": {"b": "s"}, "y": {"b": "s"}})


# -- answers ---------------------------------------------------------------------------------------


def gives(hint: Any) -> Callable[..., Any]:
    """A function with that hint for its answer."""

    def function() -> Any: ...

    function.__annotations__ = {"return": hint}
    return function


class Scored(pydantic.BaseModel):
    score: float
    label: str = "none"

    @pydantic.computed_field
    def is_sure(self) -> bool:
        return self.score > 0.9


class Opaque(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    tensor: memoryview


@pytest.mark.parametrize(
    "hint,fits,misses",
    [
        (int, [1], ["1", None]),
        (None, [None], [1]),
        (list[float], [[], [0.5, 1]], [["x"], 1]),
        (int | None, [1, None], ["x"]),
        (Node, [{"name": "a", "children": []}], [{"name": "a"}, {"children": []}]),
        (Options, [{"top_k": 1}, {"top_k": 1, "seed": 2}], [{"seed": 2}]),
        (
            Scored,
            [{"score": 1.0, "label": "x", "is_sure": True}],
            [{"score": 1.0, "label": "x"}, {"score": 1.0, "is_sure": True}],
        ),
        (dict[str, list[Colour]], [{"a": ["red"]}], [{"a": ["green"]}]),
    ],
)
def test_the_hint_of_an_answer_says_what_is_written(
    hint: Any, fits: list[Any], misses: list[Any]
) -> None:
    schema = returns_schema(gives(hint))
    assert schema is not None
    validator = jsonschema_rs.validator_for(schema)
    assert [validator.is_valid(value) for value in (*fits, *misses)] == [True] * len(fits) + [
        False
    ] * len(misses)


def test_of_a_stream_it_is_an_item() -> None:
    for hint in (Iterator[int], AsyncIterator[int]):
        assert returns_schema(gives(hint), is_generator=True) == {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "integer",
        }
    assert returns_schema(gives(Iterator), is_generator=True) is None
    assert returns_schema(gives(list[int]), is_generator=True) is None


def test_an_answer_that_is_not_described_may_be_anything() -> None:
    assert [returns_schema(gives(hint)) for hint in (Any, object, memoryview, "Missing")] == [
        None
    ] * 4
    assert returns_schema(lambda: 1) is None


def test_a_model_with_what_json_does_not_have_may_be_anything_inside() -> None:
    schema = returns_schema(gives(Opaque))
    assert schema is not None
    assert jsonschema_rs.validator_for(schema).is_valid({"whatever": 1})
    assert arguments_schema(takes(Opaque))[0] is not None


def test_an_answer_that_takes_a_book_to_describe_is_not_described() -> None:
    words = tuple(f"word-{n:06}" for n in range(MAX_RETURNS_BYTES // 10))
    assert returns_schema(gives(Literal[words])) is None
