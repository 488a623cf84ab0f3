"""The typical kinds of files in Modal's style: each runs with only its import changed.

On a platform in this process; `tests/examples` runs on a real one what the platform itself does:
bound functions, web applications and files of an image."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotlight.client import sessions
from pilotlight.packaging.app import App
from pilotlight.packaging.app_loader import load_app
from pilotlight.packaging.build import build
from tests.fakes.fake_platform import API_KEY, FakePlatform

ROOT = Path(__file__).parents[3]
KINDS = ROOT / "examples/modal_style"
HEADERS = {"authorization": f"Bearer {API_KEY}"}

SAID = {
    "hello": ["here: 144", "there: 144", "many: 30"],
    "generators": ["words: ['one', 'two', 'three']", "ticks: [0, 1, 2]"],
    "class_with_state": ["score: 2", "rank: ['great day', 'good day', 'bad day']"],
    "parameters": [
        "Hallo, Ada!",
        "Bonjour, dear Ada!",
        "['Hallo, Bo!', 'Bonjour, Bo!']",
    ],
    "with_options": ["small: 285", "large: 332833500"],
    "endpoint_on_class": ["vowels: 3"],
    "batching": ["doubled: [0, 2, 4, 6, 8]", "embedded: [97, 98, 99] [120, 121, 122]"],
    "schedules": ["report of 05 January"],
    "retries": [
        "answered: ValueError('bad input')",
        "raised: reset",
        "collected: [ValueError('bad input'), ConnectionError('reset')]",
    ],
    "job_queue": [
        "later: {'words': 6}",
        "all: [{'words': 2}, {'words': 1}]",
        "and: [{'words': 3}]",
    ],
    "spawn_map": ["stages: [(1, True), (2, True)]"],
    "with_secrets": ["set: [True, True, True, True]"],
    "async_calls": ["one: 2", "total: 6", "later: 6"],
    "several_files/main": ["difference: 2"],
}
"""What `main` prints, of the kinds that have one and need nothing but this process."""
WEB = ("endpoints", "asgi", "wsgi")
OTHERS = (
    *("dict_and_queue", "inference", "local_files", "lookup", "registry_image", "volume"),
    *("sandbox", "web_server"),
)


@pytest.fixture(name="fake")
def _fake() -> Iterator[FakePlatform]:
    path = list(sys.path)
    with FakePlatform() as fake:
        with sessions.use_profile(fake.profile()):
            yield fake
        sessions.close()
    sys.path[:] = path
    for name in [name for name in sys.modules if name.partition(".")[0] == "modal_style"]:
        del sys.modules[name]


def kind(name: str) -> App:
    return load_app(str(KINDS / f"{name}.py"))


def run_main(app: App) -> None:
    with app.run(show_output=False):
        done = app.local_entrypoints["main"]()
        if inspect.isawaitable(done):
            asyncio.run(_awaited(done))


async def _awaited(done: Any) -> Any:
    return await done


def test_all_kinds_are_here() -> None:
    files = {path.relative_to(KINDS).with_suffix("").as_posix() for path in KINDS.rglob("*.py")}
    parts = {"__init__", "several_files/__init__", "several_files/text"}

    assert files - parts == {*SAID, *WEB, *OTHERS}
    assert len(files - parts) == 25
    assert len({*SAID, *WEB, *OTHERS}) >= 20


@pytest.mark.parametrize("name", SAID)
def test_a_kind_runs(name: str, fake: FakePlatform, capsys: pytest.CaptureFixture[str]) -> None:
    app = kind(name)
    run_main(app) if name != "with_secrets" else _run_with_secrets(app, fake)

    assert [line for line in capsys.readouterr().out.splitlines() if "squaring" not in line] == (
        SAID[name]
    )


def _run_with_secrets(app: App, fake: FakePlatform) -> None:
    """A worker has them in its environment."""
    with pytest.MonkeyPatch.context() as patch, app.run(show_output=False) as running:
        spec = fake.function(running.name, "show")
        for secret in spec.secrets:
            for name, value in fake.secrets["main", secret].items():
                patch.setenv(name, value)
        for name, value in spec.env.items():
            patch.setenv(name, value)
        app.local_entrypoints["main"]()


def test_a_kind_with_functions_as_endpoints_answers(fake: FakePlatform) -> None:
    app = kind("endpoints")
    functions = sys.modules["modal_style.endpoints"]
    with app.run(show_output=False):
        greet, order, shout = (
            getattr(functions, name).get_web_url() for name in ("greet", "order", "shout")
        )
        assert httpx.get(greet, params={"user": "Ada"}, headers=HEADERS).json() == {
            "greeting": "Hello, Ada!"
        }
        assert httpx.post(greet, headers=HEADERS).status_code == 405
        answer = httpx.post(order, json={"item": "tea", "count": 2}, headers=HEADERS)
        assert answer.json() == {"ordered": ["tea", "tea"]}
        assert httpx.post(order, json={"count": 2}, headers=HEADERS).status_code == 422
        assert "swagger" in httpx.get(f"{order}/docs", headers=HEADERS).text
        assert httpx.get(f"{greet}/docs", headers=HEADERS).status_code == 404
        assert httpx.post(shout, json={"text": "hey"}, headers=HEADERS).json() == "HEY"
    assert httpx.get(greet, params={"user": "Ada"}, headers=HEADERS).status_code == 404


def test_a_class_has_an_endpoint_beside_its_methods(fake: FakePlatform) -> None:
    app = kind("endpoint_on_class")
    counter = sys.modules["modal_style.endpoint_on_class"].Counter
    with app.run(show_output=False):
        url = counter().web.get_web_url()
        assert url == counter.web.get_web_url()
        assert httpx.get(url, params={"text": "aha"}, headers=HEADERS).json() == {"vowels": 2}
    assert {spec.name for spec in build(app).functions} == {"Counter", "Counter-web"}


def test_a_web_application_starts_background_work(fake: FakePlatform) -> None:
    app = kind("asgi")
    with app.run(show_output=False):
        url = sys.modules["modal_style.asgi"].web.get_web_url()
        assert httpx.get(url, headers=HEADERS).json() == {"status": "ok"}
        call = httpx.post(f"{url}/jobs", params={"text": "abc"}, headers=HEADERS).json()["call_id"]
        assert httpx.get(f"{url}/jobs/{call}", headers=HEADERS).json() == {"result": "cba"}


def test_a_flask_application_answers(fake: FakePlatform) -> None:
    app = kind("wsgi")
    with app.run(show_output=False):
        url = sys.modules["modal_style.wsgi"].site.get_web_url()
        assert httpx.get(f"{url}/", headers=HEADERS).text == "Hello from Flask"
        assert httpx.post(f"{url}/echo", json=[1], headers=HEADERS).json() == [1]


def test_a_deployed_app_is_used_by_name(fake: FakePlatform) -> None:
    environment = {
        **os.environ,
        "PILOTLIGHT_URL": fake.url,
        "PILOTLIGHT_API_KEY": API_KEY,
        "PYTHONPATH": str(ROOT / "functions"),
    }
    output = subprocess.run(
        [sys.executable, str(KINDS / "lookup.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert output.stdout.splitlines() == [
        "app: style-lookup",
        "sum: 5",
        "powers: 32 9",
        "missing: not found",
    ], output.stderr
    assert "deploying style-lookup" in output.stderr


@pytest.mark.slow  # imports torch
def test_a_model_is_imported_in_the_image(
    fake: FakePlatform, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(kind("inference"))

    assert capsys.readouterr().out.splitlines() == ["shape: [1, 2]", "wider: [3, 2]"]


def test_an_image_begins_with_that_of_a_registry() -> None:
    (spec,) = build(kind("registry_image")).images.values()
    assert spec.steps[0] == {"op": "from", "image": "debian:trixie-slim"}
    assert spec.python == "3.11"


def test_only_the_import_names_pilotlight() -> None:
    for path in KINDS.rglob("*.py"):
        lines = [line for line in path.read_text().splitlines() if "pilotlight" in line]
        assert set(lines) <= {
            "import pilotlight as modal",
            "from pilotlight.functions import FunctionCall, gather",
        }, path
