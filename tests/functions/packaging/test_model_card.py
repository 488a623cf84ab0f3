"""A deploy reads the model card among the weights, and refuses features that the model was not
trained with, before anything is sent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pilotlight
from pilotlight.errors import InvalidInput
from pilotlight.packaging.app_loader import load_app
from pilotlight.packaging.build import MAX_CARD_BYTES, MODEL_CARD, Build, build

TRAINED = pilotlight.FeatureSchema({"age": int})
APP = """
import pilotlight

app = pilotlight.App("cards")

@app.function(
    weights=pilotlight.Weights("./model"),
    features=pilotlight.FeatureSchema({features}),
    card=pilotlight.ModelCard(task="scoring"{card}),
)
def score(age: int) -> float: ...
"""


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.startswith("cards_"):
            del sys.modules[name]


def built(directory: Path, *, features: str = '{"age": int}', card: str = "") -> Build:
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "weights.bin").write_bytes(b"w" * 1000)
    name = f"cards_{abs(hash((directory, features, card)))}"
    source = APP.replace("{features}", features).replace("{card}", card)
    (directory / f"{name}.py").write_text(source)
    return build(load_app(str(directory / f"{name}.py")))


def test_the_card_of_the_weights_is_that_of_the_function(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    pilotlight.ModelCard(features=TRAINED.hash).save(tmp_path / "model" / MODEL_CARD)
    with built(tmp_path) as found:
        (spec,) = found.functions
        assert (spec.card.task, spec.card.features) == ("scoring", TRAINED.hash)


def test_other_features_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    pilotlight.ModelCard(features=TRAINED.hash).save(tmp_path / "model" / MODEL_CARD)
    with pytest.raises(InvalidInput, match=f"trained with {TRAINED.hash[:12]}"):
        built(tmp_path, features='{"age": float}')


def test_a_card_that_contradicts_that_of_the_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    pilotlight.ModelCard(features="0" * 64).save(tmp_path / "model" / MODEL_CARD)
    with pytest.raises(InvalidInput, match="are not those of model_card"):
        built(tmp_path, card=f', features="{TRAINED.hash}"')


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"features": "sha"}', "must be the hash"),
        (f'"{"x" * MAX_CARD_BYTES}"', "at most 262144"),
    ],
)
def test_a_card_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / MODEL_CARD).write_text(text)
    with pytest.raises(InvalidInput, match=message):
        built(tmp_path)


@pytest.mark.parametrize("text", ["", '{"features": ["age"]}', "[]"])
def test_weights_that_say_nothing_are_not_compared(tmp_path: Path, text: str) -> None:
    (tmp_path / "model").mkdir()
    if text:
        (tmp_path / "model" / MODEL_CARD).write_text(text)
    with built(tmp_path) as found:
        assert found.functions[0].card.features == ""
