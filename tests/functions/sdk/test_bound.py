"""Classes with parameters and handles with other options: what is bound, under which name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import pilotlight
from pilotlight.errors import InvalidInput
from pilotlight.packaging.build import build
from pilotlight.sdk.unsupported import NotSupported
from pilotlight.spec.bound import MAX_VALUE_CHARS, bind, is_bound, is_bound_of
from tests.fakes.fake_platform import FakePlatform
from tests.functions.sdk.conftest import Write

SOURCE = """
import pilotlight

app = pilotlight.App("bound")


@app.cls(max_instances=3, min_instances=1)
class Scaler:
    factor: int = pilotlight.parameter()
    label: str = pilotlight.parameter(default="x")
    key: bytes = pilotlight.parameter(default=b"\\x00\\xff")
    loads: int = pilotlight.parameter(default=0, init=False)

    @pilotlight.enter()
    def load(self) -> None:
        self.table = [self.factor * n for n in range(10)]

    @pilotlight.method()
    def times(self, n: int) -> str:
        return f"{self.label}{self.table[n]}{self.key!r}"

    @pilotlight.method()
    def twice(self, n: int) -> str:
        return self.times.local(n) + self.times(n)

    @pilotlight.method()
    def elsewhere(self, n: int) -> str:
        return self.times.remote(n)


@app.function(retries=2)
def plain(n: int) -> int:
    return n
"""


@pytest.fixture(name="user")
def _user(module: Write) -> Any:
    """The user's module."""
    return module(SOURCE)


@pytest.fixture(name="deployed")
def _deployed(platform: FakePlatform, user: Any) -> FakePlatform:
    user.app.deploy()
    return platform


def test_each_set_of_arguments_is_a_function_of_its_own(deployed: FakePlatform, user: Any) -> None:
    scaler = user.Scaler

    assert scaler(factor=2).times.remote(3) == "x6b'\\x00\\xff'"
    assert scaler(factor=3, label="y", key=b"k").times.remote(3) == "y9b'k'"
    assert scaler(factor=2).twice.remote(1) == "x2b'\\x00\\xff'" * 2

    made = [name for name in deployed.apps["main", "bound"].functions if is_bound(name)]
    assert len(made) == 2
    assert all(is_bound_of(name, "Scaler") for name in made)
    assert len([path for path in deployed.asked if path.endswith(":bind")]) == 2


def test_a_method_calls_instances_with_its_own_arguments(deployed: FakePlatform, user: Any) -> None:
    assert user.Scaler(factor=4).elsewhere.remote(2) == "x8b'\\x00\\xff'"


async def test_handles_bind_in_a_loop_and_travel(deployed: FakePlatform, user: Any) -> None:
    handle = pickle.loads(pickle.dumps(user.Scaler(factor=5)))

    assert await handle.times.remote.aio(1) == "x5b'\\x00\\xff'"
    assert [r async for r in handle.times.map.aio([1, 2])] == [
        "x5b'\\x00\\xff'",
        "x10b'\\x00\\xff'",
    ]
    by_name = pilotlight.Cls.from_name("bound", "Scaler")(factor=5)
    assert (await by_name.times.spawn.aio(1)).get() == "x5b'\\x00\\xff'"


def test_a_bound_function_that_ended_with_a_deploy_is_made_again(
    deployed: FakePlatform, user: Any
) -> None:
    bound = user.Scaler(factor=6)
    bound.times.remote(1)
    user.app.deploy()

    assert bound.times.remote(1) == "x6b'\\x00\\xff'"


