"""`pilotlight loadtest` from its arguments to its report, against a server that plays the
platform."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pilotlight.cli.main import build
from pilotlight.loadtest import runner

PATIENCE_S = 30.0
SPEC = {"name": "f", "kind": "function", "methods": [{"name": "", "example": {"x": 1}}]}


class Platform(ThreadingHTTPServer):
    """One function with one revision. `on_call` hears of each call."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: list[Any] = []
        self._counting = threading.Lock()
        self.on_call: Callable[[int], None] = lambda _: None

    def count(self, body: Any) -> int:
        """One more call; which it is."""
        with self._counting:
            self.calls.append(body)
            return len(self.calls)


class Handler(BaseHTTPRequestHandler):
    """GET answers with the revision, POST with an empty object."""

    protocol_version = "HTTP/1.1"
    server: Platform

    def do_GET(self) -> None:
        is_list = self.path.partition("?")[0].endswith("/revisions")
        row = {"revision": "v1-abc", "weight": 100}
        self._answer({"revisions": [row], "next": None} if is_list else {**row, "spec": SPEC})

    def do_POST(self) -> None:
        self.server.on_call(
            self.server.count(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        )
        self._answer({})

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def _answer(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        for name, value in (
            ("content-type", "application/json"),
            ("content-length", str(len(data))),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def platform() -> Iterator[Platform]:
    with Platform() as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def loadtest(platform: Platform, *words: str) -> Result:
    env = {
        "PILOTLIGHT_URL": f"http://127.0.0.1:{platform.server_port}",
        "PILOTLIGHT_API_KEY": "secret",
        "PILOTLIGHT_CONFIG": os.devnull,
    }
    return CliRunner().invoke(
        build(), ["loadtest", "app/f", *words], env=env, prog_name="pilotlight"
    )


def test_a_report_tells_what_was_sent_and_what_came_back(
    platform: Platform, tmp_path: Path
) -> None:
    done = loadtest(
        platform,
        "--rate",
        "50",
        "--duration",
        "0.2s",
        "--arrivals",
        "even",
        "--json",
        "--out",
        str(tmp_path / "out.json"),
    )

    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["requests"] == found["good"] == len(platform.calls) == found["due"]
    assert platform.calls[0] == {"x": 1}
    assert json.loads((tmp_path / "out.json").read_text()) == found


@pytest.mark.parametrize("option", ["--out", "--picture"])
def test_nothing_is_sent_where_the_report_could_not_be_written(
    platform: Platform, tmp_path: Path, option: str
) -> None:
    done = loadtest(
        platform, "--rate", "5", "--duration", "1s", option, str(tmp_path / "nowhere" / "x")
    )

    assert (done.exit_code, platform.calls) == (1, [])
    assert option in done.stderr


def test_a_test_that_is_interrupted_tells_what_came_back(
    platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, is_over, send = threading.Semaphore(0), threading.Event(), runner._LoadTest.send

    async def sending(test: Any, *one: Any) -> None:
        await send(test, *one)
        noted.release()

    def on_call(count: int) -> None:
        """The third one interrupts when the two before it are noted; it is not answered, and none
        behind it."""
        if count == 3:
            assert all(noted.acquire(timeout=PATIENCE_S) for _ in range(2))
            os.kill(os.getpid(), signal.SIGINT)
        if count >= 3:
            is_over.wait(PATIENCE_S)

    monkeypatch.setattr(runner._LoadTest, "send", sending)
    platform.on_call = on_call
    words = (
        "--rate",
        "5",
        "--duration",
        "60s",
        "--arrivals",
        "even",
        "--out",
        str(tmp_path / "out.json"),
        "--json",
    )
    done = loadtest(platform, *words)
    is_over.set()

    assert done.exit_code == 130, done.output
    found = json.loads(done.stdout)
    assert found["requests"] == 2
    assert found["interrupted"] is True
    assert found["elapsed_s"] < 60
    assert json.loads((tmp_path / "out.json").read_text()) == found
