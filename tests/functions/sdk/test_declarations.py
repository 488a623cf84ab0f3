"""Decorators: what they record, and what they say when they are used wrongly."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace
from typing import Any

import pytest

import pilotlight
from pilotlight.errors import InvalidInput
from pilotlight.sdk.declaration import Declaration
from pilotlight.sdk.decorator_metadata import METADATA_ATTRIBUTE, PilotlightWarning
from pilotlight.sdk.options import parse_gpu, resolve_options
from pilotlight.spec.cors import common_origins
from pilotlight.spec.function import FunctionKind, FunctionNetwork, Resources
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.instances.scaling import Scaling
from tests.fakes.fake_platform import FakePlatform
from tests.fakes.routes import spec_of
from tests.functions.sdk.conftest import Write

app = pilotlight.App("tests")
VOLUME = pilotlight.Volume.from_name("data")


def close_to(answer: float, expected: float) -> bool:
    return abs(answer - expected) < 1


@app.function(example=[1], check=close_to, memory="2GiB", gpu="H100:2")
@pilotlight.concurrent(max_inputs=16, target_inputs=8)
def scored(n: int) -> float:
    """Scores."""
    return n / 2


@app.cls(max_instances=3, scaledown_window=5, timeout=7, startup_timeout=9)
class Model:
    @pilotlight.enter()
    def load(self) -> None:
        self.ready = True

    @pilotlight.exit()
    def unload(self) -> None:
        self.ready = False

    @pilotlight.method(example=["a"])
    def run(self, text: str) -> str:
        return text


class Undeclared:
    @pilotlight.method()
    def run(self, text: str) -> str:
        return text


@app.function()
@pilotlight.asgi_app()
def web() -> object:
    return object()


def test_a_declaration_holds_the_undecorated_object_and_its_limits() -> None:
    spoken = declared(scored)

    assert spoken.raw(4) == 2
    assert spoken.resources.memory_bytes == 2 * 1024**3
    assert (spoken.resources.gpu, spoken.resources.gpu_count) == (("H100",), 2)
    assert spoken.scaling == Scaling(max_inputs=16, target_inputs=8)
    assert spoken.description == "Scores."
    (spec,) = spoken.methods()
    assert (spec.example, spec.has_check, spec.parameters) == ([1], True, ("n",))


def test_marks_lie_on_the_plain_functions() -> None:
    raw = declared(Model).raw

    assert vars(raw.load)[METADATA_ATTRIBUTE] == {"enter": {"snap": True}}
    assert vars(raw.unload)[METADATA_ATTRIBUTE] == {"exit": True}
    assert vars(raw.run)[METADATA_ATTRIBUTE]["method"]["example"] == ["a"]
    assert raw().run("x") == "x"


def test_a_class_has_its_clocks_and_methods() -> None:
    spoken = declared(Model)

    assert spoken.kind is FunctionKind.CLASS
    assert spoken.method_names() == ("run",)
    assert (
        spoken.clocks.execution_s,
        spoken.clocks.startup_s,
        spoken.scaling.scaledown_window_s,
    ) == (7, 9, 5)


def test_an_asgi_function_is_a_web_application() -> None:
    assert declared(web).kind is FunctionKind.ASGI


def test_modals_names_of_the_knobs_mean_the_same() -> None:
    other = pilotlight.App("aliases")

    @other.function(
        name="f",
        min_containers=1,
        max_containers=4,
        buffer_containers=2,
        container_idle_timeout=30,
        allow_concurrent_inputs=5,
    )
    @_at_top_level
    def f() -> None: ...

    assert other.declarations["f"].scaling == Scaling(
        min_instances=1, max_instances=4, buffer_instances=2, scaledown_window_s=30, max_inputs=5
    )


def test_an_option_without_effect_is_named_in_a_warning() -> None:
    other = pilotlight.App("aliases")

    with pytest.warns(PilotlightWarning, match=r"region= has no effect"):
        other.function(name="f", region="eu")(_at_top_level(lambda_free))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"min_instance": 1}, "did you mean min_instances="),
        ({"volumes": {"/data": "data"}}, "str is not a pilotlight.Volume"),
        ({"volumes": {"data": VOLUME}}, "must be an absolute path"),
        ({"volumes": {"/etc/data": VOLUME}}, "belongs to the platform"),
        ({"memory": "2 pounds"}, "memory = '2 pounds'"),
        ({"gpu": ["H100", "A100:2"]}, "the same count"),
        ({"gpu": "8xH100"}, "gpu = '8xH100'"),
        ({"min_instances": 1, "keep_warm": 2}, "remove one"),
        ({"secrets": ["token"]}, "expected pilotlight.Secret"),
        ({"env": {"A": 1}}, r"env\['A'\] = 1: must be a string"),
        ({"example": 3}, "pass the arguments as a list"),
        ({"check": close_to}, "pass example= as well"),
        ({"example": [object()]}, "cannot be encoded as JSON"),
        ({"name": "9lives"}, "is not valid"),
        ({"max_instances": 100_000}, "max_instances"),
        ({"network": "host"}, "network = 'host': must be one of egress, none"),
        ({"network": "none", "block_network": True}, "remove one"),
        ({"egress": [10]}, "egress = 10: expected a list of networks"),
    ],
)
def test_a_wrong_option_is_named_with_what_would_be_right(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        pilotlight.App("wrong").function(**options)(lambda_free)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options, policies",
    [
        ({}, (FunctionNetwork.EGRESS, ())),
        ({"network": "none"}, (FunctionNetwork.NONE, ())),
        ({"block_network": True}, (FunctionNetwork.NONE, ())),
        ({"block_network": False, "egress": ["10.0.0.8"]}, (FunctionNetwork.EGRESS, ("10.0.0.8",))),
    ],
)
def test_the_network_of_a_function_is_declared(
    options: dict[str, object], policies: tuple[FunctionNetwork, tuple[str, ...]]
) -> None:
    other = pilotlight.App("networked")
    other.function(name="f", **options)(_at_top_level(lambda_free))  # type: ignore[arg-type]
    declared = other.declarations["f"].policies
    assert (declared["network"], declared["egress"]) == policies


@pytest.mark.parametrize(
    "network, egress, message",
    [
        (FunctionNetwork.NONE, ("10.0.0.8",), 'network="none" blocks all traffic'),
        (FunctionNetwork.EGRESS, ("10.0.0.1/8",), "must be an IPv4 network or address"),
        (FunctionNetwork.EGRESS, ("fd00::1",), "must be an IPv4 network or address"),
        (
            FunctionNetwork.EGRESS,
            tuple(f"10.0.0.{n}" for n in range(33)),
            "33 networks, at most 32",
        ),
    ],
)
def test_what_no_function_can_ask_for_is_refused(
    network: FunctionNetwork, egress: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(spec_of(), network=network, egress=egress)


def lambda_free() -> None: ...


def _at_top_level(function: Any) -> Any:
    function.__qualname__ = "f"
    return function


def declared(handle: Any) -> Declaration:
    """What a handle was made of; type checkers do not follow class decorators."""
    found = handle.__pilotlight__
    assert isinstance(found, Declaration)
    return found


def test_a_forgotten_parenthesis_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"write @app.function\(\)"):
        app.function(lambda_free)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"write @pilotlight.enter\(\)"):
        pilotlight.enter(lambda_free)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"write @pilotlight.method\(\)"):
        pilotlight.method(lambda_free)  # type: ignore[arg-type]


def test_a_decorator_on_the_wrong_thing_names_the_right_one() -> None:
    class Plain: ...

    with pytest.raises(InvalidInput, match=r"use @app.cls\(\)"):
        app.function()(Plain)
    with pytest.raises(InvalidInput, match=r"use @app.function\(\)"):
        app.cls()(lambda_free)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="no callable method"):
        app.cls()(Plain)
    with pytest.raises(InvalidInput, match="closer to the definition"):
        pilotlight.concurrent(max_inputs=2)(scored)
    with pytest.raises(InvalidInput, match="already declared"):
        app.function()(scored)


def test_a_function_inside_a_function_cannot_be_deployed() -> None:
    def inner() -> None: ...

    with pytest.raises(InvalidInput, match="move it to the top level"):
        app.function()(inner)
    with pytest.raises(InvalidInput, match="a lambda has no name"):
        app.function()(lambda: None)


def test_two_functions_of_one_name_are_refused_with_both_places(module: Write) -> None:
    with pytest.raises(InvalidInput, match=r"two functions named 'f'.*:5\).*:9\)"):
        module("""
            import pilotlight
            app = pilotlight.App("twice")

            @app.function()
            def f(): ...

            first = f
            @app.function()
            def f(): ...
        """)


def test_a_class_that_needs_arguments_is_refused() -> None:
    class Needy:
        def __init__(self, size: int) -> None: ...

        @pilotlight.method()
        def run(self) -> None: ...

    with pytest.raises(InvalidInput, match="__init__ requires size"):
        app.cls()(Needy)
    with pytest.raises(InvalidInput, match="pass arguments by name"):
        Model(3)  # type: ignore[call-arg]


def test_calling_a_handle_directly_names_the_two_ways() -> None:
    with pytest.raises(InvalidInput, match=r"scored.remote\(…\).*\.local\(…\)"):
        scored(1)


def test_a_method_on_a_plain_object_has_no_remote_and_says_why() -> None:
    with pytest.raises(InvalidInput, match=r"decorate it with @app.cls\(\)"):
        Undeclared().run.remote("x")
    with pytest.raises(InvalidInput, match=r"create an object first"):
        _ = Model.run
    with pytest.raises(AttributeError, match="no method or attribute 'nothing'"):
        _ = Model().nothing  # type: ignore[attr-defined]


def test_handles_travel_by_name() -> None:
    assert repr(pickle.loads(pickle.dumps(scored))) == "<Function tests/scored>"
    assert repr(pickle.loads(pickle.dumps(Model))) == "<Cls tests/Model>"
    assert repr(pickle.loads(pickle.dumps(Model()))) == "<Obj tests/Model>"
    assert pickle.loads(pickle.dumps(app)).name == "tests"


def test_the_local_object_is_entered_once_by_whichever_thread_is_first(module: Write) -> None:
    found = module("""
        import pilotlight
        app = pilotlight.App("once")

        @app.cls()
        class Counter:
            entered = 0

            @pilotlight.enter()
            def load(self):
                type(self).entered += 1

            @pilotlight.method()
            def get(self):
                return self.entered
    """)
    counter = found.Counter()
    threads = [threading.Thread(target=counter.get.local) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert counter.get.local() == 1


def test_a_subclass_of_a_declared_class_inherits_from_the_plain_one() -> None:
    class Longer(Model):
        pass

    assert Longer.__mro__[1] is declared(Model).raw


def test_names_that_modal_has_and_pilotlight_has_not_lead_to_the_way_out() -> None:
    with pytest.raises(AttributeError, match="Weights"):
        _ = pilotlight.NetworkFileSystem
    with pytest.raises(AttributeError, match="no 'Nonsense'"):
        _ = pilotlight.Nonsense


def test_a_local_entrypoint_is_kept_and_callable() -> None:
    other = pilotlight.App("entry")

    @other.local_entrypoint()
    def main(n: int = 2) -> int:
        return n

    assert main() == 2
    assert other.local_entrypoints["main"].signature.parameters["n"].annotation is int


def test_access_priority_and_tags_are_recorded_and_an_apps_tags_are_its_functions(
    module: Write,
) -> None:
    found = module("""
        import pilotlight

        app = pilotlight.App("search", tags={"team": "search", "stage": "live"})

        @app.function(access=["acme", "umbrella", "acme"], priority="batch", tags={"stage": "trial"})
        def shared() -> None: ...

        @app.cls(access="public", cors=["https://app.example", "http://localhost:5173"])
        class Everybody:
            @pilotlight.method()
            def run(self) -> None: ...

        @app.function(access="private")
        def own() -> None: ...
    """)
    shared, everybody, own = (
        found.app.declarations[name] for name in ("shared", "Everybody", "own")
    )

    assert (shared.access, everybody.access, own.access) == (("acme", "umbrella"), ("*",), ())
    assert everybody.policies["cors"] == ("https://app.example", "http://localhost:5173")
    assert (shared.priority, own.priority) == (Priority.BATCH, None)
    assert (dict(shared.tags), dict(own.tags)) == (
        {"team": "search", "stage": "trial"},
        {"team": "search", "stage": "live"},
    )


def test_what_is_deployed_says_who_may_call_it_and_what_it_is_tagged_with(
    platform: FakePlatform, module: Write
) -> None:
    found = module("""
        import pilotlight

        app = pilotlight.App("search", tags={"team": "search"})

        @app.function(access=["acme"], priority="realtime")
        def shared() -> None: ...
    """)

    found.app.deploy()

    spec = platform.function("search", "shared")
    assert (spec.access, spec.priority, spec.tags) == (
        ("acme",),
        Priority.REALTIME,
        {"team": "search"},
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"access": "acme"},
            r"access = 'acme': must be \"private\", \"public\", or a list such as \['acme'\]",
        ),
        ({"access": {"acme": 1}}, "or a list of tenant names"),
        ({"access": [1]}, "or a list of tenant names"),
        ({"priority": "urgent"}, "must be one of realtime, standard, batch"),
        ({"tags": {"team": 1}}, r"tags\['team'\] = 1: names and values must be strings"),
        ({"tags": "search"}, "tags = 'search': must be a dict"),
        ({"cors": [1]}, "cors = 1: expected a list of origins"),
    ],
)
def test_wrong_access_priority_or_tags_are_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        pilotlight.App("x").function(**options)(module_level)


def module_level() -> None:
    """Something to declare."""


def test_tags_of_an_app_are_checked() -> None:
    with pytest.raises(InvalidInput, match="names and values must be strings"):
        pilotlight.App("x", tags={"team": None})  # type: ignore[dict-item]


def test_an_automatic_window_has_a_longest_and_a_cost_of_waiting() -> None:
    scaling = resolve_options({"scaledown_window": "auto"}, concurrent=None).scaling
    assert (scaling.scaledown_window_s, scaling.waiting_cost) == (3600, 10)
    assert (
        resolve_options(
            {"scaledown_window": "auto", "waiting_cost": 2}, concurrent=None
        ).scaling.waiting_cost
        == 2
    )
    assert resolve_options({"scaledown_window": 5}, concurrent=None).scaling.waiting_cost is None
    unsaid = resolve_options({}, concurrent=None).scaling
    assert (unsaid.scaledown_window_s, unsaid.waiting_cost) == (None, None), "the platform decides"


def test_scaling_schedules_raise_the_ceiling_that_nobody_set() -> None:
    morning = pilotlight.ScalingSchedule(cron="0 8 * * *", duration_s=3600, min_instances=12)
    scaling = resolve_options({"scaling_schedule": morning}, concurrent=None).scaling
    assert (scaling.schedules, scaling.max_instances) == ((morning,), 12)
    several = resolve_options({"scaling_schedule": [morning, morning]}, concurrent=None).scaling
    assert len(several.schedules) == 2
    with pytest.raises(InvalidInput, match=r"expected pilotlight\.ScalingSchedule"):
        resolve_options({"scaling_schedule": "0 8 * * *"}, concurrent=None)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"scaledown_window": "soon"}, 'must be a number of seconds, or "auto"'),
        (
            {"scaledown_window": 5, "waiting_cost": 2},
            'waiting_cost requires scaledown_window="auto"',
        ),
        ({"scaledown_window": "auto", "waiting_cost": -1}, "waiting_cost"),
    ],
)
def test_a_window_that_says_nothing_is_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        resolve_options(options, concurrent=None)


@pytest.mark.parametrize(
    "cors, message",
    [
        (("https://app.example/",), "'https://app.example/' is not an origin"),
        (("https://App.example",), "is not an origin"),
        (("https://app.example:443",), "without the default port"),
        (("app.example",), "is not an origin"),
        (("null",), "is not an origin"),
        (("https://*.example",), "is not an origin"),
        (("ftp://app.example",), "is not an origin"),
        (("https://user@app.example",), "is not an origin"),
        (("https://app.example\n",), "is not an origin"),
        (("*", "https://app.example"), "permits every origin"),
        (tuple(f"https://a{n}.example" for n in range(33)), "33 origins, at most 32"),
    ],
)
def test_what_is_no_origin_is_refused_by_name(cors: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        spec_of(access=("*",), cors=cors)


def test_only_public_functions_permit_origins() -> None:
    with pytest.raises(InvalidInput, match='add access="public"'):
        spec_of(access=("acme",), cors=("https://app.example",))
    every = ("http://localhost:5173", "https://xn--bcher-kva.example", "http://[::1]:8080")
    assert spec_of(access=("*",), cors=every).cors == every
    assert common_origins([every, ("*",), every[:1]]) == {every[0]}
    assert common_origins([("*",), ("*",)]) == {"*"}
    assert common_origins([every, ()]) == common_origins([]) == frozenset()


@pytest.mark.parametrize(
    "gpu, kinds, count",
    [
        (None, (), 0),
        ("h100", ("H100",), 1),
        ("H100:2", ("H100",), 2),
        ("Any", ("any",), 1),
        ("h100-mig-3G.40GB", ("H100-MIG-3g.40gb",), 1),
        ("A100-MIG-1g.5gb+me", ("A100-MIG-1g.5gb+me",), 1),
        ("H100-MIG-1c.3g.40gb", ("H100-MIG-1c.3g.40gb",), 1),
        (["H100-MIG-3g.40gb", "A100", "any"], ("H100-MIG-3g.40gb", "A100", "any"), 1),
    ],
)
def test_a_gpu_is_a_kind_and_a_count_or_a_mig_instance(
    gpu: object, kinds: tuple[str, ...], count: int
) -> None:
    assert parse_gpu(gpu) == (kinds, count)


@pytest.mark.parametrize(
    "gpu, message",
    [
        ("H100:0.5", "nothing enforces a part of a GPU but MIG.*gpu='H100-MIG-1g.10gb'"),
        ("h100:.25", "nothing enforces a part of a GPU but MIG.*gpu='H100-MIG-1g.10gb'"),
        ("H100-MIG", "must name a MIG profile after -MIG-, such as 'H100-MIG-3g.40gb'"),
        ("H100-MIG-large", "must name a MIG profile after -MIG-"),
        ("H100:0", "must be 'H100', 'H100:2', 'H100-MIG-3g.40gb', 'any'"),
        (2, "must be 'H100'"),
        (["H100:2", "A100"], "all alternatives must have the same count"),
    ],
)
def test_what_is_no_gpu_is_refused_with_the_way_out(gpu: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as e:
        parse_gpu(gpu)
    assert e.value.detail["parameter"] == "gpu"


def test_a_process_has_one_mig_instance() -> None:
    with pytest.raises(InvalidInput, match=r"'H100-MIG-3g\.40gb:2': a process can use one MIG"):
        Resources(gpu=("A100", "H100-MIG-3g.40gb"), gpu_count=2)
    with pytest.raises(InvalidInput, match="gpu_count"):
        Resources(gpu=("H100",), gpu_count=-1)


def test_retries_are_for_named_exceptions() -> None:
    policy = pilotlight.Retries(1, exceptions=[ConnectionError, "requests.Timeout", InvalidInput])
    named = ("ConnectionError", "requests.Timeout", "pilotlight.errors.InvalidInput")
    assert policy.exceptions == named
    wrong: Any = [3]
    with pytest.raises(InvalidInput, match="must be types of exceptions, or their names"):
        pilotlight.Retries(1, exceptions=wrong)
