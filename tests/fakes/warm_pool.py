"""A pool of warm pods for the activator's tests: the controller's two paths on a Unix socket, and
pods whose launcher takes a launch document and then serves, as the test says."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from activator.knative.warm.promotion import WarmPods
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.kubernetes import names
from pilotlight.protocol import (
    POD_FORK,
    POD_INSTANCES,
    POD_PROMOTE,
    POD_STOP,
    PODS_DELETE_PATH,
    PODS_PROMOTE_PATH,
    WORKER_STATUS,
)
from tests.fakes.fake_worker import FakeWorker, WorkerAnswer, WorkerRequest
from tests.fakes.pod_maker import FakePod, TcpWorker
from tests.fakes.small_cluster import World

Json = dict[str, Any]


@dataclass(kw_only=True)
class WarmPod:
    """One pod of the pool.

    Attributes:
        documents: what it was sent.
        refuses: the status that it answers instead of taking its document.
        takes_time: set by the test when it may answer that.
        is_slow: takes the document, and does not serve until the test says so.
        room: instances that fit into it; with one it has no Template.
        early: how many forks are refused because its first instance does not serve yet.
        forks: the workers of further instances, by port; `has_first`: whether its first instance lives.
        ended: what its launcher tells of those that have ended.
        forked: bodies of the requests for further instances."""

    pod: FakePod
    documents: list[Json] = field(default_factory=list)
    refuses: int = 0
    takes_time: asyncio.Event | None = None
    is_slow: bool = False
    room: int = 1
    early: int = 0
    has_first: bool = True
    forks: dict[int, tuple[str, TcpWorker]] = field(default_factory=dict)
    ended: list[Json] = field(default_factory=list)
    forked: list[Json] = field(default_factory=list)

    async def end(self, port: int, status: int = 0) -> None:
        """The instance at that port ends."""
        if port == 8080:
            name, self.has_first = self.pod.name, False
            (worker,) = (one for one in self.pod.workers if one.port == port)
        else:
            name, worker = self.forks.pop(port)
        self.pod.workers.remove(worker)
        await worker.aclose()
        self.ended.append(
            {"instance": name, "port": port, "state": "ended", "status": status, "error": {}}
        )

    def instances(self) -> Json:
        """What its launcher tells."""
        first = {"instance": self.pod.name, "port": 8080, "state": "ready"}
        more = [
            {"instance": name, "port": port, "state": "ready"}
            for port, (name, _) in self.forks.items()
        ]
        living = [first, *more] if self.has_first else more
        return {"instances": [*living, *self.ended], "template": self.room > 1}


class _Control:
    """A pod's control port."""

    warm: WarmPod

    def __init__(self, answer: Callable[[WarmPod, WorkerRequest], Awaitable[WorkerAnswer]]) -> None:
        self._answer = answer

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        return await self._answer(self.warm, request)


