"""A platform whose functions are pods, for tests: a cluster in a process of its own
(tests/fakes/knative), the four real processes on it.

The node agent of the supervisor plays the DaemonSet's part: it serves the pods of the cluster's
only node."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pilotlight.kubernetes.names import manager_of
from pilotlight.kubernetes.settings import DEFAULT_NAMESPACE, ClusterSettings
from tests.e2e.harness import PATIENCE_S, STOP_S, PlatformUnderTest, platform_up, wait_for
from tests.fakes.api_client import api_client, token_in
from tests.fakes.authority import Authority
from tests.fakes.installed_chart import InstalledChart, installed_chart
from tests.fakes.knative.kubelet import AWAY, EVICT, MISSING_IMAGES
from tests.fakes.ports import free_port
from tests.fakes.tcp_link import TcpLink, linked

ROOT = Path(__file__).resolve().parents[2]
IMAGE = f"registry.example/pilotlight/runtime@sha256:{'0' * 64}"
NODE = "node-0"
MERGE = "application/merge-patch+json"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeService:
    """A service of a real cluster's node. `pid_file`: of its process; `start`: a command of the
    shell that starts it again, and returns."""

    pid_file: Path
    start: str

    def kill(self) -> None:
        """kill -9."""
        os.kill(int(self.pid_file.read_text()), signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterUnderTest:
    """A running cluster and its platform.

    Attributes:
        api: its API server, past `link`.
        link: between the platform and the API server.
        namespace: the platform's own.
        manager: value of the label by which the platform's objects are known.
        is_real: whether it is a real one, with its own pace and without faults to choose.
        services: of a real one's node, those that tests may kill: `kubelet`, `containerd`.
    """

    directory: Path
    api: httpx.Client
    link: TcpLink
    namespace: str
    manager: str
    platform: PlatformUnderTest
    is_real: bool
    services: Mapping[str, NodeService] = field(default_factory=dict)

    @property
    def patience_s(self) -> float:
        """How long to look for something that is bound to happen: Knative scales to zero after a
        window and a grace, a minute and a half together."""
        return 240.0 if self.is_real else PATIENCE_S

    def items(self, path: str, selector: str) -> list[Json]:
        """Objects of the platform."""
        labels = f"pilotlight.dev/managed-by={self.manager},{selector}"
        answer = self.api.get(path, params={"labelSelector": labels}).raise_for_status()
        return list(answer.json()["items"])

    def pods(self, function: str, *, ending: bool = False) -> list[Json]:
        """Pods of a function, ready or not; with `ending` those that are on their way out, too,
        which answer until they are gone."""
        items = self.items("/api/v1/pods", f"pilotlight.dev/function={function}")
        living = [pod for pod in items if pod["status"].get("phase") != "Failed"]
        return [pod for pod in living if ending or not pod["metadata"].get("deletionTimestamp")]

    def ready(self, function: str) -> list[Json]:
        """Those that Kubernetes calls ready."""
        return [pod for pod in self.pods(function) if _is_ready(pod)]

    def wait_zero(self, function: str) -> None:
        """Until its last pod is gone."""
        try:
            wait_for(
                lambda: not self.pods(function, ending=True),
                f"{function} to be at zero",
                timeout_s=self.patience_s,
            )
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.story()}") from e

    def annotate(self, path: str, name: str, value: str | None) -> None:
        """Set an annotation of the object at a path."""
        body = {"metadata": {"annotations": {name: value}}}
        self.api.patch(
            path, content=json.dumps(body), headers={"content-type": MERGE}
        ).raise_for_status()

    def add_pull_secret(self, namespace: str, name: str, login: Path) -> None:
        """A secret with which nodes pull images; `login`: a `config.json` of docker's."""
        data = {".dockerconfigjson": base64.b64encode(login.read_bytes()).decode()}
        body = {
            "metadata": {"name": name},
            "type": "kubernetes.io/dockerconfigjson",
            "data": data,
        }
        path = f"/api/v1/namespaces/{namespace}/secrets"
        self.api.post(path, json=body).raise_for_status()

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

    @contextlib.contextmanager
    def service_away(self, name: str) -> Iterator[None]:
        """A service of the node is killed, and is started again at the end."""
        service, path = self.services.get(name), f"/api/v1/nodes/{NODE}"
        if service is None:
            self.annotate(path, AWAY, "true")
        else:
            service.kill()
        try:
            yield
        finally:
            if service is None:
                self.annotate(path, AWAY, None)
            else:
                subprocess.run(["sh", "-c", service.start], check=True, timeout=60)

    def may_kill(self, name: str) -> bool:
        """Whether tests may kill a service of the node: the cluster that they bring along has a
        kubelet and no container runtime."""
        return name in self.services if self.is_real else name == "kubelet"

    @contextlib.contextmanager
    def outage(self, *, is_silent: bool = False) -> Iterator[None]:
        """The platform does not reach the API server: everything that is connected to it is cut, or
        (`is_silent`) stays connected and hears nothing."""
        if is_silent:
            self.link.hold(holds=True)
        else:
            self.link.cut()
        try:
            yield
        finally:
            if is_silent:
                self.link.hold(holds=False)
            else:
                self.link.mend()

    def story(self) -> str:
        """What the cluster and its platform say of themselves, for a failure's message."""
        log = self.directory / "cluster.log"
        lines = [
            log.read_text(errors="replace")[-3000:] if log.exists() else "",
            self.platform.log_tails(),
        ]
        pods = self.api.get("/api/v1/pods").json()["items"]
        for pod in pods:
            ends = pod["metadata"].get("deletionTimestamp", "never")
            name = pod["metadata"]["name"]
            lines.append(f"--- {name} deleted: {ends} {json.dumps(pod['status'])}")
        lines += [
            f"--- {file}\n{file.read_text(errors='replace')[-1000:]}"
            for file in self.directory.glob("node-*/*/log")
        ]
        return "\n".join(lines)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RealCluster:
    """A cluster that somebody else runs, on whose node the tests run.

    Attributes:
        settings: section `cluster` of a platform.yaml: at least `wake_url` and `runtime_image`.
        node: name of the node.
        services: section `services` of that file: of the node, those that tests may kill.
    """

    kubeconfig: Path
    settings: Json
    node: str
    services: Mapping[str, NodeService] = field(default_factory=dict)

    @classmethod
    def given(cls, config: pytest.Config) -> RealCluster | None:
        """By `--kubeconfig`, `--cluster-config` and $NODE_NAME; None: the tests bring theirs."""
        kubeconfig, file = config.getoption("--kubeconfig"), config.getoption("--cluster-config")
        if kubeconfig is None:
            return None
        if file is None:
            pytest.fail(
                "--kubeconfig: needs --cluster-config FILE too (docs/how-to/test-on-a-cluster.md)"
            )
        return cls.read(Path(kubeconfig), Path(file))

    @classmethod
    def read(cls, kubeconfig: Path, file: Path) -> RealCluster:
        """`file`: a platform.yaml with the section. Raises OSError, KeyError."""
        document = yaml.safe_load(file.read_text())
        services = {
            name: NodeService(pid_file=Path(one["pid_file"]), start=one["start"])
            for name, one in document.get("services", {}).items()
        }
        return cls(
            kubeconfig=kubeconfig.resolve(),
            settings=document["cluster"],
            node=os.environ.get("NODE_NAME", NODE),
            services=services,
        )


