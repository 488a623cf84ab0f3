"""Generators through the real worker: SSE, NDJSON, pickle stream; errors, cancellation and
back-pressure."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import struct
from collections.abc import Iterator

import cloudpickle
import httpx
import pytest

from pilotlight.protocol import (
    CONTENT_PICKLE_STREAM,
    HEADER_DEADLINE,
    HEADER_FINISH,
    HEADER_OUTCOME,
)
from pilotlight.spec.function import FunctionKind, MethodSpec
from tests.fakes.fake_shim import (
    PICKLED,
    FakeInstance,
    FakeShim,
    function_spec,
    read_until,
    wait_for_running,
)
from tests.fakes.plain_http import NO_TLS

CODE = """
import asyncio, itertools, threading

class Service:
    def __init__(self):
        self.log = []

    def count(self, n: int, fail_at: int = -1):
        for i in range(n):
            if i == fail_at:
                raise ValueError(f"no {i}")
            yield i

    async def async_count(self, n: int, fail_at: int = -1):
        for i in range(n):
            if i == fail_at:
                raise ValueError(f"no {i}")
            await asyncio.sleep(0)
            yield i

    def odd(self):
        yield 1
        yield object()

    def endless(self):
        try:
            for i in itertools.count():
                yield "x" * 10_000
        finally:
            self.log.append(("endless ended", i))

    async def async_endless(self):
        try:
            for i in itertools.count():
                yield "x" * 10_000
        finally:
            self.log.append(("async_endless ended", i))

    async def silent(self):
        yield 1
        print("silent now")
        try:
            await asyncio.Event().wait()
        finally:
            self.log.append(("silent ended", 0))

    def threads(self):
        for _ in range(3):
            yield threading.get_ident()

    async def read_log(self):
        return self.log
