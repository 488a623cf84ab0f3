"""Pods for the tests of the data plane: objects in the API server of the tests, each with a worker
that answers on a loopback address.

Stands where a Deployment's controller, the scheduler and a kubelet would, one step at a time as the
test says."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from activator.routing.route_table import CallTarget
from pilotlight.kubernetes import names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.kinds import POD
from pilotlight.protocol import POD_CONTROL_PORT
from tests.fakes.fake_worker import (
    Behaviour,
    FakeWorker,
    WorkerAnswer,
    WorkerRequest,
    _Connection,
    echo,
)
from tests.fakes.kubernetes.server import ApiServer

WARM_NAMESPACE = "pilotlight-warm"
STATUS = "/pilotlight/health"
END = "/pilotlight/end"
Json = dict[str, Any]


def free_loopback() -> str:
    """An address of this machine's own network that nobody else is likely to use."""
    return ".".join(
        str(part) for part in (127, *(random.SystemRandom().randint(2, 250) for _ in range(3)))
    )


class TcpWorker(FakeWorker):
    """A FakeWorker on an address."""

    def __init__(self, host: str, port: int, behaviour: Behaviour = echo) -> None:
        super().__init__(Path(f"{host}:{port}"), behaviour)
        self._host, self._port = host, port

    async def start(self) -> TcpWorker:
        """Listen."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self), self._host, self._port, reuse_address=True
        )
        return self

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])


@dataclass(kw_only=True)
class FakePod:
    """One pod.

    Attributes:
        running: calls that its worker says run in it.
        calls: what its worker was asked, looks at its status left out.
        is_ended: whether its worker was asked to exit.
    """

    name: str
    namespace: str
    uid: str
    ip: str
    body: Json
    behaviour: Behaviour
    start_kind: str = "COLD"
    running: int = 0
    is_ready: bool = False
    workers: list[TcpWorker] = field(default_factory=list)
    calls: list[WorkerRequest] = field(default_factory=list)
    probes: int = 0
    is_ended: bool = False

    async def answer(self, request: WorkerRequest) -> WorkerAnswer:
        """What the worker (and queue-proxy before it) says."""
        if request.path.startswith(STATUS):
            self.probes += 1
            if not self.is_ready:
                return WorkerAnswer(status=503)
            status = {
                "instance": self.name,
                "running": self.running,
                "start_kind": self.start_kind,
                "phases_ms": {"boot": 2.0, "enter": 1.0},
            }
            return WorkerAnswer(body=json.dumps(status).encode())
        if request.path == END:
            self.is_ended = True
            return WorkerAnswer(body=b"{}")
        self.calls.append(request)
        return await self.behaviour(request)


class PodMaker:
    """See the module. Owner: a test; `aclose` it."""

    def __init__(self, server: ApiServer, cluster: Cluster, *, behaviour: Behaviour = echo) -> None:
        self.server = server
        self.cluster = cluster
        self.behaviour = behaviour
        self.pods: dict[str, FakePod] = {}
        self._wakers: list[TcpWorker] = []

    # -- warm pods ---------------------------------------------------------------------------------
    async def warm(self, control: Behaviour) -> FakePod:
        """A warm pod that runs, and answers on its control port by `control`."""
        name = f"small-{uuid.uuid4().hex[:8]}"
        labels = {names.MANAGED_BY: "pilotlight", names.WARM_SHAPE: "small"}
        body = _pod_body(name, WARM_NAMESPACE, labels, {})
        made = self.server.put(body)
        pod = FakePod(
            name=name,
            namespace=WARM_NAMESPACE,
            uid=made["metadata"]["uid"],
            ip=free_loopback(),
            body=body,
            behaviour=self.behaviour,
        )
        self.pods[name] = pod
        pod.body["status"] |= {"phase": "Running", "podIP": pod.ip}
        pod.workers.append(await TcpWorker(pod.ip, POD_CONTROL_PORT, control).start())
        self._container(pod, {"running": {}})
        return pod

    def claimed(self, pod: FakePod, target: CallTarget, attempt: str) -> None:
        """The controller gave a warm pod to a revision."""
        metadata = pod.body["metadata"]
        del metadata["labels"][names.WARM_SHAPE]
        metadata["labels"] |= {**labels_of(target), names.PROMOTED: "small"}
        metadata["annotations"] |= {names.KEY: target.key, names.ATTEMPT: attempt}
        self._put(pod)

    # -- steps -------------------------------------------------------------------------------------
    def made(self, target: CallTarget, *, key: str | None = None) -> FakePod:
        """A pod was made: no node yet, and no address."""
        namespace, revision = revision_name_of(target)
        name = f"{revision}-deployment-{uuid.uuid4().hex[:8]}"
        labels = {**labels_of(target), names.KNATIVE_REVISION: revision}
        body = _pod_body(name, namespace, labels, {names.KEY: key or target.key})
        made = self.server.put(body)
        pod = FakePod(
            name=name,
            namespace=namespace,
            uid=made["metadata"]["uid"],
            ip=free_loopback(),
            body=body,
            behaviour=self.behaviour,
        )
        self.pods[name] = pod
        return pod

    def conditions(self, pod: FakePod, *conditions: Json) -> None:
        """Its conditions are these from now on."""
        pod.body["status"]["conditions"] = list(conditions)
        self._put(pod)

    def unschedulable(self, pod: FakePod, message: str) -> None:
        """No node takes it."""
        self.conditions(
            pod,
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": message,
            },
        )

    def waiting(
        self,
        pod: FakePod,
        reason: str,
        message: str = "",
        *,
        restarts: int = 0,
        last: Json | None = None,
    ) -> None:
        """Its container does not run."""
        self._container(
            pod, {"waiting": {"reason": reason, "message": message}}, restarts=restarts, last=last
        )

    def ended(self, pod: FakePod, *, exit_code: int = 1, reason: str = "Error") -> None:
        """Its container ended; the kubelet has not restarted it."""
        self._container(pod, {"terminated": {"exitCode": exit_code, "reason": reason}})

    def restarted(
        self,
        pod: FakePod,
        *,
        exit_code: int = 1,
        reason: str = "Error",
        message: str = "",
        restarts: int = 1,
    ) -> None:
        """Its container ended, and was started again."""
        ended = {"terminated": {"exitCode": exit_code, "reason": reason, "message": message}}
        self._container(pod, {"running": {}}, restarts=restarts, last=ended)

    async def boots(self, pod: FakePod) -> None:
        """It has an address, in its own status and in its revision's slice, and its container
        runs."""
        pod.body["status"] |= {"phase": "Running", "podIP": pod.ip}
        pod.body["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        self._container(pod, {"running": {}})
        self._slice(pod)

    async def serves(self, pod: FakePod, *, ports: tuple[int, ...] = (8080, 8012)) -> None:
        """Its worker answers; Kubernetes has not noticed yet."""
        pod.is_ready = True
        for port in ports:
            pod.workers.append(await TcpWorker(pod.ip, port, pod.answer).start())

    def called_ready(self, pod: FakePod) -> None:
        """Kubernetes calls it ready."""
        self.conditions(
            pod, {"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}
        )

    async def up(self, target: CallTarget) -> FakePod:
        """A pod that serves, known to everybody."""
        pod = self.made(target)
        await self.boots(pod)
        await self.serves(pod)
        self.called_ready(pod)
        return pod

    async def asked_to_go(self, pod: FakePod, *conditions: Json) -> None:
        """It has a deletionTimestamp, and goes when its grace is over."""
        await self.cluster.delete(POD, pod.name, pod.namespace)
        if conditions:
            self.conditions(pod, *pod.body["status"]["conditions"], *conditions)

    async def evicted(
        self, pod: FakePod, message: str = "The node was low on resource: memory."
    ) -> None:
        """The kubelet ended it."""
        pod.body["status"] |= {"phase": "Failed", "reason": "Evicted", "message": message}
        self._put(pod)
        await self.dies(pod)

    async def dies(self, pod: FakePod) -> None:
        """Its processes are gone; the cluster has not said so."""
        for worker in pod.workers:
            await worker.aclose()
        pod.workers.clear()
        pod.is_ready = False

    async def gone(self, pod: FakePod) -> None:
        """It was deleted, processes and all."""
        await self.dies(pod)
        await self.cluster.delete(POD, pod.name, pod.namespace, grace_s=0)
        self.pods.pop(pod.name, None)

    def cannot_be_made(self, target: CallTarget, message: str) -> None:
        """The revision's Deployment says why there is no pod of it; "" = it says nothing."""
        namespace, revision = revision_name_of(target)
        conditions = (
            [
                {
                    "type": "ReplicaFailure",
                    "status": "True",
                    "reason": "FailedCreate",
                    "message": message,
                }
            ]
            if message
            else []
        )
        self.server.put(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {
                    "name": f"{revision}-deployment",
                    "namespace": namespace,
                    "labels": {**labels_of(target), names.KNATIVE_REVISION: revision},
                },
                "spec": {
                    "selector": {"matchLabels": {"a": "b"}},
                    "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": []}},
                },
                "status": {"conditions": conditions},
            }
        )

    # -- Knative's activator -----------------------------------------------------------------------
    async def waker(self, on_wake: Callable[[WorkerRequest], Awaitable[WorkerAnswer]]) -> str:
        """The URL of somebody who answers as Knative's activator would."""
        worker = await TcpWorker("127.0.0.1", 0, on_wake).start()
        self._wakers.append(worker)
        return f"http://127.0.0.1:{worker.port}"

    async def aclose(self) -> None:
        """End every worker."""
        for pod in self.pods.values():
            await self.dies(pod)
        for waker in self._wakers:
            await waker.aclose()

    def _container(
        self, pod: FakePod, state: Json, *, restarts: int = 0, last: Json | None = None
    ) -> None:
        pod.body["status"]["containerStatuses"] = [
            {
                "name": "user",
                "image": "registry.example/fn",
                "state": state,
                "restartCount": restarts,
                "lastState": last or {},
            },
        ]
        if pod.namespace != WARM_NAMESPACE:
            pod.body["status"]["containerStatuses"].append(
                {
                    "name": "queue-proxy",
                    "image": "registry.example/queue",
                    "state": {"running": {}},
                    "restartCount": 0,
                }
            )
        self._put(pod)

    def _put(self, pod: FakePod) -> None:
        pod.body["metadata"]["uid"] = pod.uid
        self.server.put(json.loads(json.dumps(pod.body)))

    def _slice(self, pod: FakePod) -> None:
        labels = {
            **pod.body["metadata"]["labels"],
            "networking.internal.knative.dev/serviceType": "Private",
        }
        self.server.put(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "addressType": "IPv4",
                "metadata": {"name": f"{pod.name}-s", "namespace": pod.namespace, "labels": labels},
                "endpoints": [
                    {
                        "addresses": [pod.ip],
                        "conditions": {"ready": False},
                        "targetRef": {
                            "kind": "Pod",
                            "name": pod.name,
                            "namespace": pod.namespace,
                            "uid": pod.uid,
                        },
                    }
                ],
                "ports": [{"name": "http", "port": 8012}],
            }
        )


def _pod_body(name: str, namespace: str, labels: Json, annotations: Json) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": labels,
            "annotations": annotations,
        },
        "spec": {
            "nodeName": "node-a",
            "containers": [{"name": "user", "image": "registry.example/fn@sha256:" + "0" * 64}],
        },
        "status": {"phase": "Pending", "conditions": []},
    }


def labels_of(target: CallTarget) -> dict[str, str]:
    """As the reconciler sets them, in short."""
    return {
        names.MANAGED_BY: "pilotlight",
        names.TENANT: target.tenant,
        names.FUNCTION_ID: target.function_id,
        names.REVISION: target.revision,
    }


def revision_name_of(target: CallTarget) -> tuple[str, str]:
    """Namespace and revision name."""
    return "fn-acme", names.revision_name(
        names.service_name(target.app, target.function), target.revision
    )
