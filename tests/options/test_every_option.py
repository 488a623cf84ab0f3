"""No option without a proof, on either fleet."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

import pytest
import yaml

import tests.options
from scripts.documentation import ROOT
from tests.options import contract
from tests.options.contract import BOTH, PROOFS, ROOTS, SOURCES, required


@pytest.fixture(scope="module", autouse=True)
def _all_proofs() -> None:
    for module in pkgutil.iter_modules(tests.options.__path__):
        importlib.import_module(f"tests.options.{module.name}")


def test_every_option_has_a_proof_on_each_fleet() -> None:
    missing = [
        f"{option} on the {fleet} fleet"
        for option in sorted(required())
        for fleet in BOTH
        if (option, fleet) not in PROOFS
    ]
    assert not missing, f"{len(missing)} without an effect or a refusal: {', '.join(missing)}"


def test_every_proof_is_of_an_option_that_exists() -> None:
    assert sorted({option for option, _ in PROOFS} - required()) == []


def test_every_proof_uses_the_option_that_it_proves() -> None:
    """By the field's own name in the test's source, apart from the mark."""
    unused = [
        f"{test}: {option}"
        for (option, test), source in SOURCES.items()
        if option.partition(".")[2] not in source.replace(option, "")
    ]
    assert unused == []


def test_a_new_field_is_found_wherever_it_is_nested(monkeypatch: pytest.MonkeyPatch) -> None:
    inner: Any = dataclasses.make_dataclass("Inner", [("depth", int)])
    outer = dataclasses.make_dataclass(
        "Outer", [("name", str), ("inners", tuple[inner, ...]), ("maybe", inner | None)]
    )
    monkeypatch.setattr(contract, "ROOTS", (outer,))
    assert required() == {"Outer.name", "Inner.depth"}


def test_platform_yaml_has_every_setting() -> None:
    """The reference of settings is made from it."""
    sections = list(map(set, yaml.safe_load((ROOT / "platform.yaml").read_text()).values()))
    for settings in ROOTS:
        if settings.__name__.endswith("Settings"):
            assert {field.name for field in dataclasses.fields(settings)} in sections, settings
