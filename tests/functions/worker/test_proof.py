"""Answers are equal when their values are, to the byte; restored copies are asked again."""

from __future__ import annotations

import dataclasses
import datetime as dt
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec
from pilotlight.worker.user_code.arguments import Binder
from pilotlight.worker.user_code.example_check import ExpectedAnswer, ProofFailed, compare, digest
from pilotlight.worker.user_code.target import Method, Style
from tests.fakes.fake_shim import function_spec
from tests.fakes.freezing_shim import FreezingShim


@dataclasses.dataclass
class Point:
    x: float
    label: str = ""


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any) -> None:
        self.a = a


class Awkward:
    def __init__(self) -> None:
        self.x = 1

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise RuntimeError("not now")

    def __repr__(self) -> str:
        raise RuntimeError("nor this")


EQUAL: list[Callable[[], Any]] = [
    lambda: None,
    lambda: [1, 2.5, "x", b"y", True, 1j],
    lambda: {"a": [1], "b": {2, 3}},
    lambda: (float("nan"), float("inf")),
    lambda: np.arange(6, dtype="float32").reshape(2, 3),
    lambda: np.float64(1.5),
    lambda: np.array([{"a": 1}, None], dtype=object),
    lambda: torch.arange(6).reshape(2, 3).T,
    lambda: torch.tensor(2.0, dtype=torch.bfloat16),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.empty(0),
    lambda: Point(x=1.0, label="p"),
    lambda: Slotted([1]),
    lambda: dt.datetime(2026, 11, 21, 5, 0, tzinfo=dt.UTC),
    lambda: Decimal("1.10"),
    object,
    lambda: len,
    Awkward,
]


def _id(make: Callable[[], Any]) -> str:
    """The value's repr, or the type's name: two xdist workers must give a test the same id, so no
    addresses and no failing repr."""
    return make.__name__ if isinstance(make, type) else repr(make())[:30]


@pytest.mark.parametrize("make", EQUAL, ids=_id)
def test_equal_values_have_one_digest(make: Callable[[], Any]) -> None:
    assert digest(make()) == digest(make())


