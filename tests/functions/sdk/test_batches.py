"""`@pilotlight.batched`: what callers see of a body over lists, what a declaration makes of it, and
what it refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Sequence
from typing import Annotated, Any, Optional, TypedDict

import pydantic
import pytest

import pilotlight
from pilotlight.errors import InvalidInput
from pilotlight.sdk.batches import BatchLists, WrongResults, item_hints
from pilotlight.sdk.declaration import Declaration
from pilotlight.sdk.decorator_metadata import PilotlightWarning
from pilotlight.spec.function import FunctionSpec, MethodSpec
from pilotlight.spec.policies import BatchPolicy
from pilotlight.spec.record_json import from_json, to_json
from tests.functions.sdk.conftest import Write

app = pilotlight.App("batches")


class Passenger(pydantic.BaseModel):
    """One item, as a pydantic model."""

    age: float
    sex: str = "unknown"


class Point(TypedDict):
    """One item, as a TypedDict."""

    x: int


@dataclasses.dataclass
class Score:
    """One result."""

    value: float


@app.function(example=["text"])
@pilotlight.batched(max_batch_size=16, wait_ms=5, buckets=(64, 256))
def embed(texts: list[str], scale: list[float] = 2.0) -> list[list[float]]:  # type: ignore[assignment]  # a default is that of one item
    """Sizes."""
    return [[len(text) * factor] for text, factor in zip(texts, scale, strict=True)]


@app.cls()
class Model:
    """Batched methods, with and without @method()."""

    @pilotlight.enter()
    def load(self) -> None:
        """Something to hold."""
        self.factor = 10

    @pilotlight.method(example=[3])
    @pilotlight.batched(max_batch_size=8, wait_ms=50, adaptive=False, retry_alone=False)
    def times(self, numbers: list[int], *, plus: Sequence[int] = (0,)) -> list[int | Exception]:
        """An error in its place."""
        return [ValueError(f"not {n}") if n < 0 else n * self.factor for n in numbers]

    @pilotlight.batched(max_batch_size=4, wait_ms=1)
    async def survived(self, passengers: list[Passenger]) -> list[Score]:
        """Asynchronous."""
        return [Score(passenger.age) for passenger in passengers]


def declaration(handle: Any) -> Declaration:
    found: Declaration = handle.__pilotlight__
    return found


def method_of(handle: Any, name: str = "") -> MethodSpec:
    return next(method for method in declaration(handle).methods() if method.name == name)


def test_callers_see_one_item() -> None:
    method = method_of(embed)

    assert method.batch == BatchPolicy(max_batch_size=16, wait_ms=5, buckets=(64, 256))
    assert method.schema is not None
    assert method.schema["properties"] == {
        "texts": {"type": "string"},
        "scale": {"type": "number", "default": 2.0},
    }
    assert method.schema["required"] == ["texts"]
    assert method.returns is not None
    assert method.returns["type"] == "array"
    assert method.returns["items"] == {"type": "number"}
    assert method.example == ["text"]


def test_items_may_be_models_and_records() -> None:
    survived = method_of(Model, "survived")

    assert survived.schema is not None
    assert survived.schema["properties"] == {"passengers": {"$ref": "#/$defs/Passenger"}}
    assert survived.returns is not None
    assert survived.returns["$ref"] == "#/$defs/Score"


def test_a_batched_method_needs_no_other_mark() -> None:
    assert declaration(Model).method_names() == ("times", "survived")


def test_the_policy_travels_with_the_spec() -> None:
    spec = FunctionSpec(
        name="f", bundle="b" * 64, methods=(method_of(embed), *declaration(Model).methods())
    )

    assert from_json(FunctionSpec, to_json(spec)) == spec


@pytest.mark.parametrize(
    "hint, item",
    [
        (list[str], str),
        (Sequence[list[int]], list[int]),
        (list, Any),
        (Any, Any),
        (tuple[int, ...], int),
        (Optional[list[str]], str),  # noqa: UP045 - as users write it
        (list[str] | None, str),
        (Annotated[list[str], "words"], str),
        (list[Annotated[str, "a word"]], Annotated[str, "a word"]),
        (list[Point], Point),
    ],
)
def test_a_list_of_anything_becomes_one_of_it(hint: Any, item: Any) -> None:
    def f(x: Any) -> Any: ...

    f.__annotations__ = {"x": hint, "return": hint}

    assert item_hints(f) == {"x": item, "return": item}


@pytest.mark.parametrize(
    "hint", [str, int, dict[str, int], tuple[int, str], bytes, set[int], list[int] | str]
)
def test_a_parameter_that_is_no_list_is_refused(hint: Any) -> None:
    def f(x: Any) -> Any: ...

    f.__annotations__ = {"x": hint}

    with pytest.raises(
        InvalidInput,
        match=r"parameter 'x' is .*: it must be a list of such values, annotate it as list\[…\]",
    ):
        item_hints(f)


def test_without_concurrency_of_their_own_an_instance_takes_two_batches(module: Write) -> None:
    assert declaration(embed).scaling.max_inputs == 32
    assert declaration(Model).scaling.max_inputs == 16
    found = module("""
        import pilotlight
        app = pilotlight.App("batches")

        @app.function()
        @pilotlight.concurrent(max_inputs=100)
        @pilotlight.batched(max_batch_size=4, wait_ms=5)
        def f(items: list[int]) -> list[int]: ...
    """)
    assert declaration(found.f).scaling.max_inputs == 100


HEAD = "import pilotlight\napp = pilotlight.App('x')\n"
GATHER = "@pilotlight.batched(max_batch_size=4, wait_ms=5)\n"


def test_fewer_calls_than_a_batch_holds_are_warned_of(module: Write) -> None:
    with pytest.warns(PilotlightWarning, match=r"max_inputs=2 admits only 2 calls at once"):
        module(
            f"{HEAD}@app.function()\n@pilotlight.concurrent(max_inputs=2)\n{GATHER}def f(items: "
            f"list[int]) -> list[int]: ...\n"
        )


@pytest.mark.parametrize(
    "body, says",
    [
        (
            "def f(items: list[int]):\n    yield 1",
            "but is a generator: streams cannot be batched",
        ),
        ("async def f(items: list[int]):\n    yield 1", "but is a generator"),
        ("def f(*items): ...", r"but takes \*items: declare each parameter"),
        ("def f(a: list[int], **more): ...", r"but takes \*\*more"),
        ("def f(): ...", "has no parameters"),
        ("def f(a: int): ...", "parameter 'a' is int"),
        ("def f(a: list[int]) -> None: ...", "returns NoneType|returns None"),
        ("def f(a: list[int]) -> dict[str, int]: ...", r"returns dict\[str, int\]"),
        ("def f(a: list[int]) -> str: ...", "returns str"),
    ],
)
def test_what_cannot_be_batched_is_refused_where_it_is_declared(
    module: Write, body: str, says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        module(f"{HEAD}@app.function()\n{GATHER}{body}\n")


def test_a_web_application_has_no_batches(module: Write) -> None:
    with pytest.raises(InvalidInput, match="is @batched and @asgi"):
        module(f"{HEAD}@app.function()\n@pilotlight.asgi_app()\n{GATHER}def f(a: list[int]): ...\n")


def test_methods_beside_batched_ones_need_to_know_how_many_calls_may_run(module: Write) -> None:
    members = (
        f"    {GATHER}    def f(self, a: list[int]) -> list[int]: ...\n    "
        f"@pilotlight.method()\n    def g(self): ...\n"
    )
    with pytest.raises(
        InvalidInput, match=r"unbatched method g: set the number of concurrent calls"
    ):
        module(f"{HEAD}@app.cls()\nclass C:\n{members}")

    found = module(f"{HEAD}@app.cls()\n@pilotlight.concurrent(max_inputs=8)\nclass C:\n{members}")
    assert declaration(found.C).scaling.max_inputs == 8


@pytest.mark.parametrize(
    "more, says",
    [
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"wait_ms": -1}, "wait_ms"),
        ({"wait_ms": 60_001}, "wait_ms"),
        ({"buckets": (5, 3)}, "buckets"),
        ({"buckets": (0,)}, "buckets"),
        ({"buckets": 5}, "must be numbers"),
        ({"wait_ms": "soon"}, "must be numbers|could not convert"),
    ],
)
def test_knobs_out_of_bounds_are_named(more: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        pilotlight.batched(**{"max_batch_size": 4, "wait_ms": 5, **more})


def test_local_takes_and_gives_single_values() -> None:
    assert embed.local("abc") == [6.0]
    assert embed.local("abc", scale=3) == [9]
    assert embed.local(texts="ab") == [4.0]
    with pytest.raises(TypeError, match="too many positional arguments"):
        embed.local("a", 2, 3)


def test_local_of_methods_runs_on_an_entered_object() -> None:
    model = Model()

    assert model.times.local(4) == 40
    with pytest.raises(ValueError, match="not -4"):
        model.times.local(-4)
    assert asyncio.run(model.survived.local(Passenger(age=3))) == Score(3)  # type: ignore[attr-defined]


def test_local_shows_the_bodys_parameters() -> None:
    assert list(inspect.signature(embed.local).parameters) == ["texts", "scale"]


def test_a_local_body_that_returns_too_many_is_told_so(module: Write) -> None:
    found = module(
        f"{HEAD}@app.function()\n{GATHER}def f(a: list[int]) -> list[int]:\n    return [1, 2]\n"
    )

    with pytest.raises(WrongResults, match="f returned 2 results for a batch of 1 items"):
        found.f.local(1)


def test_lists_put_each_value_into_its_place() -> None:
    def f(a: Any, b: Any = 7, /, c: Any = None, *, d: Any = "d") -> None: ...

    lists = BatchLists(f)
    rows = [lists.values((1,), {}), lists.values((2, 3), {"d": 4}), lists.values((5,), {"c": 6})]

    assert lists.gathered(rows) == ([[1, 2, 5], [7, 3, 7], [None, None, 6]], {"d": ["d", 4, "d"]})
