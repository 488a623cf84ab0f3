"""Which calls may share a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pilotlight.spec.policies import BatchPolicy
from pilotlight.worker.batching.batch_key import batch_key_for

POLICY = BatchPolicy(max_batch_size=8, wait_ms=5)
BUCKETS = BatchPolicy(max_batch_size=8, wait_ms=5, buckets=(4, 16))


def fit(a: Any, b: Any, policy: BatchPolicy = POLICY) -> bool:
    return batch_key_for("f", policy, a if isinstance(a, tuple) else (a,)) == batch_key_for(
        "f", policy, b if isinstance(b, tuple) else (b,)
    )


class Odd:
    """Has a shape and a dtype, and is no array."""

    dtype = "round"

    def __init__(self, shape: Any) -> None:
        self.shape = shape


@pytest.mark.parametrize("shape", [lambda: (1, 2), None, [[1], 2], 7])
def test_what_is_no_array_in_spite_of_a_shape_goes_with_all_else(shape: Any) -> None:
    assert fit(Odd(shape), "text")
    assert fit({"ids": Odd(shape)}, "text")


@pytest.mark.parametrize(
    "a, b, together",
    [
        ("short", "a longer one", True),
        ([1, 2], [1, 2, 3], True),
        (1, "text", True),
        (np.zeros((3, 4)), np.ones((3, 4)), True),
        (np.zeros((3, 4)), np.zeros((3, 5)), False),
        (np.zeros(3, dtype="float32"), np.zeros(3, dtype="float64"), False),
        (np.zeros(3), [0, 0, 0], False),
        (np.zeros(()), np.ones(()), True),
        ({"ids": np.zeros(3), "mask": np.ones(3)}, {"mask": np.ones(3), "ids": np.zeros(3)}, True),
        ({"ids": np.zeros(3)}, {"ids": np.zeros(4)}, False),
        (("x", np.zeros(2)), ("y", np.zeros(2)), True),
        (("x", np.zeros(2)), ("y", np.zeros(3)), False),
    ],
)
def test_arrays_go_with_arrays_of_their_shape_and_all_else_together(
    a: Any, b: Any, together: bool
) -> None:
    assert fit(a, b) is together


@pytest.mark.parametrize(
    "a, b, together",
    [
        ("abc", "abcd", True),
        ("abcd", "abcde", False),
        ("a" * 17, "a" * 1000, True),
        (5, 7, True),
        ([1] * 3, [1] * 4, True),
        (np.zeros((3, 8)), np.zeros((4, 8)), True),
        (np.zeros((3, 8)), np.zeros((4, 9)), False),
        (np.zeros((3, 8)), np.zeros((5, 8)), False),
        (np.zeros(()), np.zeros(()), True),
        (("abc", np.zeros(3)), ("abcd", np.zeros(4)), False),
    ],
)
def test_buckets_part_lengths_and_let_the_first_axis_of_arrays_vary_within_them(
    a: Any, b: Any, together: bool
) -> None:
    assert fit(a, b, BUCKETS) is together


def test_priorities_stay_apart_and_an_unknown_one_is_the_usual_one() -> None:
    ranks = {
        word: batch_key_for("f", POLICY, (1,), word).rank
        for word in (b"realtime", b"standard", b"batch", b"nonsense", b"\xff", None)
    }

    assert ranks == {
        b"realtime": 0,
        b"standard": 1,
        b"batch": 2,
        b"nonsense": 1,
        b"\xff": 1,
        None: 1,
    }


def test_methods_stay_apart() -> None:
    assert batch_key_for("f", POLICY, (1,)) != batch_key_for("g", POLICY, (1,))
