"""A function has the files of a web server mounted: fetched, hashed and sent by the deploy, without
a copy on the user's disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import PlatformUnderTest
from tests.fakes.web_files import Served, WebFiles

CONTENT = {"model.bin": os.urandom(20_000_000), "config.json": b"{}"}
APP = """
import hashlib

import pilotlight

app = pilotlight.App("web-weights")
model = pilotlight.Weights([{urls}], name="web-model")


@app.function(weights=model, scaledown_window=1)
def digest(path: str) -> str:
    return hashlib.sha256((model.path / path).read_bytes()).hexdigest()
"""


@pytest.fixture(name="server")
def _server() -> Iterator[WebFiles]:
    with WebFiles() as server:
        server.files["/m/model.bin"] = Served(content=CONTENT["model.bin"], etag='"1"')
        server.files["/m/config.json"] = Served(content=CONTENT["config.json"], is_ranged=False)
        yield server


def test_weights_from_the_web_reach_the_function(
    platform: PlatformUnderTest, server: WebFiles, tmp_path: Path
) -> None:
    urls = ", ".join(f'"{server.url}/m/{name}"' for name in CONTENT)
    (tmp_path / "web_weights.py").write_text(APP.format(urls=urls))

    platform.cli("deploy", str(tmp_path / "web_weights.py"), "--no-wait")

    for name, content in CONTENT.items():
        assert (
            platform.result("web-weights/digest", {"path": name})
            == hashlib.sha256(content).hexdigest()
        )
    shown = platform.cli("weights", "list").stdout
    assert "web-model" in shown
    platform.cli("app", "delete", "web-weights", "--yes")
