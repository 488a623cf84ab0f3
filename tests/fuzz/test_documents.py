"""What clients send to the controller as JSON, and the agent is then asked to do: deploys, images,
manifests of weights."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import strategies as st

from pilotlight.core.object_store import DirectoryStore
from pilotlight.protocol import CONTENT_PROBLEM
from snapshotter.errors import ImageBuildFailed, Unsupported
from snapshotter.images.spec import image_digest, parse_image
from tests.functions.controller.conftest import Controller, running_controller
from tests.functions.controller.parts import ManualClock
from tests.fuzz.fuzzing import Fuzzer, json_mutated, seeds

PATIENCE_S = 30.0
Send = Callable[[httpx.AsyncClient, bytes], Coroutine[Any, Any, list[httpx.Response]]]


@pytest.fixture(name="served")
def _served(tmp_path: Path, short_tmp: Path) -> Iterator[Served]:
    """The controller of the other tests, on a loop of our own: Hypothesis calls a synchronous
    function."""
    clock = ManualClock()
    running = running_controller(
        clock=clock, blobs=DirectoryStore(tmp_path / "blobs"), home=tmp_path, run=short_tmp
    )
    with asyncio.Runner() as runner:
        controller = runner.run(running.__aenter__())
        yield Served(runner, controller)
        runner.run(running.__aexit__(None, None, None))


class Served:
    """A controller to which an input is sent."""

    def __init__(self, runner: asyncio.Runner, controller: Controller) -> None:
        self._runner = runner
        self._http = controller.http

    def __call__(self, send: Send, data: bytes) -> None:
        """Raises AssertionError for an answer that no client should get."""
        with _errors() as logged:
            for answer in self._runner.run(asyncio.wait_for(send(self._http, data), PATIENCE_S)):
                assert answer.status_code < 500, (answer.status_code, answer.text[:500], logged)
                assert answer.is_success or answer.headers["content-type"] == CONTENT_PROBLEM
        assert (
            self._runner.run(asyncio.wait_for(self._http.get("/v1/whoami"), PATIENCE_S)).status_code
            == 200
        )


@contextlib.contextmanager
def _errors() -> Iterator[list[str]]:
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(self.format(record)[-1500:])

    handler = Keep(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


async def send_deploy(http: httpx.AsyncClient, data: bytes) -> list[httpx.Response]:
    """As `pilotlight deploy`."""
    return [
        await http.post(
            "/v1/apps/search/deploy", content=data, headers={"content-type": "application/json"}
        )
    ]


async def send_image(http: httpx.AsyncClient, data: bytes) -> list[httpx.Response]:
    """As `pilotlight image build`."""
    return [
        await http.post("/v1/images", content=data, headers={"content-type": "application/json"})
    ]


async def send_weights(http: httpx.AsyncClient, data: bytes) -> list[httpx.Response]:
    """As `pilotlight weights push`."""
    digest = hashlib.sha256(data).hexdigest()
    return [
        await http.put(f"/v1/blobs/{digest}", content=data),
        await http.put("/v1/weights/minilm", json={"manifest": digest}),
    ]


def check_image(data: bytes) -> None:
    """What the agent makes of a description: a plan, or one of its two errors."""
    try:
        spec = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(spec, dict):
        return
    try:
        image_digest(spec)
        plan = parse_image(spec)
    except (ImageBuildFailed, Unsupported) as e:
        str(e).encode()
    else:
        for step in plan.steps:
            step.title.encode()
            assert all(
                "\0" not in text for text in (*step.items, *step.options, step.target, step.blob)
            )
            assert ".." not in step.target.split("/")


def test_corpus_of_deploys(seed_of_deploy: bytes, served: Served) -> None:
    served(send_deploy, seed_of_deploy)


def test_corpus_of_images(seed_of_image: bytes, served: Served) -> None:
    check_image(seed_of_image)
    served(send_image, seed_of_image)


def test_corpus_of_weights(seed_of_weights_manifest: bytes, served: Served) -> None:
    served(send_weights, seed_of_weights_manifest)


def _inputs(target: str, words: tuple[str, ...] = ()) -> st.SearchStrategy[bytes]:
    found = []
    for seed in seeds(target):
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(seed)
            found.append(seed)
    return json_mutated(found, words)


def test_deploys(fuzzer: Fuzzer, served: Served) -> None:
    fuzzer.run("deploy", _inputs("deploy"), lambda data: served(send_deploy, data))


def test_images_at_the_controller(fuzzer: Fuzzer, served: Served) -> None:
    fuzzer.run(
        "image",
        _inputs("image", ("op", "pip", "run", "copy", "env", "apt")),
        lambda data: served(send_image, data),
    )


def test_images_at_the_agent(fuzzer: Fuzzer) -> None:
    fuzzer.run("image", _inputs("image", ("op", "pip", "run", "copy", "env", "apt")), check_image)


def test_manifests_of_weights_at_the_controller(fuzzer: Fuzzer, served: Served) -> None:
    fuzzer.run(
        "weights_manifest", _inputs("weights_manifest"), lambda data: served(send_weights, data)
    )
