"""`guard=pilotlight.Guard(…)`: what it declares, where, and what it says when it is used wrongly."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import pilotlight
from pilotlight.errors import InvalidInput
from pilotlight.packaging.build import build
from pilotlight.sdk.options import resolve_options
from pilotlight.spec.engines import GuardSpec
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json, to_json
from tests.fakes.routes import spec_of

APP = """
import pilotlight

app = pilotlight.App("chat")

@app.function()
def judge(stage: str, text: str) -> dict:
    return {"allow": True}

guard = pilotlight.Guard(function=judge)

@app.function(guard=guard)
@pilotlight.web_server(8000, openai=True)
def serve() -> None: ...
"""


def test_a_guard_is_a_policy_of_a_declaration() -> None:
    guard = pilotlight.Guard(patterns=["email"], expressions={"ticket": "TCK-[0-9]+"})
    assert guard == GuardSpec(patterns=("email",), expressions={"ticket": "TCK-[0-9]+"})
    assert resolve_options({"guard": guard}, concurrent=None).policies["guard"] == guard
    assert resolve_options({}, concurrent=None).policies["guard"] is None


def test_a_function_of_the_same_app_moves_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guarded_chat.py").write_text(APP)
    monkeypatch.syspath_prepend(str(tmp_path))
    declared = importlib.import_module("guarded_chat")
    assert declared.guard.function == "chat/judge"
    assert pilotlight.Guard(function="safety/Judge.ask").function == "safety/Judge.ask"
    with build(declared.app) as everything:
        (spec,) = [one for one in everything.functions if one.name == "serve"]
    assert spec.guard == GuardSpec(function="judge")
    assert from_json(FunctionSpec, to_json(spec)) == spec


@pytest.mark.parametrize(
    "given, says",
    [
        ({"patterns": "email"}, "must be a list"),
        ({"words": [1]}, "must be a list"),
        ({"expressions": {"a": 1}}, "must be a dict"),
        ({"function": print}, "a function of an app"),
        ({"function": pilotlight.Function.from_name("a", "b", tenant="other")}, "another tenant"),
        ({}, "checks nothing"),
    ],
)
def test_wrong_guards_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        pilotlight.Guard(**given)


def test_only_language_models_have_guards() -> None:
    with pytest.raises(InvalidInput, match="no language model"):
        spec_of(guard=GuardSpec(words=("x",)))
    with pytest.raises(InvalidInput, match=r"expected pilotlight\.Guard"):
        resolve_options({"guard": "email"}, concurrent=None)
