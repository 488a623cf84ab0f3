"""Bodies to arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pydantic
import pytest

from pilotlight.errors import InvalidInput
from pilotlight.worker.user_code.arguments import Binder


class Item(pydantic.BaseModel):
    """A model of the user's."""

    name: str
    count: int = 1


def plain(a: int, b: int = 2, *, c: int = 3) -> None:
    """Positions and names."""


def star(*values: int, **named: int) -> None:
    """Anything."""


def positional_only(a: int, /, b: int = 2) -> None:
    """`a` has no name for callers in Python, but has one in JSON."""


def with_model(item: Item, items: list[Item] | None = None) -> None:
    """Models, also inside containers."""


@pytest.mark.parametrize(
    "function, body, bound",
    [
        (plain, b'{"a": 1}', ((), {"a": 1})),
        (plain, b" [1, 5]\n", ((1, 5), {})),
        (plain, b'{"a": 1, "c": 9}', ((), {"a": 1, "c": 9})),
        (star, b"", ((), {})),
        (star, b"[1, 2, 3]", ((1, 2, 3), {})),
        (star, b'{"x": 1}', ((), {"x": 1})),
        (positional_only, b'{"a": 1, "b": 5}', ((1,), {"b": 5})),
        (plain, '{"a": "ü"}'.encode(), ((), {"a": "ü"})),
    ],
)
def test_what_fits_is_bound(function: Any, body: bytes, bound: object) -> None:
    assert Binder(function).from_json(body) == bound


@pytest.mark.parametrize(
    "function, body, parameter",
    [
        (plain, b"", "a"),
        (plain, b"{}", "a"),
        (plain, b'{"a": 1, "z": 2}', "z"),
        (positional_only, b'{"b": 1}', "a"),
        (with_model, b'{"item": {"count": 2}}', "item"),
        (with_model, b'[{"name": "x"}, [{"name": 5}]]', "items"),
    ],
)
def test_what_does_not_fit_names_its_parameter(function: Any, body: bytes, parameter: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        Binder(function).from_json(body)
    assert raised.value.detail["parameter"] == parameter


@pytest.mark.parametrize("body", [b"{", b"nul", b'{"a": 1} x', b"\xff", b'"text"', b"7"])
def test_what_is_not_arguments_in_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput, match="body"):
        Binder(plain).from_json(body)


def test_models_are_built_from_objects_by_name_and_by_position() -> None:
    binder = Binder(with_model)
    assert binder.from_json(b'{"item": {"name": "x"}}') == ((), {"item": Item(name="x")})
    assert binder.from_json(b'[{"name": "x"}, [{"name": "y"}]]') == (
        (Item(name="x"), [Item(name="y")]),
        {},
    )


def test_an_annotation_that_cannot_be_evaluated_costs_only_the_conversion() -> None:
    def mystery(item: NoSuchType) -> None:  # type: ignore[name-defined]  # noqa: F821  # the point of the test
        """Its annotation cannot be evaluated."""

    assert Binder(mystery).from_json(b'{"item": {}}') == ((), {"item": {}})


class _NoModule(type):
    @property
    def __module__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no module")


class Odd(metaclass=_NoModule):
    """A class that cannot be described."""


@pytest.mark.parametrize(
    "function, args, kwargs, described",
    [
        (plain, ("secret text",), {"c": 3}, "a: str of 11, c: int"),
        (star, ([1, 2], None), {"x\n": {"k": 1}}, "[0]: list of 2, [1]: NoneType, x?: dict of 1"),
        (star, (), {}, "none"),
        (plain, (Item(name="secret"), Odd()), {}, "a: Item, b: object"),
        (
            plain,
            (np.zeros((3, 2)), np.float32(1)),
            {},
            "a: ndarray of 3x2, b: float32 of one value",
        ),
        (star, tuple(range(18)), {}, ", ".join(f"[{n}]: int" for n in range(16)) + ", and 2 more"),
    ],
)
def test_arguments_are_described_by_type_and_size_without_values(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], described: str
) -> None:
    assert Binder(function).shapes(args, kwargs) == described
