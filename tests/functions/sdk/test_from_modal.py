"""The ported file of docs/from-modal.md: it imports, its specs say what Modal's names mean, and it
runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.packaging.app_loader import load_app
from pilotlight.packaging.build import build
from pilotlight.sdk.app import App
from pilotlight.spec.function import FunctionKind
from tests.fakes.fake_platform import FakePlatform

ROOT = Path(__file__).parents[3]


@pytest.fixture(name="app")
def _app() -> Iterator[App]:
    path = list(sys.path)
    yield load_app(str(ROOT / "examples/from_modal.py"))
    sys.path[:] = path
    del sys.modules["from_modal"]


def test_its_specs_are_what_modals_names_mean(app: App) -> None:
    specs = {spec.name: spec for spec in build(app).functions}

    classifier = specs["Classifier"]
    assert classifier.kind is FunctionKind.CLASS
    assert classifier.resources.memory_bytes == 512 * 1024**2
    scaling = classifier.scaling
    assert (
        scaling.max_inputs,
        scaling.target_inputs,
        scaling.min_instances,
        scaling.max_instances,
    ) == (8, 4, 0, 4)
    assert (scaling.scaledown_window_s, classifier.clocks.execution_s) == (60, 30)
    assert classifier.env == {"TOKENIZERS_PARALLELISM": "false"}
    assert (specs["shout"].scaling.max_instances, specs["shout"].clocks.execution_s) == (2, 10)
    assert specs["countdown"].methods[0].is_generator
    assert {spec.image for spec in specs.values()} == {classifier.image}


def test_its_entrypoint_runs(
    app: App, platform: FakePlatform, capsys: pytest.CaptureFixture[str]
) -> None:
    with app.run():
        app.local_entrypoints["main"]()

    assert capsys.readouterr().out.splitlines() == [
        "one: 2",
        "many: [2, -1, 0]",
        "stars: ['HEY HEY', 'HO']",
        "stream: [3, 2, 1]",
        "later: DONE",
    ]


def test_its_import_is_the_only_line_that_names_pilotlight() -> None:
    lines = (ROOT / "examples/from_modal.py").read_text().splitlines()

    assert [line for line in lines if "pilotlight" in line] == ["import pilotlight as modal"]


def test_the_document_names_every_option_that_is_accepted_or_refused() -> None:
    from pilotlight.sdk.options import _ALIASES, _IGNORED, _REFUSED

    document = (ROOT / "docs/from-modal.md").read_text()

    assert [name for name in (*_ALIASES, *_IGNORED, *_REFUSED) if name not in document] == []