def test_a_bound_function_has_no_instances_without_calls_and_no_schedule(user: Any) -> None:
    spec = {one.name: one for one in build(user.app).functions}["Scaler"]

    bound = bind(spec, {"factor": 1}, {"resources": {"cpu": 2.0}, "env": {"A": "1"}})

    assert (bound.scaling.min_instances, bound.scaling.max_instances) == (0, 3)
    assert (bound.resources.cpu, bound.env["A"]) == (2.0, "1")
    assert bound.arguments == {"factor": 1, "label": "x", "key": "AP8="}
    assert bind(spec, {"factor": 1}, {}).name != bound.name


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, r"needs an argument for factor: Scaler\(factor=…\)"),
        ({"factor": "2"}, r"Scaler\(factor='2'\): must be int"),
        ({"factor": True}, "must be int"),
        ({"factor": 1, "size": 2}, "has no parameter 'size': factor, label, key"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str, user: Any) -> None:
    with pytest.raises(InvalidInput, match=message):
        user.Scaler(**arguments)
    with pytest.raises(InvalidInput):
        bind({one.name: one for one in build(user.app).functions}["Scaler"], arguments, {})


def test_an_argument_has_a_bound(user: Any) -> None:
    spec = {one.name: one for one in build(user.app).functions}["Scaler"]

    with pytest.raises(InvalidInput, match=f"at most {MAX_VALUE_CHARS}"):
        bind(spec, {"factor": 1, "label": "a" * (MAX_VALUE_CHARS + 1)}, {})


def test_options_of_a_handle(deployed: FakePlatform, user: Any) -> None:
    other = user.Scaler.with_options(max_containers=2, gpu="H100:2", timeout=9).with_options(
        memory=512, retries=1, env={"B": "2"}, scaledown_window=7
    )
    assert other(factor=2).times.remote(1) == "x2b'\\x00\\xff'"
    wide = user.plain.with_options(cpu=2).with_options(idempotency_key="k")
    assert wide.remote(3) == 3
    assert user.Scaler.with_concurrency(max_inputs=4)(factor=2).times.remote(1)

    specs = deployed.apps["main", "bound"].functions
    (first,) = [one for one in specs.values() if one.resources.gpu]
    assert (first.scaling.max_instances, first.scaling.window_s, first.clocks.execution_s) == (
        2,
        7,
        9,
    )
    assert (first.resources.gpu_count, first.resources.memory_bytes) == (2, 512 * 1024**2)
    assert (first.env["B"], first.retries and first.retries.max_retries) == ("2", 1)
    assert [s.resources.cpu for n, s in specs.items() if is_bound_of(n, "plain")] == [2.0]
    assert [s for s in specs.values() if s.scaling.max_inputs == 4]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"min_containers": 1}, r"with_options\(min_containers=…\): is declared with the class"),
        ({"volumes": {"/a": 1}}, r"with_options\(volumes=…\)"),
        ({"secrets": [pilotlight.Secret.from_dict({"A": "1"})]}, "name stored secrets"),
    ],
)
def test_an_option_that_a_handle_cannot_choose_is_named(
    options: dict[str, Any], message: str, user: Any
) -> None:
    with pytest.raises(InvalidInput, match=message):
        user.Scaler.with_options(**options)
    with pytest.raises(NotSupported, match=r"Cls.with_batching is not supported: use"):
        user.Scaler.with_batching(max_batch_size=2, wait_ms=1)


def test_a_parameter_of_another_type_is_refused() -> None:
    class Wrong:
        sizes: list[int] = pilotlight.parameter()

        @pilotlight.method()
        def run(self) -> None: ...

    with pytest.raises(InvalidInput, match=r"Wrong.sizes is list\[int\]: a parameter is str"):
        pilotlight.App("wrong").cls()(_top(Wrong))


def test_a_class_with_parameters_and_a_constructor_is_refused() -> None:
    class Both:
        size: int = pilotlight.parameter(default=1)

        def __init__(self) -> None:
            self.other = 1

        @pilotlight.method()
        def run(self) -> None: ...

    with pytest.raises(InvalidInput, match=r"parameters and an __init__: move its body"):
        pilotlight.App("wrong").cls()(_top(Both))


def test_names_of_bound_functions_cannot_be_declared() -> None:
    with pytest.raises(InvalidInput, match="names that end like this one"):

        @pilotlight.App("wrong").function(name="plain--0123456789ab")
        @_top
        def other() -> None: ...


def _top(function: Any) -> Any:
    function.__qualname__ = function.__name__
    return function
