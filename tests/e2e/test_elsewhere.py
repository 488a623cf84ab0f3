"""Controller and activators with nothing in common but a key, certificates and a Redis, as in the
pods of a cluster. Real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotlight.controller.server.bootstrap import first_admin_key
from tests.e2e.harness import wait_for
from tests.fakes.authority import Authority, settings_of
from tests.fakes.plain_http import NO_TLS
from tests.fakes.ports import free_port
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, spec

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
HOSTS = ("127.0.0.10", "127.0.0.11")
"""Of a-0 and a-1: each has the loopback address of its own that `sibling_url` names."""
PATIENCE_S = 30.0


@dataclass
class Pods:
    """The processes, each over a home of its own."""

    key: str
    controller: subprocess.Popen[bytes]
    activators: list[httpx.Client]


def _start(
    stack: contextlib.ExitStack, module: str, home: Path, platform: str, section: str, *words: str
) -> subprocess.Popen[bytes]:
    home.mkdir(exist_ok=True)
    config = home / "platform.yaml"
    config.write_text(f"platform: {{home: {home}, {platform}}}\n{section}\n")
    reading, writing = os.pipe()
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'functions'}:{ROOT}"}
    command = [
        sys.executable,
        "-m",
        module,
        "--config",
        str(config),
        "--ready-fd",
        str(writing),
        *words,
    ]
    child = subprocess.Popen(command, env=environ, pass_fds=(writing,))
    stack.callback(child.wait, PATIENCE_S)
    stack.callback(child.kill)
    os.close(writing)
    assert os.read(reading, 1) == b"\n"
    os.close(reading)
    return child


@pytest.fixture(name="pods", scope="module")
def _pods(redis_server: str) -> Iterator[Pods]:
    authority, port, siblings = Authority(), free_port(), free_port()
    with contextlib.ExitStack() as stack:
        root = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="pl", ignore_cleanup_errors=True)
            )
        )
        home = root / "c"
        home.mkdir()
        tls = settings_of(authority.issue(root / "tls-c", "127.0.0.1"))
        (home / "platform.yaml").write_text(f"platform: {{home: {home}}}\n")
        key = first_admin_key(home / "platform.yaml")
        assert key is not None
        listen = f"controller: {{listen: 127.0.0.1:{port}, metrics_listen: null}}"
        controller = _start(stack, "pilotlight.controller", home, tls, listen)
        activators = []
        for index, host in enumerate(HOSTS):
            public = free_port()
            tls = settings_of(authority.issue(root / f"tls-{index}", host))
            platform = (
                f"{tls}, controller_url: 'https://127.0.0.1:{port}', activator_key_file: "
                f"{home / 'activator.key'}"
            )
            among = (
                f"activators: 2, redis_url: '{redis_server}', sibling_url: "
                f"'https://127.0.0.1{{index}}:{siblings}'"
            )
            section = (
                f"activator: {{listen: 127.0.0.1:{public}, metrics_listen: null, {among}, "
                f"sibling_listen: '{host}:{siblings}'}}"
            )
            _start(stack, "activator", root / f"a{index}", platform, section, "--index", str(index))
            headers = {"authorization": f"Bearer {key}"}
            client = httpx.Client(
                base_url=f"http://127.0.0.1:{public}",
                headers=headers,
                timeout=PATIENCE_S,
                verify=NO_TLS,
            )
            activators.append(stack.enter_context(client))
        yield Pods(key=key, controller=controller, activators=activators)


def _wait_known(client: httpx.Client, function: str) -> dict[str, Any]:
    """Submit as soon as the route is known there."""

    def submitted() -> dict[str, Any] | None:
        answer = client.post(f"/v1/functions/{function}:submit", json={})
        return dict(answer.json()) if answer.status_code == 202 else None

    return wait_for(submitted, f"{function} at the other activator")


def test_a_deploy_and_a_call_cross_machines_with_certificates(pods: Pods) -> None:
    first, second = pods.activators
    # control API, passed on over mutual TLS
    assert first.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE).status_code == 200
    answer = first.post("/v1/apps/shop/deploy", json={"functions": [spec("hello")]})
    assert answer.status_code == 200, answer.text
    call = _wait_known(second, "shop/hello")["id"]  # the feed brought the route there, too
    pods.controller.send_signal(signal.SIGSTOP)  # whoever answers now, it is not the controller
    try:
        found = first.get(f"/v1/calls/{call}")
    finally:
        pods.controller.send_signal(signal.SIGCONT)
    assert found.status_code == 200, found.text
    assert found.json()["state"] in ("QUEUED", "RUNNING")
    assert first.get("/v1/calls/req-of-nobody").status_code == 404