@pytest.mark.parametrize(
    "one, other",
    [
        (1, 1.0),
        (1, True),
        ([1, 2], [2, 1]),
        ([[1], 2], [[1, 2]]),
        ("1", b"1"),
        (["ab", "c"], ["a", "bc"]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (0.0, -0.0),
        (np.zeros(2, dtype="float32"), np.zeros(2, dtype="float64")),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (torch.tensor([1.0]), torch.tensor([1.0000001])),
        (Point(x=1.0), Point(x=2.0)),
        (Slotted(1), Slotted(2)),
        (Decimal("1.10"), Decimal("1.1")),
        (dt.date(2026, 1, 1), dt.date(2026, 1, 2)),
        (len, repr),
    ],
)
def test_other_values_have_another(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


def test_a_mapping_or_set_has_no_order() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    items = [f"n{n}" for n in range(50)]
    assert digest(dict.fromkeys(items).keys() | set()) == digest(set(items))


def test_what_contains_itself_has_a_digest_too() -> None:
    loop: list[Any] = [1]
    loop += [loop, loop]
    assert len(digest(loop)) == 16


def method(call: Callable[..., Any], *, check: Callable[[Any, Any], Any] | None = None) -> Method:
    return Method(
        name="m", call=call, style=Style.THREAD, binder=Binder(call), example=[], check=check
    )


def asked(one: Method) -> list[str]:
    """Its notes, when it is asked as a warm-up and then as a proof."""
    known = ExpectedAnswer.of(one, one.call())
    return compare({"m": one}, {"m": known}, lambda m: m.call())


def test_the_same_answer_proves_it() -> None:
    assert asked(method(lambda: {"vector": np.ones(3)})) == []


def test_a_function_that_never_repeats_itself_is_compared_by_type_and_that_is_said() -> None:
    assert asked(method(random.random)) == [
        (
            "m never gives the same answer to its example twice: only its type was compared. "
            "Declare check= to compare more"
        )
    ]


def test_a_steady_answer_that_is_another_one_fails() -> None:
    answers = iter([1.0, 1.5, 1.5])
    with pytest.raises(
        ProofFailed,
        match=r"m answers its example with 1.5; before the snapshot it answered 1.0\. If both",
    ):
        asked(method(lambda: next(answers)))


def test_an_unsteady_answer_of_another_type_fails() -> None:
    answers = iter([1, "a", "b"])
    with pytest.raises(ProofFailed):
        asked(method(lambda: next(answers)))


def test_check_decides_where_it_is_given() -> None:
    answers = iter([1.0, 1.0001])
    assert (
        asked(
            method(
                lambda: next(answers), check=lambda answer, expected: abs(answer - expected) < 0.01
            )
        )
        == []
    )
    answers = iter([1.0, 2.0])
    with pytest.raises(
        ProofFailed,
        match=r"check= of m rejects the answer 2\.0; before the snapshot it answered 1\.0",
    ):
        asked(
            method(
                lambda: next(answers), check=lambda answer, expected: abs(answer - expected) < 0.01
            )
        )


def test_only_answers_with_a_check_are_kept() -> None:
    big = list(range(10_000))
    assert ExpectedAnswer.of(method(lambda: big), big).value is None
    assert len(ExpectedAnswer.of(method(lambda: big), big).shown) <= 200
    assert (
        ExpectedAnswer.of(
            method(lambda: big, check=lambda answer, expected: answer == expected), big
        ).value
        is big
    )


KINDS = """
    import numpy, pilotlight
    app = pilotlight.App("demo")

    @app.cls()
    class Kinds:
        factor = 2

        @pilotlight.method(example=[3])
        def plain(self, n: int): return n * self.factor

        @pilotlight.method(example=[3])
        async def later(self, n: int): return {"n": n * self.factor}

        @pilotlight.method(example=[3])
        def items(self, n: int):
            for i in range(n): yield i * self.factor

        @pilotlight.method(example=[3])
        async def later_items(self, n: int):
            for i in range(n): yield i * self.factor

        @pilotlight.method(example=[3])
        def array(self, n: int): return numpy.full((n, n), self.factor)

        @pilotlight.method(example={"factor": 2})
        def change(self, factor: int): self.factor = factor

        @pilotlight.method()
        def secretly(self): return open("/nonexistent")
"""
NAMES = ("plain", "later", "items", "later_items", "array", "change")


def kinds() -> FunctionSpec:
    return function_spec(
        qualname="Kinds",
        kind=FunctionKind.CLASS,
        methods=[*(MethodSpec(name=name) for name in NAMES), MethodSpec(name="secretly")],
    )


def test_methods_of_every_kind_are_proven_and_the_process_leaves() -> None:
    with FreezingShim({"app.py": KINDS}, kinds()) as shim:
        shim.freeze()
        proved = shim.prove()
        assert (proved["ok"], proved["error"], proved["notes"]) == (True, None, [])
        assert proved["phases_ms"]["first_answer"] > 0
        assert shim.control.recv(10) == b""  # it is gone


def test_a_copy_that_answers_otherwise_says_which_method_and_how() -> None:
    code = KINDS.replace("self.factor = factor", "self.factor = 5")  # as a damaged copy would
    with FreezingShim({"app.py": code}, kinds()) as shim:
        shim.freeze()
        proved = shim.prove()
        assert not proved["ok"]
        assert (
            "plain answers its example with 15; before the snapshot it answered 6"
            in proved["error"]["message"]
        )


def test_an_example_that_raises_now_is_reported() -> None:
    code = """
        import pathlib
        def f(): return pathlib.Path("there").read_text()
        f._pilotlight_marks = {"method": {"example": []}}
    """
    with FreezingShim({"app.py": code}, function_spec(), work={"there": "x"}) as shim:
        shim.freeze()
        (shim.work / "there").unlink()
        proved = shim.prove()
        assert (proved["ok"], proved["error"]["type"]) == (False, "FileNotFoundError")


def test_without_an_example_there_is_nothing_to_prove() -> None:
    with FreezingShim({"app.py": "def f(): return 1"}, function_spec()) as shim:
        shim.freeze(in_place=True)
        proved = shim.prove()
        assert (proved["ok"], proved["phases_ms"]) == (True, {})
