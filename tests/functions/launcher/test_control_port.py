"""The control port of a warm pod: what it answers, and what it does not read."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pilotlight.launcher.control_port import (
    MAX_BODY_BYTES,
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    REQUEST_S,
    ControlPort,
    ControlRequest,
    Refused,
    parse,
)
from pilotlight.launcher.pod_control import PodControl
from pilotlight.launcher.pod_environment import InvalidPod
from pilotlight.protocol import POD_PROMOTE, WORKER_STATUS
from snapshotter.types import LaunchSpec, RevisionKey

WAIT_S = 10.0
LAUNCH = LaunchSpec(
    revision=RevisionKey("f-1@v1"),
    trust_domain="t-1",
    uid=64000,
    bundle="b" * 64,
    image=None,
    entry={},
    memory_bytes=1,
    cpu=1.0,
    startup_timeout_s=1.0,
    labels={"tenant": "t-1"},
)


class Pod:
    """A control port, and what it was promoted to."""

    def __init__(self) -> None:
        self.promoted: list[tuple[LaunchSpec, Mapping[str, str]]] = []
        self.invalid = ""
        self.is_ready = True
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        control = PodControl(self.promote, lambda: ("warm", self.is_ready))
        self.port = ControlPort(listener, control.answer)
        self.clients: list[socket.socket] = []

    def promote(self, launch: LaunchSpec, secrets: Mapping[str, str]) -> None:
        if self.invalid:
            raise InvalidPod(self.invalid)
        self.promoted.append((launch, secrets))

    def connect(self) -> socket.socket:
        client = socket.create_connection(self.address, timeout=WAIT_S)
        client.setblocking(False)
        self.clients.append(client)
        return client

    def turn(self, ms: int = 100) -> None:
        poll = select.poll()
        self.port.register(poll)
        poll.poll(ms)
        self.port.turn()

    def answer_to(self, raw: bytes) -> tuple[int, Any]:
        """Status and document of the answer, which ends the connection."""
        client, answer, until = self.connect(), b"", time.monotonic() + WAIT_S
        while time.monotonic() < until:
            if raw:
                try:
                    raw = raw[client.send(raw) :]
                except BlockingIOError:
                    pass
            self.turn(1)
            try:
                data = client.recv(65536)
            except BlockingIOError:
                continue
            if not data:
                break
            answer += data
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert f"content-length: {len(body)}".encode() in head
        return int(head.split()[1]), json.loads(body)

    def post(self, document: object, path: str = POD_PROMOTE) -> tuple[int, Any]:
        body = json.dumps(document).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: pod\r\nContent-Length: {len(body)}\r\n\r\n"
        return self.answer_to(head.encode() + body)


@pytest.fixture
def pod() -> Iterator[Pod]:
    made = Pod()
    yield made
    made.port.close()
    for client in made.clients:
        client.close()


def test_a_pod_is_promoted_once_and_the_same_document_again_changes_nothing(pod: Pod) -> None:
    document = {"launch": LAUNCH.to_json(), "secrets": {"TOKEN": "x"}}
    assert pod.post(document) == (202, {"revision": "f-1@v1"})
    assert pod.post({**document, "secrets": {}})[0] == 202
    other = {**LAUNCH.to_json(), "bundle": "c" * 64}
    assert pod.post({"launch": other})[0] == 409
    assert pod.promoted == [(LAUNCH, {"TOKEN": "x"})]


def test_what_cannot_be_run_is_refused_and_the_pod_stays_warm(pod: Pod) -> None:
    pod.invalid = "the secret variables TOKEN are missing"
    status, body = pod.post({"launch": LAUNCH.to_json()})
    assert (status, body["detail"]) == (400, pod.invalid)
    pod.invalid = ""
    assert pod.post({"launch": LAUNCH.to_json()})[0] == 202


@pytest.mark.parametrize("is_ready, status", [(True, 200), (False, 503)])
def test_a_probe_learns_whether_the_pod_can_be_promoted(
    pod: Pod, is_ready: bool, status: int
) -> None:
    pod.is_ready = is_ready
    get = f"GET {WORKER_STATUS} HTTP/1.1\r\nHost: pod\r\n\r\n".encode()
    assert pod.answer_to(get) == (status, {"state": "warm"})


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        {"launch": None},
        {"launch": {}},
        {"launch": {**LAUNCH.to_json(), "unknown": 1}},
        {"launch": LAUNCH.to_json(), "secrets": {"TOKEN": 1}},
        {"launch": LAUNCH.to_json(), "secrets": ["TOKEN"]},
    ],
)
def test_a_document_that_is_none_is_refused(pod: Pod, document: object) -> None:
    assert pod.post(document)[0] == 400
    assert pod.promoted == []


@pytest.mark.parametrize(
    "raw, status",
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /pilotlight/health HTTP/1.0\r\n\r\n", 400),
        (b"GET http://pod/ HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /pilotlight/promote HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 999999\r\n\r\n", 413),
        (b"GET /" + b"x" * MAX_HEAD_BYTES, 431),
        (
            b"POST /pilotlight/promote HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100000,
            400,
        ),
    ],
)
def test_what_is_not_one_strict_request_is_refused(pod: Pod, raw: bytes, status: int) -> None:
    found, body = pod.answer_to(raw)
    assert (found, body["status"]) == (status, status)


def test_connections_and_their_time_are_bounded(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(MAX_CONNECTIONS + 4):
        pod.connect().send(b"GET ")
        pod.turn()
    assert repr(pod.port) == f"<ControlPort {MAX_CONNECTIONS} connections>"
    get = f"GET {WORKER_STATUS} HTTP/1.1\r\n\r\n".encode()
    assert pod.answer_to(get)[0] == 200
    assert pod.port.next_at < time.monotonic() + REQUEST_S
    late = pod.port.next_at + REQUEST_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: late)
    pod.turn(1)
    assert repr(pod.port) == "<ControlPort 0 connections>"


def test_a_request_may_arrive_in_pieces() -> None:
    whole = b"POST /a?b=1 HTTP/1.1\r\nA: b\r\nContent-Length: 3\r\n\r\n{}\n"
    for length in range(len(whole)):
        assert parse(whole[:length]) is None
    assert parse(whole) == ControlRequest(method="POST", path="/a?b=1", body=b"{}\n")
    with pytest.raises(Refused):
        parse(whole + b"x")
    most = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % MAX_BODY_BYTES
    assert parse(most) is None