"""
METHODS = [
    "count",
    "async_count",
    "odd",
    "endless",
    "async_endless",
    "silent",
    "threads",
    "read_log",
]


@pytest.fixture(scope="module")
def instance() -> Iterator[FakeInstance]:
    spec = function_spec(
        qualname="Service",
        kind=FunctionKind.CLASS,
        methods=[MethodSpec(name=m) for m in METHODS],
        max_inputs=4,
    )
    with FakeShim({"app.py": CODE}, spec) as shim:
        yield shim.start()


@pytest.mark.parametrize("method", ["count", "async_count"])
def test_server_sent_events_are_one_for_each_item(client: httpx.Client, method: str) -> None:
    response = client.post(
        f"/invoke/{method}", json={"n": 2}, headers={"accept": "text/event-stream"}
    )

    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["transfer-encoding"] == "chunked"
    assert response.text == "data: 0\n\ndata: 1\n\n"


@pytest.mark.parametrize("method", ["count", "async_count"])
def test_without_events_a_generator_streams_json_lines(client: httpx.Client, method: str) -> None:
    response = client.post(f"/invoke/{method}", json={"n": 3})

    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text == "0\n1\n2\n"


def test_an_empty_generator_is_an_empty_stream(client: httpx.Client) -> None:
    response = client.post("/invoke/count", json=[0])
    assert (response.status_code, response.text) == (200, "")


@pytest.mark.parametrize("method", ["count", "async_count"])
def test_an_error_in_the_middle_travels_in_the_stream(client: httpx.Client, method: str) -> None:
    events = client.post(
        f"/invoke/{method}", json={"n": 2, "fail_at": 1}, headers={"accept": "text/event-stream"}
    ).text
    lines = client.post(f"/invoke/{method}", json={"n": 2, "fail_at": 1}).text.splitlines()

    first, error, rest = events.split("\n\n")
    assert (first, rest) == ("data: 0", "")
    assert error.startswith("event: error\ndata: ")
    assert json.loads(error.partition("data: ")[2])["error"] == {
        "type": "ValueError",
        "message": "no 1",
    }
    assert json.loads(lines[1])["error"] == {"type": "ValueError", "message": "no 1"}


@pytest.mark.parametrize("method", ["count", "async_count"])
def test_an_error_before_the_first_item_is_an_ordinary_error(
    client: httpx.Client, method: str
) -> None:
    response = client.post(f"/invoke/{method}", json={"n": 2, "fail_at": 0})
    assert (response.status_code, response.headers[HEADER_OUTCOME]) == (500, "raised")


def test_an_item_that_json_cannot_carry_ends_the_stream(client: httpx.Client) -> None:
    *_, last = client.post("/invoke/odd").text.splitlines()
    assert json.loads(last)["type"].endswith("/result-not-serialisable")


@pytest.mark.parametrize("method", ["count", "async_count"])
def test_the_sdk_gets_a_stream_of_pickles(client: httpx.Client, method: str) -> None:
    body = cloudpickle.dumps(((3,), {"fail_at": 2}))
    response = client.post(f"/invoke/{method}", content=body, headers=PICKLED)

    assert response.headers["content-type"] == CONTENT_PICKLE_STREAM
    items, data = [], response.content
    while data:
        (length,) = struct.unpack(">I", data[:4])
        if length == 0xFFFFFFFF:
            (length,) = struct.unpack(">I", data[4:8])
            items.append(str(pickle.loads(data[8 : 8 + length])))
            data = data[8 + length :]
        else:
            items.append(pickle.loads(data[4 : 4 + length]))
            data = data[4 + length :]
    assert items == [0, 1, "no 2"]


def test_a_synchronous_generator_runs_in_one_thread(client: httpx.Client) -> None:
    assert len(set(client.post("/invoke/threads").text.split())) == 1


@pytest.mark.parametrize("method", ["endless", "async_endless"])
async def test_a_caller_that_leaves_ends_the_generator_and_slow_reading_holds_it_back(
    instance: FakeInstance, method: str
) -> None:
    reader, writer = await asyncio.open_unix_connection(instance.path)
    writer.write(f"POST /invoke/{method} HTTP/1.1\r\nhost: w\r\ncontent-length: 0\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    transport = httpx.AsyncHTTPTransport(uds=instance.path, verify=NO_TLS)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://worker", timeout=30
    ) as client:
        # the thread of the call before may still be closing its generator
        await wait_for_running(client, 1)
        writer.close()
        await wait_for_running(client, 0)
        name, produced = (await client.post("/invoke/read_log")).json()[-1]
    assert name == f"{method} ended"
    # of endless items: the socket's buffers, not the memory, bound what is made ahead
    assert produced < 1000


async def test_a_caller_that_leaves_a_silent_generator_ends_it(instance: FakeInstance) -> None:
    transport = httpx.AsyncHTTPTransport(uds=instance.path, verify=NO_TLS)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://worker", timeout=30
    ) as client:
        task = asyncio.create_task(client.post("/invoke/silent"))
        await asyncio.to_thread(read_until, instance.stdout, b"silent now\n")
        task.cancel()
        await wait_for_running(client, 0)
        assert (await client.post("/invoke/read_log")).json()[-1] == ["silent ended", 0]


def test_a_stream_past_its_deadline_ends_with_an_error_event(client: httpx.Client) -> None:
    text = client.post(
        "/invoke/silent", headers={HEADER_DEADLINE: "1", "accept": "text/event-stream"}
    ).text
    assert text.startswith("data: 1\n\nevent: error\n")
    assert "deadline-exceeded" in text


def trailers_of(
    instance: FakeInstance, method: str, body: bytes, headers: dict[str, str]
) -> dict[str, str]:
    """What stands behind the last chunk of a stream."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST /invoke/{method} HTTP/1.1\r\nhost: w\r\n{lines}content-length: {len(body)}\r\n\r\n"
    )
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(instance.path)
        connection.sendall(head.encode() + body)
        answer = b""
        while b"\r\n0\r\n" not in answer or not answer.endswith(b"\r\n\r\n"):
            answer += connection.recv(65536)
    behind = answer.rpartition(b"\r\n0\r\n")[2].decode()
    return dict(line.split(": ", 1) for line in behind.split("\r\n") if line)


@pytest.mark.parametrize("method", ["count", "async_count"])
@pytest.mark.parametrize("fail_at, finish", [(-1, "stop"), (1, "error")])
def test_a_stream_says_behind_its_last_byte_how_it_ended(
    instance: FakeInstance, method: str, fail_at: int, finish: str
) -> None:
    body = json.dumps({"n": 2, "fail_at": fail_at}).encode()
    pickled = cloudpickle.dumps(((2, fail_at), {}))

    assert (
        trailers_of(instance, method, body, {"content-type": "application/json"})[HEADER_FINISH]
        == finish
    )
    assert trailers_of(instance, method, pickled, PICKLED)[HEADER_FINISH] == finish
