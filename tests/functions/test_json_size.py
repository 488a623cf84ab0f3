"""Values of JSON, counted whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pilotlight import errors
from pilotlight.validation.json_size import ValueCounter, require_few_values

FEW: list[Any] = [
    {"prompt": "a, b, [c], {d}" * 100},
    {"path": "C:\\", "text": 'say "no", "no", "no"' * 50, "end": "\\\\"},
    ["\\" * 101, '"' * 101, '\\"' * 101],
    {"numbers": [1, 2.5, None, True], "letters": "äöü, ∀" * 10},
]
MANY: list[Any] = [[0] * 200, [[]] * 9, ["", ""] * 60, {str(n): {} for n in range(30)}]


def count(data: bytes, size: int) -> None:
    counter = ValueCounter(60, "send fewer")
    for begin in range(0, len(data), size):
        counter.add(data[begin : begin + size])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize("value", FEW)
def test_what_stands_in_strings_does_not_count_wherever_a_piece_ends(value: Any, size: int) -> None:
    data = json.dumps(value, ensure_ascii=False).encode()
    count(data, size)
    require_few_values(data, 60, "send fewer")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize("value", MANY)
def test_values_count_wherever_a_piece_ends(value: Any, size: int) -> None:
    data = json.dumps(value).encode()
    with pytest.raises(errors.TooLarge, match="more than 60 values"):
        count(data, size)
    with pytest.raises(errors.TooLarge, match="more than 60 values"):
        require_few_values(data, 60, "send fewer")
