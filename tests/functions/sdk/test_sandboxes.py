"""`Sandbox` of the SDK: the function that its options make, and what is refused before a
request."""

from __future__ import annotations

from typing import Any

import pytest

import pilotlight
from pilotlight.errors import InvalidInput
from pilotlight.packaging.sandbox import SandboxCreation
from pilotlight.sdk.sandboxes.process import SandboxProcess
from pilotlight.spec.function import FunctionNetwork, FunctionSpec
from pilotlight.spec.record_json import from_json, to_json

APP = pilotlight.App("agent", env={"SHARED": "1"})


def function_of(**options: Any) -> FunctionSpec:
    made = SandboxCreation((), APP, options)
    from pilotlight.packaging.build import build

    with build(made.declared(made.function), name=made.app) as built:
        (spec,) = built.functions
    assert spec.name == made.function
    return spec


def test_the_function_of_a_sandbox_has_its_options() -> None:
    spec = function_of(cpu=2, memory=512, block_network=True, max_instances=3, buffer_instances=2)
    assert spec.sandbox
    assert (spec.resources.cpu, spec.resources.memory_bytes) == (2, 512 * 1024**2)
    assert spec.network is FunctionNetwork.NONE
    scaling = spec.scaling
    assert (scaling.max_inputs, scaling.max_instances, scaling.buffer_instances) == (1, 3, 2)
    assert (spec.clocks.queue_s, spec.clocks.execution_s) == (60, 86_402)
    assert spec.env == {"SHARED": "1"}


def test_equal_options_are_one_function_and_others_another() -> None:
    plain = function_of().name
    assert function_of(timeout=9, idle_timeout=3, workdir="/tmp/x", env={"A": "1"}).name == plain
    others = {
        function_of(**options).name
        for options in ({"cpu": 2}, {"block_network": True}, {"image": pilotlight.Image.python()})
    }
    assert len({plain, *others}) == 4
    assert plain.startswith("sandbox-")


@pytest.mark.parametrize(
    "options, parameter",
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": 86_401}, "timeout"),
        ({"idle_timeout": "1"}, "idle_timeout"),
        ({"env": {"A": 1}}, "env"),
        ({"image": "debian"}, "image"),
        ({"min_instances": 1}, "min_instances"),
        ({"wat": 1}, "wat"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidInput, match=parameter) as raised:
        pilotlight.Sandbox.create(app=APP, **options)
    assert raised.value.detail["parameter"] == parameter


def test_a_sandbox_needs_an_app_and_a_command_consists_of_texts() -> None:
    with pytest.raises(InvalidInput, match="name an app"):
        pilotlight.Sandbox.create()
    words: Any = (["ls", "-l"],)
    with pytest.raises(InvalidInput, match="one for each argument"):
        pilotlight.Sandbox.from_id("req-1").exec(*words)


@pytest.mark.parametrize(
    "change, parameter",
    [
        ({"access": ["*"]}, "access"),
        ({"kind": "asgi"}, "kind"),
        ({"module": "evil", "qualname": "run"}, "entry"),
        ({"scaling": {"max_inputs": 2}}, "max_inputs"),
        ({"scaling": {"keep_asleep_s": 5}}, "keep_asleep"),
        ({"resources": {"gpu": ["any"], "gpu_count": 1}}, "gpu"),
        ({"idempotent": True}, "idempotent"),
    ],
)
def test_a_spec_that_is_no_sandbox_is_refused(change: dict[str, Any], parameter: str) -> None:
    body = to_json(function_of())
    for name, value in change.items():
        body[name] = {**body[name], **value} if isinstance(value, dict) else value
    with pytest.raises(InvalidInput) as raised:
        from_json(FunctionSpec, body)
    assert raised.value.detail["parameter"] == parameter


def test_what_a_sandbox_left_unread_follows_what_was_read() -> None:
    process = SandboxProcess("req-1", 0)
    process.stdout.append(b"one ")
    result = {"stdout": "b25lIHR3bw==", "stdout_end": 7, "stderr": "", "returncode": 3}
    process.finish(result)  # "one two", of which the beginning is known
    assert (process.stdout.read(), process.stderr.read(), process.wait()) == ("one two", "", 3)


def test_a_handle_may_be_passed_on() -> None:
    import pickle

    sandbox = pilotlight.Sandbox.from_id("req-1")
    assert pickle.loads(pickle.dumps(sandbox)).object_id == "req-1"
    assert repr(sandbox) == "<Sandbox req-1>"