class WarmPool:
    """Owner: a test.

    Attributes:
        pods: those that were made, in their order.
        asked: bodies of requests for a pod; `deleted`: of those to delete one.
        status: what the controller answers instead of its work; 0 = it works.
        loses_answers: it works, and closes the connection.
        is_silent: it never answers."""

    def __init__(self, world: World, socket: Path) -> None:
        self._world = world
        self._socket = socket
        self._controller = FakeWorker(socket, self._answer)
        self.pods: list[WarmPod] = []
        self.asked: list[Json] = []
        self.deleted: list[Json] = []
        self.status = 0
        self.loses_answers = self.is_silent = False

    async def start(self) -> WarmPool:
        """Listen."""
        await self._controller.start()
        return self

    async def aclose(self) -> None:
        """Stop."""
        await self._controller.aclose()

    def source(
        self, member: str = "a-0", *, clock: Callable[[], float] = time.monotonic
    ) -> WarmPods:
        """An activator's way to it."""
        return WarmPods(Endpoint.at(self._socket), token="t", member=member, clock=clock)

    async def add(self, count: int = 1) -> list[WarmPod]:
        """Warm pods that run."""
        made = []
        for _ in range(count):
            control = _Control(self._control)
            control.warm = WarmPod(pod=await self._world.maker.warm(control))
            made.append(control.warm)
        self.pods += made
        return made

    async def _control(self, warm: WarmPod, request: WorkerRequest) -> WorkerAnswer:
        """The launcher in a pod."""
        if request.path != POD_PROMOTE:
            return await self._of_instances(warm, request)
        if warm.takes_time is not None:
            await warm.takes_time.wait()
        if warm.refuses:
            return WorkerAnswer(status=warm.refuses, body=b"{}")
        document = json.loads(request.body)
        if warm.documents and warm.documents[0]["launch"] != document["launch"]:
            return WorkerAnswer(status=409, body=b"{}")
        warm.documents.append(document)
        if len(warm.documents) == 1 and not warm.is_slow:
            await self.serves(warm)
        return WorkerAnswer(status=202, body=b"{}")

    async def _of_instances(self, warm: WarmPod, request: WorkerRequest) -> WorkerAnswer:
        """Requests of its owner."""
        if request.path == WORKER_STATUS:
            state = "serving" if warm.pod.is_ready else "booting" if warm.documents else "warm"
            return WorkerAnswer(body=json.dumps({"state": state}).encode())
        if request.path == POD_INSTANCES:
            return WorkerAnswer(body=json.dumps(warm.instances()).encode())
        body = json.loads(request.body)
        if request.path == POD_STOP:
            if body["port"] in warm.forks or (body["port"] == 8080 and warm.has_first):
                await warm.end(body["port"])
            return WorkerAnswer(status=202, body=b"{}")
        assert request.path == POD_FORK
        if warm.early:
            warm.early -= 1
            return WorkerAnswer(status=503, body=b'{"detail": "its first instance is waking"}')
        if len(warm.instances()["instances"]) - len(warm.ended) >= warm.room or warm.room == 1:
            return WorkerAnswer(status=409, body=b'{"detail": "no room"}')
        warm.forked.append(body)
        port = 8080 + len(warm.forked)

        async def answer(asked: WorkerRequest) -> WorkerAnswer:
            if not asked.path.startswith(WORKER_STATUS):
                return await warm.pod.behaviour(asked)
            report = {"instance": body["instance"], "running": 0, "start_kind": "FORK"}
            report["phases_ms"] = {"fork": 2.0, "wake": 1.0}
            return WorkerAnswer(body=json.dumps(report).encode())

        worker = await TcpWorker(warm.pod.ip, port, answer).start()
        warm.forks[port] = body["instance"], worker
        warm.pod.workers.append(worker)
        return WorkerAnswer(body=json.dumps({"port": port}).encode())

    async def serves(self, warm: WarmPod, kind: str = "RESTORE") -> None:
        """Its worker is up."""
        warm.pod.start_kind = kind
        await self._world.maker.serves(warm.pod, ports=(8080,))

    async def _answer(self, request: WorkerRequest) -> WorkerAnswer:
        """The controller."""
        body = json.loads(request.body)
        if self.is_silent:
            await asyncio.Event().wait()
        if self.status:
            return WorkerAnswer(status=self.status, body=b"{}")
        assert request.path in (PODS_PROMOTE_PATH, PODS_DELETE_PATH)
        loses_answer = self.loses_answers
        answer = await (
            self._delete(body) if request.path == PODS_DELETE_PATH else self._promote(body)
        )
        if loses_answer:
            return WorkerAnswer(status=502, body=b"{}")
        return answer

    async def _promote(self, body: Json) -> WorkerAnswer:
        self.asked.append(body)
        target = self._world.targets[body["revision"]]
        assert body["tenant"] == target.tenant
        there = [warm for warm in self.pods if warm.pod.name in self._world.maker.pods]
        for warm in there:
            metadata = warm.pod.body["metadata"]
            is_its = metadata["annotations"].get(names.ATTEMPT) == body["attempt"]
            if warm.pod.uid in body["exclude"] or not (
                is_its or (names.WARM_SHAPE in metadata["labels"] and not body.get("claimed_only"))
            ):
                continue
            if not is_its:
                self._world.maker.claimed(warm.pod, target, body["attempt"])
            launch = {**target.launch.to_json(), "seal": warm.pod.uid}
            answer = {
                "namespace": warm.pod.namespace,
                "name": warm.pod.name,
                "uid": warm.pod.uid,
                "ip": warm.pod.ip,
                "node": "node-a",
                "launch": launch,
            }
            return WorkerAnswer(body=json.dumps(answer).encode())
        return WorkerAnswer(status=409, body=b'{"type": "no-warm-pod"}')

    async def _delete(self, body: Json) -> WorkerAnswer:
        self.deleted.append(body)
        pod = self._world.maker.pods.get(body["name"])
        if pod is not None and pod.uid == body["uid"]:
            await self._world.maker.gone(pod)
        return WorkerAnswer(status=204)
