"""Proofs of what a web server of user code declares."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from activator.llm.openai.errors import ModelNotFound
from activator.llm.openai.request import OpenAIRequest
from activator.llm.request_size import CHAT
from activator.llm.token_admission import TokenAdmission
from activator.routing.call_target import CallTarget
from pilotlight.controller.deployments.fleet_checks import check_cluster
from pilotlight.errors import InvalidInput
from pilotlight.spec.function import FunctionKind, FunctionSpec
from pilotlight.spec.quotas import Plan
from pilotlight.spec.record_json import from_json
from pilotlight.spec.web_servers import OpenAIServerSpec, WebServerSpec
from pilotlight.worker.engine import server_worker
from pilotlight.worker.engine.errors import ServerHung, WrongAnswer
from pilotlight.worker.engine.web_server import PortInUse, WebServer
from pilotlight.worker.process.secrets import Secrets
from pilotlight.worker.snapshot.snapshot_blockers import BlockerScan
from pilotlight.worker.user_code.source_locations import SocketOrigins, UserSource
from pilotlight.worker.user_code.target import Target
from tests.activator.llm.asking import Crowd, Door, chat
from tests.fakes.fed_platform import spec
from tests.fakes.routes import target_of
from tests.options.contract import proves
from tests.options.test_function_spec import launch_of
from tests.options.world import SETTINGS, launched


class Serving:
    """User code that starts a server, as a thread, at `port`; it answers with these statuses, and
    with the last one from then on."""

    def __init__(self, *statuses: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.statuses = list(statuses)
        self.asked: list[str] = []
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        serving = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                serving.asked.append(self.path)
                left = serving.statuses
                self.send_response(left.pop(0) if len(left) > 1 else left[0])
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def end(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


@pytest.fixture
def serving() -> Iterator[Serving]:
    made = Serving(503, 503, 200)
    yield made
    made.end()


def started(
    declared: WebServerSpec, serving: Serving, directory: Path, fleet: str
) -> tuple[WebServer, BlockerScan]:
    """The server of a worker that the node was given, and the scan of its process."""
    made = spec(kind=FunctionKind.ASGI, web_server=declared)
    launch = launch_of(made, directory, fleet)
    assert launch.spec.web_server is not None
    user = UserSource(launch.code, by_value=False)
    target = Target(methods={}, server=serving.start)
    server = WebServer(launch, launch.spec.web_server, target, Secrets((), user, snapshot=True))
    return server, server_worker.scene_of(launch, SocketOrigins(user))


@proves("WebServerSpec.port", "WebServerSpec.example")
def test_it_is_ready_when_its_example_is_answered_at_its_port(
    fleet: str, serving: Serving, tmp_path: Path
) -> None:
    declared = WebServerSpec(port=serving.port, startup_s=10.0, example="/ready")
    server, scene = started(declared, serving, tmp_path, fleet)
    server.start(scene, within_s=10.0)
    assert serving.asked == ["/ready"] * 3

    server.prove()
    serving.statuses = [404]
    with pytest.raises(WrongAnswer, match=r"/ready, with status 404; before .* answered 200"):
        server.prove()
    with pytest.raises(PortInUse, match=f"listens at port {serving.port} before"):
        server.start(scene, within_s=10.0)


@proves("WebServerSpec.startup_s")
def test_it_has_a_time_to_become_ready(fleet: str, serving: Serving, tmp_path: Path) -> None:
    serving.statuses = [503]
    declared = WebServerSpec(port=serving.port, startup_s=0.3, example="/")
    server, scene = started(declared, serving, tmp_path, fleet)
    with pytest.raises(ServerHung, match=r"not ready within 0\.3 s: it answered GET / with .* 503"):
        server.start(scene, within_s=10.0)


@pytest.mark.parametrize("port", [8012, 8080, 8095, 9090])
def test_ports_of_a_pod_are_refused_on_a_cluster(port: int) -> None:
    made = spec(kind=FunctionKind.ASGI, web_server=WebServerSpec(port=port))
    with pytest.raises(InvalidInput, match=f"web_server = {port}: .*pod") as refused:
        check_cluster([made], Plan(), SETTINGS)
    assert refused.value.detail["parameter"] == "web_server"
    check_cluster(
        [spec(web_server=WebServerSpec(port=8000), kind=FunctionKind.ASGI)], Plan(), SETTINGS
    )


@proves("OpenAIServerSpec.models", "OpenAIServerSpec.max_model_len")
async def test_a_server_that_speaks_openais_api_is_a_language_model(fleet: str) -> None:
    def target(openai: OpenAIServerSpec | None) -> CallTarget:
        made = spec(kind=FunctionKind.ASGI, web_server=WebServerSpec(port=8000, openai=openai))
        return target_of(from_json(FunctionSpec, launched(made, fleet).entry))

    def sent(to: CallTarget, adapter: str = "") -> str:
        wanted = OpenAIRequest(CHAT, chat())
        wanted.adapter = adapter
        return str(json.loads(wanted.written_for(to))["model"])

    with pytest.raises(ModelNotFound, match="is not a language model"):
        sent(target(None))
    plain = target(OpenAIServerSpec())
    assert sent(plain) == plain.function
    several = target(OpenAIServerSpec(models=("a", "b"), max_model_len=64))
    assert [sent(several), sent(several, "b")] == ["a", "b"]
    admission = TokenAdmission(waiting_of=Crowd().of)
    door = Door(several.spec)
    with pytest.raises(InvalidInput) as refused:
        await admission.admit(door.entry(), CHAT, chat(max_tokens=65), began_ns=0)
    assert refused.value.detail["bound"] == "max_model_len"


def test_a_thread_is_no_process_that_ended(serving: Serving, tmp_path: Path) -> None:
    server, scene = started(
        WebServerSpec(port=serving.port, startup_s=10.0), serving, tmp_path, "local"
    )
    server.start(scene, within_s=10.0)  # any answer, also 503
    assert serving.asked == ["/"]
