"""Classes of `pilotlight.core.startup.data_classes` beside the same ones of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import sys
from collections.abc import Callable
from dataclasses import InitVar, field
from typing import Any, ClassVar

import pytest

from pilotlight.core.startup import data_classes

OURS: Any = data_classes.dataclass
STANDARD: Any = dataclasses.dataclass


def _shape(dataclass: Any, **options: Any) -> Any:
    """A class with fields of every kind, as this decorator makes it."""

    @dataclass(**options)
    class Shape:
        kind: ClassVar[str] = "shape"
        a: int
        b: str = "b"
        c: list[int] = field(default_factory=list, compare=False)
        d: int = field(default=4, repr=False, hash=False)
        e: int = field(default=5, init=False)
        f: list[int] = field(default_factory=list, init=False, compare=False)
        g: tuple[int, ...] = field(default=(), kw_only=True)

    return Shape


def _checked(dataclass: Any, **options: Any) -> Any:
    """A class with a method of each name that the decorator would add, and `__post_init__`."""

    @dataclass(**options)
    class Checked:
        a: int

        def __post_init__(self) -> None:
            if self.a < 0:
                raise ValueError(self.a)

        def __repr__(self) -> str:
            return "mine"

        def __hash__(self) -> int:
            return 7

        def __eq__(self, other: object) -> bool:
            return True

    return Checked


def _empty(dataclass: Any, **options: Any) -> Any:
    @dataclass(**options)
    class Empty:
        """Nothing."""

    return Empty


ALL_OPTIONS = [
    dict(zip(("frozen", "slots", "kw_only", "eq"), values, strict=True))
    for values in itertools.product((False, True), repeat=4)
]
MAKERS: list[Callable[..., Any]] = [_shape, _checked, _empty]


def _said(act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What it returns, or raises."""
    try:
        return act(*args, **kwargs)
    except (AttributeError, TypeError, ValueError) as e:
        return type(e), str(e)


def _observe(cls: Any, *, sets_unknown: bool) -> list[Any]:
    """All that can be seen of a class and its instances."""
    seen: list[Any] = [
        [(f.name, f.type, f.init, f.repr, f.compare) for f in dataclasses.fields(cls)],
        cls.__match_args__,
        cls.__qualname__,
        getattr(cls, "__slots__", None),
        cls.__init__.__annotations__,
        cls.__init__.__qualname__,
    ]
    calls: list[tuple[list[Any], dict[str, Any]]] = [([], {}), ([1], {}), ([-1], {}), ([1, 2], {})]
    for args, kwargs in [*calls, ([], {"a": 1, "g": (3,)})]:
        one, other = (_said(cls, *args, **kwargs) for _ in range(2))
        seen.append(repr(one))
        if not isinstance(one, tuple):
            seen += [one == other, one != other, one == 1, dataclasses.asdict(one)]
            seen += _attempts(one, other, sets_unknown=sets_unknown)
    return seen


def _attempts(one: Any, other: Any, *, sets_unknown: bool) -> list[str]:
    kind: Any = type(one)
    has_identity = kind.__hash__ is object.__hash__
    fields = kind.__dataclass_fields__
    answers = [
        0 if has_identity else _said(hash, one),
        *(
            _said(setattr, one, name, 5)
            for name in ("a", "unknown")
            if sets_unknown or name in fields
        ),
        *(_said(delattr, one, name) for name in ("b", "x") if sets_unknown or name in fields),
        _said(getattr, one, "a"),
        _said(dataclasses.replace, other, a=9),
        _said(copy.copy, other),
        _said(copy.deepcopy, other),
    ]
    return [repr(answer) for answer in answers]


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@pytest.mark.parametrize("maker", MAKERS)
def test_class_behaves_like_the_standard_one(
    maker: Callable[..., Any], options: dict[str, bool]
) -> None:
    # of a frozen class with slots, the standard one reports a TypeError of its own
    sets_unknown = not (options["frozen"] and options["slots"])
    ours, standard = (
        _observe(maker(dataclass, **options), sets_unknown=sets_unknown)
        for dataclass in (OURS, STANDARD)
    )
    assert ours == standard


def test_unknown_attribute_of_a_frozen_class_with_slots_is_refused() -> None:
    empty = _empty(OURS, frozen=True, slots=True)()

    with pytest.raises(dataclasses.FrozenInstanceError, match="'unknown'"):
        empty.unknown = 1


@pytest.mark.parametrize("frozen", [False, True])
def test_subclass_has_the_fields_of_its_base_first(frozen: bool) -> None:
    made = []
    for dataclass in (OURS, STANDARD):

        @dataclass(frozen=frozen)
        class Base:
            a: int
            b: int = 2

        @dataclass(frozen=frozen)
        class Derived(Base):
            c: int = 3

        class Plain(Derived):
            pass

        plain: Any = Plain(1)
        plain.z = 1
        made.append(
            [
                repr(Derived(1, c=4)),
                Derived(1) == Base(1),
                _said(setattr, plain, "a", 2),
            ]
        )

    assert made[0] == made[1]


def test_decorator_without_arguments_makes_a_class() -> None:
    class Point:
        x: int
        y: int = 0

    assert repr(OURS(Point)(1)).endswith("Point(x=1, y=0)")


def test_object_that_holds_itself_is_printed() -> None:
    @OURS
    class Node:
        next: Any = None

    node: Any = Node()
    node.next = node

    assert repr(node).endswith("Node(next=...)")


@OURS(frozen=True, slots=True, kw_only=True)
class Pickled:
    """At the top of the module, for pickle."""

    a: int
    b: str = "b"


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_frozen_object_with_slots_can_be_pickled(
    protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Pickled.__module__])

    made: Any = Pickled

    assert pickle.loads(pickle.dumps(made(a=1), protocol)) == made(a=1)


def test_field_without_default_after_one_that_has_it_is_refused() -> None:
    with pytest.raises(TypeError, match="non-default argument 'b' follows default argument"):

        @OURS
        class Wrong:
            a: int = 1
            b: int


def test_init_var_is_refused() -> None:
    with pytest.raises(TypeError, match="InitVar is not supported"):

        @OURS
        class Wrong:
            a: InitVar[int]