@contextlib.contextmanager
def cluster_up(
    real: RealCluster | None,
    redis_url: str | None = None,
    /,
    *,
    node: Mapping[str, object] | None = None,
    **settings: object,
) -> Iterator[ClusterUnderTest]:
    """A cluster and a platform on it, of the tests' own unless there is a `real` one; `settings`:
    of section `cluster`, `node`: of section `snapshotter`. Controller and activators have the
    chart's rights and admission policies alone. With `restore_into_pods` nodes make snapshots, and
    copies of them in a directory. With `redis_url` there are two activators, and functions call no
    others: the two would need an address each for that."""
    directory = Path(tempfile.mkdtemp(prefix="plk"))
    directory.chmod(0o755)
    try:
        with contextlib.ExitStack() as stack:
            given = stack.enter_context(
                _fake(directory) if real is None else of_its_own(real, directory)
            )
            link, text = stack.enter_context(
                linked(given.kubeconfig.read_text(), str(given.kubeconfig.parent))
            )
            api = stack.enter_context(api_client(given.kubeconfig))
            chart = stack.enter_context(chart_on(given, settings))
            through = directory / "kubeconfig-linked"
            through.touch(mode=0o600)
            through.write_text(chart.kubeconfig(text, directory / "tokens"))
            address = _address_of(api, given.node)
            agents = f"{address}:{free_port()}" if redis_url is None else None
            pair = {"activators": 2, "redis_url": redis_url} if redis_url is not None else {}
            tls = Authority().issue(directory / "tls", address)
            os.environ["NODE_NAME"] = given.node  # what the chart's DaemonSet sets
            stack.callback(os.environ.pop, "NODE_NAME", None)
            section = {**given.settings, **settings, "kubeconfig": str(through)}
            restores = bool(section.get("restore_into_pods"))
            platform = stack.enter_context(
                platform_up(
                    platform={
                        "fleet": "knative",
                        "tls_cert": str(tls.cert),
                        "tls_key": str(tls.key),
                        "tls_ca": str(tls.ca),
                        **({"blobs": str(directory / "blobs")} if restores else {}),
                    },
                    activator={"agents_listen": agents, **pair},
                    cluster=section,
                    snapshotter={
                        "pods": section["node_path"],
                        "activators": f"https://{agents}" if agents is not None else None,
                        "restore_into_pods": restores,
                        **(node or {}),
                    },
                    prices={"gpu_s": {"H100": "0.001"}},
                )
            )
            namespace = str(section.get("namespace", DEFAULT_NAMESPACE))
            yield ClusterUnderTest(
                directory=directory,
                api=api,
                link=link,
                namespace=namespace,
                manager=manager_of(ClusterSettings(namespace=namespace)),
                platform=platform,
                is_real=real is not None,
                services=given.services,
            )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def chart_on(given: RealCluster, settings: Mapping[str, object]) -> Iterator[InstalledChart]:
    """The chart's rights and policies in this cluster, for a platform of these settings."""
    section = {**given.settings, **settings}
    with (
        api_client(given.kubeconfig) as api,
        api_client(given.kubeconfig, is_anonymous=True) as anonymous,
        installed_chart(
            api,
            anonymous,
            section.get("namespace", DEFAULT_NAMESPACE),
            section,
            admin_token=token_in(given.kubeconfig),
        ) as chart,
    ):
        yield chart


