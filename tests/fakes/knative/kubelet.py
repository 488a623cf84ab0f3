"""A node: registers itself, runs the pods that are bound to it, serves their logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import secrets
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pilotlight.kubernetes.kinds import NODE, POD
from pilotlight.kubernetes.watch_events import WatchChange
from tests.fakes.knative.controllers import View, condition
from tests.fakes.knative.images import Images
from tests.fakes.knative.logs import chosen
from tests.fakes.knative.pod import OWN_NETWORK, PodRunner
from tests.fakes.knative.revisions import QUEUE_PROXY
from tests.fakes.knative.scheduler import requests_of
from tests.fakes.kubernetes.quotas import amount

Json = dict[str, Any]
log = logging.getLogger(__name__)
_FOLLOW_S = 0.05
MISSING_IMAGES = "tests.pilotlight.dev/missing-images"
"""Of a node: {reference: what the registry says}."""
AWAY = "tests.pilotlight.dev/kubelet-away"
"""Of a node: its kubelet was killed; without this annotation it is back."""
EVICT, OUT_OF_MEMORY = "tests.pilotlight.dev/evict", "tests.pilotlight.dev/out-of-memory"
"""Of a pod: what a test in another process wants to happen to it."""


class Kubelet:
    """Owner: the event loop; `start` and `stop` are called once.

    Attributes:
        images: what can be pulled.
        pods: by uid.
    """

    def __init__(
        self,
        view: View,
        *,
        name: str,
        directory: Path,
        labels: Mapping[str, str],
        capacity: Mapping[str, str],
        quiet_s: float,
    ) -> None:
        self._quiet_s = quiet_s
        self._view = view
        self.name = name
        self._directory = directory
        self._labels = labels
        self._capacity = {
            "cpu": "16",
            "memory": "64Gi",
            "pods": "110",
            "ephemeral-storage": "100Gi",
            **capacity,
        }
        self.images = Images(directory=directory / "images")
        self.pods: dict[str, PodRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._addresses, self._own_addresses = _loopback_addresses(), _own_addresses()
        self._server: asyncio.Server | None = None
        self._is_stopping = False
        self._present = asyncio.Event()
        self._present.set()

    def __repr__(self) -> str:
        return f"<Kubelet {self.name} {len(self.pods)} pods>"

    async def start(self) -> None:
        """Join the cluster."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            **self._labels,
        }
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": labels},
            "spec": {},
        }
        made = await self._view.create(node) or self._view.get(NODE, "", self.name) or node
        status = {
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "conditions": [condition("Ready", True, "KubeletReady")],
            "addresses": [
                {"type": "InternalIP", "address": "127.0.0.1"},
                {"type": "Hostname", "address": self.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            "nodeInfo": _INFO,
        }
        await self._view.set_status(NODE, made, status)
        self._view.changes(POD, self._pod_changed)
        self._view.on(NODE, self._node_seen)
        for pod in self._view.items(POD):
            self._pod_changed(WatchChange("ADDED", pod))

    async def stop(self) -> None:
        """The node is gone: its containers die, and nobody says so."""
        self._is_stopping = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def _node_seen(self, node: Json) -> None:
        """A test in another process says with annotations which images cannot be pulled, and
        whether the kubelet is away."""
        if node["metadata"]["name"] == self.name:
            annotations = node["metadata"].get("annotations") or {}
            if AWAY in annotations:
                self._present.clear()
            elif not self._present.is_set():
                self._return()
            text = annotations.get(MISSING_IMAGES)
            self.images.missing.update(json.loads(text) if text else {})
            if text == "{}":
                self.images.missing.clear()

    def _return(self) -> None:
        """It was started again: it looks at all pods of its node."""
        self._present.set()
        there = {pod["metadata"]["uid"]: pod for pod in self._view.items(POD)}
        for uid in self.pods.keys() - there.keys():
            self.pods[uid].end(0)
        for pod in there.values():
            self._pod_changed(WatchChange("MODIFIED", pod))

    def runner(self, namespace: str, name: str) -> PodRunner:
        """The pod's. Raises KeyError."""
        for runner in self.pods.values():
            if (runner.pod["metadata"]["namespace"], runner.pod["metadata"]["name"]) == (
                namespace,
                name,
            ):
                return runner
        raise KeyError(name)

    def _pod_changed(self, change: WatchChange) -> None:
        if change.type == "SYNCED" or self._is_stopping or not self._present.is_set():
            return
        pod = change.object
        metadata = pod["metadata"]
        runner = self.pods.get(metadata["uid"])
        if change.type == "DELETED":
            if runner is not None:
                runner.end(0)
        elif runner is None:
            is_over = (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")
            if (
                pod["spec"].get("nodeName") == self.name
                and not is_over
                and metadata["uid"] not in self._tasks
            ):
                self._begin(pod)
        annotations = metadata.get("annotations") or {}
        if runner is not None and EVICT in annotations:
            runner.evict(annotations[EVICT])
        elif runner is not None and OUT_OF_MEMORY in annotations:
            runner.run_out_of_memory()
        if runner is not None:
            runner.resize(pod, problem=self._no_room(pod))
        if metadata.get("deletionTimestamp") and metadata["uid"] in self.pods:
            self.pods[metadata["uid"]].end(metadata.get("deletionGracePeriodSeconds", 0))

    def _no_room(self, pod: Json) -> Json | None:
        """Why the node cannot give a pod what it wants now: its condition; None = it can."""
        wanted = requests_of(pod)
        others = [
            requests_of(runner.pod)
            for uid, runner in self.pods.items()
            if uid != pod["metadata"]["uid"]
        ]
        for name, value in wanted.items():
            has = amount(self._capacity.get(name, "0"))
            if value > has:
                text = f"Node didn't have enough capacity: {name}, requested: {value:g}, capacity: {has:g}"
                return condition("PodResizePending", True, "Infeasible", text)
            if value + sum(one.get(name, 0.0) for one in others) > has:
                text = f"Node didn't have enough resource: {name}, requested: {value:g}"
                return condition("PodResizePending", True, "Deferred", text)
        return None

    def _retry_resizes(self) -> None:
        """A pod has ended: there may be room for what others want."""
        for runner in list(self.pods.values()):
            metadata = runner.pod["metadata"]
            pod = self._view.get(POD, metadata["namespace"], metadata["name"])
            if runner.is_deferred and pod is not None and pod["metadata"]["uid"] in self.pods:
                runner.resize(pod, problem=self._no_room(pod))

    def _begin(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        is_beside = any(one["name"] == QUEUE_PROXY for one in pod["spec"]["containers"])
        runner = PodRunner(
            self._view,
            pod,
            ip=next(self._addresses if is_beside else self._own_addresses),
            directory=self._directory / uid,
            images=self.images,
            quiet_s=self._quiet_s,
            present=self._present,
        )
        self.pods[uid] = runner
        task = asyncio.create_task(runner.run(), name=f"pod {pod['metadata']['name']}")
        self._tasks[uid] = task
        task.add_done_callback(lambda done: self._over(uid, done))

    def _over(self, uid: str, task: asyncio.Task[None]) -> None:
        self.pods.pop(uid, None)
        self._tasks.pop(uid, None)
        if not self._is_stopping:
            self._retry_resizes()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a pod's task failed", exc_info=error)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """GET /containerLogs/<namespace>/<pod>/<container>?follow=&tailLines= in HTTP/1.0."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            split = urlsplit(head.split(b" ", 2)[1].decode())
            query = {key: values[0] for key, values in parse_qs(split.query).items()}
            _, _, namespace, name, _ = split.path.split("/")
            if not self._present.is_set():
                return
            try:
                runner = self.runner(namespace, name)
                await self._send(runner, writer, query)
            except (KeyError, FileNotFoundError):
                text = f"container in pod {name} is waiting to start"
                writer.write(b"HTTP/1.0 404 Not Found\r\n\r\n" + text.encode())
        except (OSError, asyncio.IncompleteReadError):
            pass  # whoever asked is gone
        finally:
            writer.close()

    async def _send(
        self, runner: PodRunner, writer: asyncio.StreamWriter, query: Mapping[str, str]
    ) -> None:
        path = runner.log.previous if query.get("previous") == "true" else runner.log.path
        with path.open("rb") as stream:
            writer.write(
                b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n"
                + chosen(stream.read(), query)
            )
            how = {key: value for key, value in query.items() if key == "timestamps"}
            while (
                query.get("follow") == "true"
                and runner.pod["metadata"]["uid"] in self.pods
                and not writer.is_closing()
            ):
                await writer.drain()
                if more := stream.read():
                    writer.write(chosen(more, how))
                await asyncio.sleep(_FOLLOW_S)
        with contextlib.suppress(OSError):
            await writer.drain()


_INFO = {
    "architecture": "amd64",
    "operatingSystem": "linux",
    "kubeletVersion": "v1.34.1",
    "kernelVersion": "6.8.0",
    "osImage": "tests",
    "containerRuntimeVersion": "processes://1",
    "machineID": "",
    "systemUUID": "",
    "bootID": "",
    "kubeProxyVersion": "",
}


def _loopback_addresses() -> Iterator[str]:
    """Addresses in a /16 of loopback at random."""
    low, high = secrets.randbelow(200) + 20, secrets.randbelow(250)
    number = 0
    while True:
        number += 1
        yield f"127.{low}.{(high + number // 250) % 250 + 1}.{number % 250 + 2}"


def _own_addresses() -> Iterator[str]:
    """Addresses in OWN_NETWORK that no other node on this machine has, in whatever process: it has
    each /24 whose name it has bound (abstract sockets, unix(7)), until this iterator is gone."""
    thirds = list(range(1, 251))
    random.shuffle(thirds)
    with contextlib.ExitStack() as held:
        for third in thirds:
            name = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            try:
                name.bind(f"\0pilotlight-test-pods-{third}")
            except OSError:
                continue
            yield from (f"{OWN_NETWORK}{third}.{fourth}" for fourth in range(2, 252))
