"""A secret read before the snapshot is refused by name, in the user's own code only, and at no cost
afterwards."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.worker.process.secrets import Secrets, SecretTooEarly
from pilotlight.worker.user_code.source_locations import UserSource
from tests.fakes.fake_shim import call, function_spec
from tests.fakes.freezing_shim import FreezingShim


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Secrets]:
    os.environ.pop("TOKEN", None)
    secrets = Secrets(["TOKEN"], UserSource(str(tmp_path), by_value=False), snapshot=True)
    secrets.guard()
    yield secrets
    secrets.lift()


def run_as_user(directory: Path, text: str) -> object:
    """Evaluate an expression as if it stood in the user's app.py."""
    return eval(compile(text, str(directory / "app.py"), "eval"), {"os": os, "sys": sys})


@pytest.mark.parametrize(
    "read",
    [
        "os.environ['TOKEN']",
        "os.environ.get('TOKEN')",
        "os.getenv('TOKEN', 'x')",
        "'TOKEN' in os.environ",
        "os.environ.pop('TOKEN', 1)",
    ],
)
def test_every_way_to_read_one_is_refused_by_name(
    guarded: Secrets, tmp_path: Path, read: str
) -> None:
    with pytest.raises(
        SecretTooEarly,
        match=r"app.py:1 reads the secret TOKEN, .* @enter\(snap=False\), or in the call",
    ):
        run_as_user(tmp_path, read)


def test_other_names_and_whole_copies_are_read_as_ever(guarded: Secrets, tmp_path: Path) -> None:
    assert run_as_user(tmp_path, "os.environ.get('NOT_THERE', 5)") == 5
    assert run_as_user(tmp_path, "'TOKEN' in dict(os.environ)") is False
    assert run_as_user(tmp_path, "os.environ['PATH']") == os.environ["PATH"]
    with pytest.raises(KeyError):
        run_as_user(tmp_path, "os.environ['NOT_THERE']")


def test_a_library_that_looks_for_one_finds_nothing(guarded: Secrets) -> None:
    assert os.environ.get("TOKEN") is None  # this file is not in the user's directory
    assert os.path.expandvars("$TOKEN") == "$TOKEN"
    with pytest.raises(KeyError):
        os.environ["TOKEN"]


def test_a_variable_that_the_user_set_is_no_secret(guarded: Secrets, tmp_path: Path) -> None:
    run_as_user(tmp_path, "os.environ.__setitem__('TOKEN', 'mine')")
    assert run_as_user(tmp_path, "os.environ['TOKEN']") == "mine"
    del os.environ["TOKEN"]


def test_afterwards_the_environment_is_of_its_own_class(guarded: Secrets, tmp_path: Path) -> None:
    environ = os.environ
    guarded.lift()
    guarded.lift()
    assert type(os.environ) is os._Environ
    assert os.environ is environ
    assert run_as_user(tmp_path, "os.environ.get('TOKEN')") is None


def test_without_secrets_nothing_is_touched(tmp_path: Path) -> None:
    Secrets([], UserSource(str(tmp_path), by_value=False), snapshot=True).guard()
    assert type(os.environ) is os._Environ


def test_the_message_fits_a_function_without_snapshots(tmp_path: Path) -> None:
    secrets = Secrets(["TOKEN"], UserSource(str(tmp_path), by_value=False), snapshot=False)
    secrets.guard()
    try:
        with pytest.raises(
            SecretTooEarly, match="is set only when the instance starts to serve"
        ) as raised:
            run_as_user(tmp_path, "os.environ['TOKEN']")
        assert "snapshot" not in str(raised.value)
    finally:
        secrets.lift()


def test_code_that_travelled_by_value_is_the_users(tmp_path: Path) -> None:
    user = UserSource(str(tmp_path), by_value=True)
    assert user.holds("/home/ada/analysis.py")
    assert user.holds("<ipython-input-3-abc>")
    assert not user.holds(json.__file__)
    assert not user.holds(pytest.__file__)


@pytest.mark.parametrize(
    "place, phase", [("import", "import"), ("enter", "enter"), ("example", "warmup")]
)
def test_a_start_fails_with_the_name_of_the_secret(place: str, phase: str) -> None:
    code = f"""
        import os, pilotlight
        app = pilotlight.App("demo")
        def read(when):
            return os.environ["API_KEY"] if when == "{place}" else ""
        read("import")

        @app.cls()
        class Service:
            @pilotlight.enter()
            def load(self): read("enter")
            @pilotlight.method(example=[])
            def ask(self): return read("example")
    """
    from pilotlight.spec.function import FunctionKind, MethodSpec

    spec = function_spec(
        qualname="Service", kind=FunctionKind.CLASS, methods=[MethodSpec(name="ask")]
    )
    with FreezingShim({"app.py": code}, spec, secret_variables=["API_KEY"]) as shim:
        failed = shim.receive()
        assert (failed["event"], failed["phase"]) == ("failed", phase)
        assert failed["error"]["message"].startswith("app.py:5 reads the secret API_KEY")


def test_a_secret_reaches_the_instance_and_no_earlier_life() -> None:
    code = """
        import os
        early = "API_KEY" in dict(os.environ)
        def f(): return [early, os.environ["API_KEY"], type(os.environ).__name__]
    """
    with FreezingShim({"app.py": code}, function_spec(), secret_variables=["API_KEY"]) as shim:
        shim.freeze()
        assert call(shim.start("i-1", {"API_KEY": "k1"})) == [False, "k1", "_Environ"]
        assert call(shim.start("i-2", {"API_KEY": "k2"}, op="serve")) == [False, "k2", "_Environ"]