def _address_of(api: httpx.Client, node: str) -> str:
    """Where activators see the node's agent: Kubernetes says of each pod that it is there."""
    status = api.get(f"/api/v1/nodes/{node}").raise_for_status().json()["status"]
    return next(str(one["address"]) for one in status["addresses"] if one["type"] == "InternalIP")


@contextlib.contextmanager
def of_its_own(real: RealCluster, directory: Path) -> Iterator[RealCluster]:
    """The cluster for a platform that has its own namespace and those of its tenants, all deleted
    at the end."""
    name = f"pl-{uuid.uuid4().hex[:8]}"
    settings = {
        **real.settings,
        "namespace": name,
        "namespace_prefix": f"{name}-fn-",
        "node_path": str(directory / "node"),
    }
    with api_client(real.kubeconfig) as api:
        made = api.post("/api/v1/namespaces", json={"metadata": {"name": name}})
        made.raise_for_status()
        try:
            yield replace(real, settings=settings)
        finally:
            for one in api.get("/api/v1/namespaces").json()["items"]:
                if one["metadata"]["name"].startswith(name):
                    api.delete(f"/api/v1/namespaces/{one['metadata']['name']}")


@contextlib.contextmanager
def _fake(directory: Path) -> Iterator[RealCluster]:
    with _cluster(directory) as said:
        settings = {
            "wake_url": said["wake_url"],
            "node_path": str(directory / "node"),
            "runtime_image": IMAGE,
        }
        yield RealCluster(kubeconfig=Path(said["kubeconfig"]), settings=settings, node=NODE)


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
        "--quiet",
        "4",
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
