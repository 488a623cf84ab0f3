"""Answers of a sandbox whose code has replaced its server: they reach the sandbox's caller, which
has a key of the platform."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import pilotlight
from pilotlight.cli.commands.calls.sandbox import execute
from pilotlight.cli.core.session import CommonOptions, Session
from pilotlight.client import sessions
from pilotlight.client.client import Client
from pilotlight.client.errors import error_from_response
from pilotlight.client.sandbox_answers import process_output
from pilotlight.client.transport import path_segment
from pilotlight.errors import PilotlightError, WorkerCrashed
from pilotlight.profile import Profile
from pilotlight.sdk.sandboxes.process import SandboxProcess

GOOD = {"process": 1, "stdout": "", "stderr": "", "returncode": None, "is_ended": False}
ELSEWHERE = "../../../calls/req-2:cancel?"
"""A path segment with which `…/processes/{n}/kill` is `/v1/calls/req-2:cancel`."""


class Hostile:
    """Answers every request with `answer`, and records what it was asked."""

    def __init__(self) -> None:
        self.answer: Any = GOOD
        self.paths: list[str] = []
        hostile = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hostile.paths.append(self.path)
                self.rfile.read(int(self.headers.get("content-length", 0)))
                is_bytes = isinstance(hostile.answer, bytes)
                body = hostile.answer if is_bytes else json.dumps(hostile.answer).encode()
                kind = "application/octet-stream" if is_bytes else "application/json"
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, format: str, *args: object) -> None:
                """Keep the test's output short."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def profile(self) -> Profile:
        return Profile(url=f"http://127.0.0.1:{self.server.server_address[1]}", api_key="pl_k")


@pytest.fixture(name="hostile")
def _hostile() -> Iterator[Hostile]:
    hostile = Hostile()
    thread = threading.Thread(
        target=hostile.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        with sessions.use_profile(hostile.profile):
            yield hostile
        sessions.close()
    finally:
        hostile.server.shutdown()
        thread.join()
        hostile.server.server_close()


def test_a_client_follows_dots_in_paths() -> None:
    """Why a number that is none is dangerous."""
    path = f"/v1/sandboxes/req-1/processes/{ELSEWHERE}/kill"
    with httpx.Client(base_url="http://platform") as client:
        assert client.build_request("POST", path).url.path == "/v1/calls/req-2:cancel"


def test_a_sandbox_does_not_choose_what_its_caller_requests(hostile: Hostile) -> None:
    hostile.answer = {**GOOD, "process": ELSEWHERE}
    with pytest.raises(WorkerCrashed, match="process"):
        pilotlight.Sandbox.from_id("req-1").exec("true").kill()
    assert hostile.paths == ["/v1/sandboxes/req-1/exec"]


def test_nor_what_the_command_line_requests(hostile: Hostile) -> None:
    hostile.answer = {**GOOD, "process": ELSEWHERE}

    class OwnSession(Session):
        def client(self) -> Client:
            return Client(hostile.profile)

    with pytest.raises(WorkerCrashed, match="process"):
        execute(OwnSession(options=CommonOptions()), "req-1", ["true"])
    assert hostile.paths == ["/v1/sandboxes/req-1/exec"]


def test_a_name_of_dots_is_a_segment_of_a_path() -> None:
    with httpx.Client(base_url="http://platform") as client:
        for name in (".", "..", "a/../b", "..."):
            url = client.build_request("GET", f"/v1/dicts/{path_segment(name)}/x").url
            assert url.raw_path.count(b"/") == 4, name
    assert path_segment("a.b") == "a.b"


@pytest.mark.parametrize(
    "change",
    [
        {"process": -1},
        {"process": True},
        {"process": 10**30},
        {"stdout": "no base64"},
        {"stdout": None},
        {"stderr": 5},
        {"returncode": "0"},
        {"is_ended": True},  # without a return code
    ],
)
def test_what_is_no_output_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WorkerCrashed):
        process_output({**GOOD, **change})
    nothing: tuple[Any, ...] = ([], None, {}, b"x")
    for none in nothing:
        with pytest.raises(WorkerCrashed):
            process_output(none)
        with pytest.raises(WorkerCrashed):
            SandboxProcess("req-1", 0).finish(none)


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "..", ".", "", "a\0b", 7])
def test_listed_names_lead_nowhere_else(hostile: Hostile, name: Any) -> None:
    sandbox = pilotlight.Sandbox.from_id("req-1")
    hostile.answer = {"entries": ["ok", name]}
    with pytest.raises(WorkerCrashed, match="entries"):
        sandbox.ls("/out")
    hostile.answer = {"entries": ["ok", "..."]}
    assert sandbox.ls("/out") == ("ok", "...")


def test_a_file_is_read_in_pieces_of_the_requested_size(hostile: Hostile) -> None:
    hostile.answer = {"is_directory": False, "size_bytes": 3}
    file = pilotlight.Sandbox.from_id("req-1").open("x", "rb")
    hostile.answer = b"abc"
    assert file.read(3) == b"abc"
    with pytest.raises(WorkerCrashed, match="content"):
        file.read(2)
    hostile.answer = {"no": "bytes"}
    with pytest.raises(WorkerCrashed, match="content"):
        file.read(2)


@pytest.mark.parametrize("number", ["x", 10**40, 99999, -1])
def test_an_error_number_that_is_none_is_no_os_error(number: Any) -> None:
    from pilotlight.errors import NotFound
    from pilotlight.sdk.sandboxes.files import send_for_path
    from pilotlight.sdk.sandboxes.requests import sandbox_step

    steps = send_for_path(sandbox_step("req-1", "GET", "files", path="x"), "x")
    next(steps)
    with pytest.raises(NotFound):
        steps.throw(NotFound("no", errno=number))


@pytest.mark.parametrize(
    "members",
    [
        {"message": "x", "self": "y", "retry_after_s": "soon"},
        {"status": "many"},
        {"status": {}},
        {"type": ["x"]},
        {"error": {"traceback": "t"}, "message": "x"},
    ],
)
def test_a_problem_that_is_none_is_still_an_error_of_the_platform(members: dict[str, Any]) -> None:
    document = {"type": "invalid-input", "status": 400, "detail": "said", **members}
    all_headers: tuple[dict[str, str], ...] = ({}, {"retry-after": "1"})
    for headers in all_headers:
        error = error_from_response(400, headers, json.dumps(document).encode())
        assert "said" in str(error)
    assert isinstance(error_from_response(400, {}, b"[" * 100_000), PilotlightError)


class _Terminal:
    """Standard output that is a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        self.text = ""
        self.raw = b""
        self.buffer = self
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, data: str | bytes) -> None:
        if isinstance(data, str):
            self.text += data
        else:
            self.raw += data

    def flush(self) -> None:
        """Nothing is buffered."""


def test_output_of_a_sandbox_does_not_speak_to_the_terminal() -> None:
    from pilotlight.core.terminal import ForeignOutput

    hostile = "ü\x1b]0;owned\x07\r\n".encode()
    shown: Any = _Terminal(is_terminal=True)
    stream = ForeignOutput(shown)
    for at in range(len(hostile)):  # also a character in two pieces
        stream.write(hostile[at : at + 1])
    assert (shown.text, shown.raw) == ("ü\\x1b]0;owned\\x07\\r\n", b"")
    piped: Any = _Terminal(is_terminal=False)
    ForeignOutput(piped).write(hostile)
    assert (piped.text, piped.raw) == ("", hostile)
