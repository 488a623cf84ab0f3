"""Values to bodies."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import json
import pathlib
import threading
import types
import uuid
from typing import Any

import numpy as np
import pydantic
import pytest

from pilotlight.worker.user_code import serialization


class Colour(enum.Enum):
    """For a test."""

    RED = "red"


@dataclasses.dataclass
class Point:
    """For a test."""

    x: int
    y: Any


class Model(pydantic.BaseModel):
    """For a test."""

    when: dt.date


@pytest.mark.parametrize(
    "value, as_json",
    [
        ({"a": [1, 2.5, None, True, "ü"]}, {"a": [1, 2.5, None, True, "ü"]}),
        (np.float32(0.5), 0.5),
        (np.arange(3), [0, 1, 2]),
        ({"v": np.eye(2, dtype=int)}, {"v": [[1, 0], [0, 1]]}),
        (Point(x=1, y=Colour.RED), {"x": 1, "y": "red"}),
        (Model(when=dt.date(2026, 1, 2)), {"when": "2026-01-02"}),
        (dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "2026-01-02T00:00:00+00:00"),
        (decimal.Decimal("1.10"), "1.10"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (pathlib.PurePath("/a/b"), "/a/b"),
        ({3}, [3]),
        (types.MappingProxyType({"a": 1}), {"a": 1}),
    ],
)
def test_json_carries_what_models_return(value: object, as_json: object) -> None:
    assert json.loads(serialization.as_json(value)) == as_json


@pytest.mark.parametrize(
    "value, says",
    [
        (object(), "contains a object"),
        (b"raw", "base64"),
        (threading.Lock(), "lock"),
        (int, "type"),
        (float("nan"), "JSON"),
        ({(1, 2): 3}, "keys"),
        ("\ud800", "surrogates"),
    ],
)
def test_what_json_cannot_carry_is_named(value: object, says: str) -> None:
    with pytest.raises(serialization.ResultNotSerializable, match=says):
        serialization.as_json(value)


def test_a_value_that_contains_itself_is_refused_and_harms_no_later_one() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(serialization.ResultNotSerializable, match="contains itself"):
        serialization.as_json(loop)
    assert serialization.as_json([1]) == b"[1]"


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(serialization.ResultNotSerializable, match="lock"):
        serialization.as_pickle(threading.Lock())
