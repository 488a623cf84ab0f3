"""Proofs of what a web server of user code declares."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pilotlight.controller.deployments.fleet_checks import check_cluster
from pilotlight.errors import InvalidInput
from pilotlight.spec.function import FunctionKind
from pilotlight.spec.quotas import Plan
from pilotlight.spec.web_servers import WebServerSpec
from pilotlight.worker.engine import server_worker
from pilotlight.worker.engine.errors import ServerHung, WrongAnswer
from pilotlight.worker.engine.web_server import PortInUse, WebServer
from pilotlight.worker.process.secrets import Secrets
from pilotlight.worker.snapshot.snapshot_blockers import BlockerScan
from pilotlight.worker.user_code.source_locations import SocketOrigins, UserSource
from pilotlight.worker.user_code.target import Target
from tests.fakes.fed_platform import spec
from tests.options.contract import proves
from tests.options.test_function_spec import launch_of
from tests.options.world import SETTINGS


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


def test_a_thread_is_no_process_that_ended(serving: Serving, tmp_path: Path) -> None:
    server, scene = started(
        WebServerSpec(port=serving.port, startup_s=10.0), serving, tmp_path, "local"
    )
    server.start(scene, within_s=10.0)  # any answer, also 503
    assert serving.asked == ["/"]
