"""docs/how-to/from-modal.md: its ported file imports, its specs say what Modal's names mean, and it
runs; its table, and those of docs/reference/modal.md, are what the SDK has and refuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pilotlight
from pilotlight.packaging.app import App
from pilotlight.packaging.app_loader import load_app
from pilotlight.packaging.build import build
from pilotlight.sdk.image import Image
from pilotlight.sdk.unsupported import NOT_HERE, NotSupported
from pilotlight.spec.function import FunctionKind
from tests.fakes.fake_platform import FakePlatform
from tests.functions.sdk.test_modal_style import OTHERS, SAID, WEB

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs/how-to/from-modal.md").read_text()
NAMES = (ROOT / "docs/reference/modal.md").read_text()


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


def test_the_document_names_every_option_that_is_accepted() -> None:
    from pilotlight.sdk.options import _ALIASES, IGNORED

    assert [name for name in (*_ALIASES, *IGNORED) if name not in NAMES] == []


def test_the_documents_table_is_what_is_refused() -> None:
    table = NAMES.partition("## What is refused by name")[2]
    said = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", table, re.MULTILINE))

    assert said == NOT_HERE


@pytest.mark.parametrize("name", [n for n in NOT_HERE if n.isidentifier()])
def test_a_name_of_the_module_is_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(NotSupported, match=re.escape(f"{name} is not supported")) as raised:
        getattr(pilotlight, name)
    assert NOT_HERE[name] in str(raised.value)
    assert not hasattr(pilotlight, name)


@pytest.mark.parametrize("name", [n for n in NOT_HERE if re.fullmatch(r"\w+\.\w+", n)])
def test_an_attribute_is_refused_with_the_way_out(name: str) -> None:
    kind, _, attribute = name.partition(".")
    owner = pilotlight.Cls(app="a", name="b") if kind == "Cls" else getattr(pilotlight, kind)

    with pytest.raises(AttributeError, match=re.escape(f"{name} is not supported")):
        getattr(owner, attribute)


OF_FUNCTIONS = ("network_file_systems=", "proxy=", "i6pn=", "restrict_modal_access=")
OF_WEB = ("custom_domains=", "label=")
OF_RUNS = ("detach=", "environment_name=", "client=")
OF_SANDBOXES = (
    *("Sandbox.create(gpu=…)", "Sandbox.create(name=…)"),
    *("cidr_allowlist=", "encrypted_ports=", "h2_ports=", "unencrypted_ports="),
)
OF_IMAGES = re.compile(r"Image\.…\((\w+)=…\)")


def test_every_option_is_refused_with_the_way_out(tmp_path: Path) -> None:
    app = pilotlight.App("refused")
    function: Any = app.function
    run: Any = app.run
    refusals: dict[str, Callable[[], Any]] = {}
    for name in (*OF_FUNCTIONS, "max_inputs="):
        refusals[name] = partial(_declare, function, **{name[:-1]: 1})
    for name in OF_WEB:
        refusals[name] = partial(pilotlight.asgi_app, **{name[:-1]: "x"})
    for name in OF_RUNS:
        refusals[name] = partial(run, **{name[:-1]: "x"})
    for name in filter(OF_IMAGES.fullmatch, NOT_HERE):
        option = name.removeprefix("Image.…(").removesuffix("=…)")
        build: Any = Image.python().add_local_dir if option == "ignore" else Image.python().run
        arguments = (tmp_path, "/data") if option == "ignore" else ("true",)
        refusals[name] = partial(build, *arguments, **{option: [1]})
    queue: Any = pilotlight.Queue.from_name("q")
    refusals["partition_ttl="] = partial(queue.put, 1, partition_ttl=60)
    create: Any = partial(pilotlight.Sandbox.create, app=app)
    for name in OF_SANDBOXES:
        option = name.removeprefix("Sandbox.create(").rstrip("=…)")
        refusals[name] = partial(create, **{option: "x"})
    refusals["pty="] = partial(pilotlight.Sandbox.from_id("req-1").exec, "ls", pty=True)
    period: Any = pilotlight.Period
    for unit in ("months", "years"):
        refusals[f"Period({unit}=…)"] = partial(period, **{unit: 1})

    options = {n for n in NOT_HERE if not re.fullmatch(r"\w+(\.\w+)?", n)}
    assert set(refusals) == options
    for name, use in refusals.items():
        with pytest.raises(NotSupported, match=re.escape(name)):
            use()


def _declare(function: Any, **options: Any) -> None:
    function(**options)(declared)


def declared() -> None: ...


def test_the_documents_kinds_are_the_files() -> None:
    table = DOCUMENT.partition("| kind |")[2].partition("\n\n")[0]
    said = re.findall(r"^\| .+ \| `(.+)\.py` \|$", table, re.MULTILINE)

    assert set(said) == {*SAID, *WEB, *OTHERS}
