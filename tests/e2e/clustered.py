"""A platform whose functions are pods, for tests: a cluster in a process of its own
(tests/fakes/knative), the four real processes on it.

The node agent of the supervisor plays the DaemonSet's part: it serves the pods of the cluster's
only node."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.harness import PATIENCE_S, STOP_S, PlatformUnderTest, platform_up, wait_for
from tests.fakes.authority import Authority
from tests.fakes.knative.kubelet import EVICT, MISSING_IMAGES
from tests.fakes.plain_http import NO_TLS
from tests.fakes.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
IMAGE = f"registry.example/pilotlight/runtime@sha256:{'0' * 64}"
NODE = "node-0"
MERGE = "application/merge-patch+json"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterUnderTest:
    """A running cluster and its platform."""

    directory: Path
    api: httpx.Client
    platform: PlatformUnderTest

    def pods(self, function: str, *, ending: bool = False) -> list[Json]:
        """Pods of a function, ready or not; with `ending` those that are on their way out, too,
        which answer until they are gone."""
        items: list[Json] = self.api.get(
            "/api/v1/pods", params={"labelSelector": f"pilotlight.dev/function={function}"}
        ).json()["items"]
        living = [pod for pod in items if pod["status"].get("phase") != "Failed"]
        return [pod for pod in living if ending or not pod["metadata"].get("deletionTimestamp")]

    def ready(self, function: str) -> list[Json]:
        """Those that Kubernetes calls ready."""
        return [pod for pod in self.pods(function) if _is_ready(pod)]

    def wait_zero(self, function: str) -> None:
        """Until its last pod is gone."""
        try:
            wait_for(lambda: not self.pods(function, ending=True), f"{function} to be at zero")
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.story()}") from e

    def annotate(self, path: str, name: str, value: str | None) -> None:
        """Set an annotation of the object at a path."""
        body = {"metadata": {"annotations": {name: value}}}
        self.api.patch(
            path, content=json.dumps(body), headers={"content-type": MERGE}
        ).raise_for_status()

    def log(self, pod: Json) -> str:
        """What its container printed until now."""
        metadata = pod["metadata"]
        return self.api.get(
            f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/log"
        ).text

    def evict(self, pod: Json, message: str) -> None:
        """As a node does that runs out of something: its container is killed at once."""
        self.annotate(
            f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}",
            EVICT,
            message,
        )

    @contextlib.contextmanager
    def without_images(self, message: str) -> Iterator[None]:
        """No image can be pulled for a while."""
        path = f"/api/v1/nodes/{NODE}"
        self.annotate(path, MISSING_IMAGES, json.dumps({IMAGE: message}))
        try:
            yield
        finally:
            self.annotate(path, MISSING_IMAGES, "{}")

    def go_away(self, seconds: float) -> None:
        """The API server, with everything that is connected to it cut; returns when that has
        begun."""
        with socket.create_connection(
            (self.api.base_url.host, self.api.base_url.port or 80), timeout=PATIENCE_S
        ) as witness:
            self.api.post("/-/away", json={"seconds": seconds}).raise_for_status()
            with contextlib.suppress(ConnectionError):
                assert witness.recv(1) == b""

    def story(self) -> str:
        """What the cluster and its platform say of themselves, for a failure's message."""
        lines = [
            (self.directory / "cluster.log").read_text(errors="replace")[-3000:],
            self.platform.log_tails(),
        ]
        pods = self.api.get("/api/v1/pods").json()["items"]
        lines += [f"--- {pod['metadata']['name']} {json.dumps(pod['status'])}" for pod in pods]
        lines += [
            f"--- {file}\n{file.read_text(errors='replace')[-1000:]}"
            for file in self.directory.glob("node-*/*/log")
        ]
        return "\n".join(lines)

    def is_up(self) -> bool:
        """Whether the API server answers."""
        try:
            return self.api.get("/readyz").status_code == 200
        except httpx.HTTPError:
            return False


def _is_ready(pod: Json) -> bool:
    return any(
        one["type"] == "Ready" and one["status"] == "True"
        for one in pod["status"].get("conditions", ())
    )


def pods_that_answer(platform: PlatformUnderTest, *, callers: int = 6) -> set[str]:
    """Call `podded/where` from so many callers at once, each once and again until two pods have
    answered; those that have."""
    pods: set[str] = set()
    until = time.monotonic() + PATIENCE_S

    def call() -> None:
        while True:
            answer = platform.post("podded/where", {"seconds": 1.5})
            assert answer.status_code == 200, answer.text
            pods.add(answer.json())
            if len(pods) > 1 or time.monotonic() > until:
                return

    with ThreadPoolExecutor(callers) as pool:
        for calling in [pool.submit(call) for _ in range(callers)]:
            calling.result()
    return pods


@contextlib.contextmanager
def cluster_up(**settings: object) -> Iterator[ClusterUnderTest]:
    """A cluster and a platform on it; `settings`: of section `cluster`."""
    directory = Path(tempfile.mkdtemp(prefix="plk"))
    directory.chmod(0o755)
    try:
        with _cluster(directory) as said, contextlib.ExitStack() as stack:
            node_path = str(directory / "node")
            cluster = {
                "kubeconfig": said["kubeconfig"],
                "wake_url": said["wake_url"],
                "node_path": node_path,
                "runtime_image": IMAGE,
            }
            agents = f"127.0.0.1:{free_port()}"
            tls = Authority().issue(directory / "tls", "127.0.0.1")
            os.environ["NODE_NAME"] = NODE  # what the chart's DaemonSet sets
            stack.callback(os.environ.pop, "NODE_NAME", None)
            platform = stack.enter_context(
                platform_up(
                    platform={
                        "fleet": "knative",
                        "tls_cert": str(tls.cert),
                        "tls_key": str(tls.key),
                        "tls_ca": str(tls.ca),
                    },
                    activator={"agents_listen": agents},
                    cluster={**cluster, **settings},
                    snapshotter={"pods": node_path, "activators": f"https://{agents}"},
                    prices={"gpu_s": {"H100": "0.001"}},
                )
            )
            api = stack.enter_context(httpx.Client(base_url=said["api"], verify=NO_TLS, timeout=60))
            yield ClusterUnderTest(directory=directory, api=api, platform=platform)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _cluster(directory: Path) -> Iterator[dict[str, str]]:
    argv = [
        sys.executable,
        "-m",
        "tests.fakes.knative",
        "--directory",
        str(directory),
        "--speed",
        "4",
        "--grace",
        "2",
    ]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'functions'}:{ROOT}"}
    with (directory / "cluster.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=env)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (directory / "cluster.log").read_text()[-4000:]
        yield json.loads(line)
    finally:
        process.terminate()
        process.wait(STOP_S)
        process.stdout.close()
