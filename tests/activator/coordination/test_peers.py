"""A submitted call is found through any activator: one that does not hold it asks the others."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from activator.coordination.peers import (
    CALLING_FUNCTION,
    CATCH_UP_S,
    HEALTH,
    PASSED_ON,
    PLATFORM_TOKEN,
    ActivatorPeers,
    peer_addresses,
    socket_of,
)
from pilotlight.core.settings import SettingsInvalid
from pilotlight.core.transport.endpoint import TlsCredentials
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import until
from tests.fakes.authority import Authority
from tests.fakes.fake_controller import FakeController
from tests.fakes.fake_worker import FakeWorker, WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of

AUTHORIZED = {"authorization": f"Bearer {KEY}"}
HELD_THERE = "req-there"
NO_FILE = "none.txt"


async def holds_one_call(request: WorkerRequest) -> WorkerAnswer:
    """The other activator: it knows HELD_THERE, takes every PUT, and nothing else."""
    if NO_FILE in request.path:
        held = f"{PASSED_ON.decode()}: 1"
        return WorkerAnswer(status=404, body=b'{"errno": 2}', headers=(held,))
    if request.method == "PUT" or HELD_THERE in request.path:
        return WorkerAnswer(
            body=json.dumps(
                {"by": "a-1", "path": request.path, "body": request.body.decode()}
            ).encode()
        )
    return WorkerAnswer(status=404, body=b"{}")


@pytest.fixture(name="other")
async def _other(edge: Edge, short_tmp: Path) -> AsyncIterator[FakeWorker]:
    """Activator a-1, beside the edge, which is a-0."""
    other = await FakeWorker(socket_of(short_tmp, 1), holds_one_call).start()
    controller = await FakeController(short_tmp / "controller.sock").start()
    controller.calls["req-old"] = {
        "id": "req-old",
        "state": "SUCCEEDED",
        "labels": {},
        "content_type": "",
        "result": "",
    }
    siblings = edge.calls.api.siblings = ActivatorPeers(
        peer_addresses(short_tmp, None, None), index=0, count=2
    )
    edge.calls.sandboxes.siblings = siblings
    yield other
    await siblings.aclose()
    await controller.aclose()
    await other.die()


async def test_a_sandbox_of_another_activator_is_asked_once_with_the_body(
    edge: Edge, other: FakeWorker
) -> None:
    url = f"{edge.url}/v1/sandboxes/{HELD_THERE}/exec"
    answer = await edge.client.post(url, json={"args": ["ls"]}, headers=AUTHORIZED)
    assert json.loads(answer.json()["body"]) == {"args": ["ls"]}

    url = f"{edge.url}/v1/sandboxes/{HELD_THERE}/files?path={NO_FILE}"
    missing = await edge.client.get(url, headers=AUTHORIZED)
    assert (missing.status_code, missing.json()) == (404, {"errno": 2}), "the sandbox's own answer"

    url = f"{edge.url}/v1/sandboxes/req-gone/directory"
    gone = await edge.client.get(url, headers=AUTHORIZED)
    assert gone.status_code == 404
    assert "it has ended, or never was" in gone.text


@pytest.mark.parametrize(
    "verb, path", [("GET", ""), ("GET", "?wait_s=5"), ("GET", "/stream"), ("POST", ":cancel")]
)
async def test_a_question_about_a_call_of_another_activator_is_answered_by_that_one(
    edge: Edge, other: FakeWorker, verb: str, path: str
) -> None:
    answer = await edge.client.request(
        verb, f"{edge.url}/v1/calls/{HELD_THERE}{path}", headers=AUTHORIZED
    )

    assert answer.status_code == 200
    assert answer.json()["path"] == f"/v1/calls/{HELD_THERE}{path}"
    assert other.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert PASSED_ON.decode() in other.requests[0].headers


async def test_a_call_that_nobody_holds_any_more_is_the_controllers(
    edge: Edge, other: FakeWorker
) -> None:
    answer = await edge.client.get(f"{edge.url}/v1/calls/req-old", headers=AUTHORIZED)
    assert answer.json()["state"] == "SUCCEEDED"


async def test_a_call_is_found_while_another_activator_is_down(
    edge: Edge, other: FakeWorker
) -> None:
    await other.die()
    answer = await edge.client.get(f"{edge.url}/v1/calls/req-old", headers=AUTHORIZED)
    assert answer.status_code == 200


async def test_a_question_is_passed_on_once(edge: Edge, other: FakeWorker) -> None:
    headers = {**AUTHORIZED, PASSED_ON.decode(): "1"}
    answer = await edge.client.get(f"{edge.url}/v1/calls/{HELD_THERE}", headers=headers)
    assert answer.status_code == 404
    assert other.requests == []


async def test_a_call_that_is_held_here_is_asked_of_nobody(edge: Edge, other: FakeWorker) -> None:
    edge.add(route_of(spec_of()))
    accepted = await edge.call("shop/hello:submit", json={"x": 1})
    answer = await edge.client.get(
        f"{edge.url}/v1/calls/{accepted.json()['id']}", headers=AUTHORIZED
    )
    assert answer.status_code == 200
    assert other.requests == []


async def put(edge: Edge, name: str) -> httpx.Response:
    return await edge.client.put(
        f"{edge.url}/v1/calls/{name}?function=shop/hello", json={"x": 1}, headers=AUTHORIZED
    )


async def test_an_id_of_the_callers_belongs_to_one_activator_wherever_it_is_sent(
    edge: Edge, other: FakeWorker
) -> None:
    edge.add(route_of(spec_of()))
    answers = {f"mine-{n}": await put(edge, f"mine-{n}") for n in range(8)}

    theirs = {name for name, answer in answers.items() if answer.json().get("by") == "a-1"}
    assert 0 < len(theirs) < 8
    assert {answer.status_code for name, answer in answers.items() if name not in theirs} == {202}
    assert all(json.loads(answers[name].json()["body"]) == {"x": 1} for name in theirs)
    await other.die()
    assert [(await put(edge, name)).status_code for name in sorted(theirs)] == [503] * len(theirs)


async def test_a_stranger_is_not_passed_on(edge: Edge, other: FakeWorker) -> None:
    assert (await edge.client.get(f"{edge.url}/v1/calls/{HELD_THERE}")).status_code == 401
    assert other.requests == []


async def test_a_process_is_alive_while_its_socket_answers(
    other: FakeWorker, short_tmp: Path
) -> None:
    siblings = ActivatorPeers(peer_addresses(short_tmp, None, None), index=0, count=2)
    assert await siblings.is_process_alive("a-1")
    for _ in range(5):
        await asyncio.sleep(0)  # the other end of that connection is accepted, and closed
    await other.aclose()
    assert not await siblings.is_process_alive("a-1")
    assert not await siblings.is_process_alive("a-7")
    assert await siblings.is_process_alive("pod-of-another-machine")
    await siblings.aclose()


async def test_members_beyond_the_number_that_is_meant_to_be_are_asked_too(
    edge: Edge, other: FakeWorker, short_tmp: Path
) -> None:
    third = await FakeWorker(socket_of(short_tmp, 2), holds_one_call).start()
    await other.die()
    siblings = ActivatorPeers(
        peer_addresses(short_tmp, None, None),
        index=0,
        count=2,
        members=lambda: ["a-0", "a-2", "pod-of-another-machine"],
    )
    edge.calls.api.siblings = siblings
    assert repr(siblings) == "<ActivatorPeers of 0: 2, 0 requests>"
    answer = await edge.client.get(f"{edge.url}/v1/calls/{HELD_THERE}", headers=AUTHORIZED)
    assert answer.status_code == 200
    await siblings.aclose()
    await third.die()


def test_siblings_elsewhere_need_certificates(short_tmp: Path) -> None:
    with pytest.raises(SettingsInvalid, match=r"activator\.sibling_url = .*needs mutual TLS"):
        peer_addresses(short_tmp, "https://a-{index}.activators.svc:8710", None)


async def test_who_has_no_name_any_more_is_no_process(
    short_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: list[int | None] = []
    ask = socket.getaddrinfo

    def asked(*args: Any, **more: Any) -> Any:
        try:
            return ask(*args, **more)
        except socket.gaierror as e:
            refusals.append(e.errno)
            raise

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    credentials = TlsCredentials(Authority().issue(tmp_path, "a-0"))
    siblings = ActivatorPeers(
        peer_addresses(short_tmp, "https://{member}.invalid:8710", credentials), index=0, count=2
    )
    is_alive = await siblings.is_process_alive("a-1")
    # a machine without a resolver, or with a slow one, cannot tell (EAI_AGAIN): then nobody is
    # taken for dead
    assert is_alive is (refusals != [socket.EAI_NONAME])
    await siblings.aclose()


CONNECTIONS = 6
UNREAD_S = 0.3
ENDLESS = f"{HELD_THERE}-endless"


class _Streaming:
    """Activator a-1, whose streams of ENDLESS go on until it is closed."""

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        if ENDLESS in request.path:
            return WorkerAnswer(
                chunks=self._events(b"x" * 2**16 if "large" in request.path else b"")
            )
        return await holds_one_call(request)

    @staticmethod
    async def _events(data: bytes) -> AsyncIterator[bytes]:
        yield b"begun" + data
        while data:
            yield data
        await asyncio.Event().wait()


@pytest.fixture(name="few")
async def _few(edge: Edge, other: FakeWorker, short_tmp: Path) -> AsyncIterator[ActivatorPeers]:
    """Connections to it: so few that one tenant could take them all."""
    other.behaviour = _Streaming()
    siblings = ActivatorPeers(
        peer_addresses(short_tmp, None, None),
        index=0,
        count=2,
        max_connections=CONNECTIONS,
        unread_s=UNREAD_S,
    )
    edge.calls.api.siblings = siblings
    yield siblings
    await siblings.aclose()


async def _follow(edge: Edge, stack: AsyncExitStack, count: int, *, key: str = KEY) -> None:
    """So many streams that have begun."""
    for _ in range(count):
        stream = edge.client.stream(
            "GET",
            f"{edge.url}/v1/calls/{ENDLESS}/stream",
            headers={"authorization": f"Bearer {key}"},
        )
        answer = await stack.enter_async_context(stream)
        assert answer.status_code == 200


async def test_streams_of_one_tenant_leave_connections_to_others(
    edge: Edge, other: FakeWorker, few: ActivatorPeers
) -> None:
    edge.add_key("pl_other", tenant="t-other")
    async with AsyncExitStack() as stack:
        await _follow(edge, stack, CONNECTIONS // 2)

        refused = await edge.client.get(f"{edge.url}/v1/calls/{HELD_THERE}", headers=AUTHORIZED)
        theirs = await edge.client.get(
            f"{edge.url}/v1/calls/{HELD_THERE}", headers={"authorization": "Bearer pl_other"}
        )

        assert (refused.status_code, theirs.status_code) == (429, 200)
        assert "retry-after" in refused.headers
        # nothing is deployed here
        assert {(await put(edge, f"mine-{n}")).status_code for n in range(8)} == {404, 429}
    await until(lambda: not few.held)


async def test_a_change_is_told_though_callers_hold_all_connections(
    edge: Edge, other: FakeWorker, few: ActivatorPeers
) -> None:
    edge.add_key("pl_other", tenant="t-other")
    async with AsyncExitStack() as stack:
        await _follow(edge, stack, CONNECTIONS // 2)
        await _follow(edge, stack, CONNECTIONS // 2, key="pl_other")

        async with asyncio.timeout(CATCH_UP_S * 10):
            await few.catch_up()

    assert [request.path for request in other.requests if request.path == HEALTH] == [HEALTH]


async def test_who_does_not_read_a_stream_holds_no_connection(
    edge: Edge, other: FakeWorker, few: ActivatorPeers
) -> None:
    place = urlsplit(edge.url)
    connection = socket.create_connection((place.hostname or "", place.port or 0))
    try:
        connection.sendall(
            f"GET /v1/calls/{ENDLESS}-large/stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
            f"{KEY}\r\n\r\n".encode()
        )
        await until(lambda: few.held == 1)
        await until(lambda: not few.held)
    finally:
        connection.close()


@pytest.mark.parametrize("token", ["platform-token"])
async def test_what_another_activator_forwards_was_counted_there(
    edge: Edge, other: FakeWorker
) -> None:
    edge.add_tenant("acme", requests_per_s=0.001)  # 100 operations at once
    url = f"{edge.url}/v1/calls/req-gone"
    by_peer = {PASSED_ON.decode(): "1", PLATFORM_TOKEN.decode(): "platform-token"}
    answers = await asyncio.gather(
        *(edge.client.get(url, headers={**AUTHORIZED, **by_peer}) for _ in range(120))
    )
    for answer in answers:
        assert answer.status_code == 404
        assert "ratelimit-policy" not in answer.headers
    guessed = {**AUTHORIZED, **by_peer, PLATFORM_TOKEN.decode(): "guessed"}
    statuses: list[int] = []
    while 429 not in statuses:  # anybody can say so; ten come back in a second
        answers = await asyncio.gather(*(edge.client.get(url, headers=guessed) for _ in range(100)))
        statuses += [answer.status_code for answer in answers]
    assert set(statuses[:100]) == {404}


async def test_a_forwarded_request_bears_the_platforms_token_and_nothing_that_its_caller_said_of_it(
    edge: Edge, short_tmp: Path
) -> None:
    other = await FakeWorker(socket_of(short_tmp, 1), holds_one_call).start()
    siblings = edge.calls.api.siblings = ActivatorPeers(
        peer_addresses(short_tmp, None, None), index=0, count=2, token="platform-token"
    )
    said = {PLATFORM_TOKEN.decode(): "guessed", CALLING_FUNCTION.decode(): "{}"}
    answer = await edge.client.get(
        f"{edge.url}/v1/calls/{HELD_THERE}", headers={**AUTHORIZED, **said}
    )
    assert answer.status_code == 200
    (request,) = other.requests
    assert request.headers[PLATFORM_TOKEN.decode()] == "platform-token"
    assert CALLING_FUNCTION.decode() not in request.headers
    await siblings.aclose()
    await other.die()
