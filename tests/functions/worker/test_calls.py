"""Calls on a forked instance, through the real worker: JSON and pickle, errors, limits,
cancellation, log marks."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import httpx
import pytest

from pilotlight.errors import RemoteError
from pilotlight.protocol import (
    ARGUMENTS_PREFIX,
    CONTENT_PICKLE,
    HEADER_CALL,
    HEADER_DEADLINE,
    HEADER_OUTCOME,
    HEADER_TRUSTED_PICKLE,
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
from tests.fakes.marking_pickle import MarkingPickle
from tests.fakes.plain_http import NO_TLS

CODE = '''
import asyncio, dataclasses, sys, threading, time

class Broken(Exception):
    """Pickles, but cannot be rebuilt: its constructor wants two arguments."""
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")

class Mine(Exception):
    pass

@dataclasses.dataclass
class Odd:
    number: int

    def __post_init__(self):
        raise LookupError("no such number")

class Service:
    def __init__(self):
        self.gate = threading.Event()
        self.log = []
        self.tasks = []
        self.barrier = threading.Barrier(16)

    def add(self, x: int, y: int = 2):
        return x + y

    async def async_add(self, x: int, y: int = 2):
        await asyncio.sleep(0)
        return x + y

    def shout(self, text):
        print("first", text)
        print("to stderr", file=sys.stderr)
        sys.stdout.write("unfinished")
        return threading.current_thread().name

    def fail(self, kind):
        if kind == "broken":
            raise Broken("a", "b")
        if kind == "mine":
            raise Mine("oh no", 7)
        if kind == "exit":
            sys.exit(3)
        if kind == "memory":
            raise MemoryError("no room")
        raise getattr(__builtins__, kind, ValueError)(kind) if not isinstance(__builtins__, dict) else __builtins__[kind](kind)

    async def async_fail(self):
        raise LookupError("async")

    def odd(self):
        return object()

    def not_a_number(self):
        return float("nan")

    def meet(self):
        return self.barrier.wait(20)

    def spin(self):
        try:
            print("spinning")
            while True:
                time.sleep(0.001)
        finally:
            self.log.append("spin ended")

    async def wait_forever(self):
        print("waiting")
        try:
            await asyncio.Event().wait()
        finally:
            self.log.append("wait ended")

    def stubborn(self):
        for line in ("stubborn begins", "stubborn goes on"):
            try:
                print(line)
                while not self.gate.is_set():
                    time.sleep(0.001)
            except BaseException:
                pass
        return "done"

    async def open_gate(self):
        self.gate.set()

    async def read_log(self):
        return self.log

    def plain_returning_coroutine(self):
        return self.async_add(1)

    async def own_task(self):
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            self.tasks.append(asyncio.current_task())
            return [len(set(self.tasks)), group is not None]

    def odd_arguments(self, value: Odd):
        return "called"
'''
METHODS = [
    "add",
    "async_add",
    "shout",
    "fail",
    "async_fail",
    "odd",
    "not_a_number",
    "meet",
    "spin",
    "wait_forever",
    "stubborn",
    "open_gate",
    "read_log",
    "plain_returning_coroutine",
    "own_task",
    "odd_arguments",
]


@pytest.fixture(scope="module")
def shim() -> Iterator[FakeShim]:
    spec = function_spec(
        qualname="Service",
        kind=FunctionKind.CLASS,
        methods=[MethodSpec(name=m) for m in METHODS],
        max_inputs=16,
    )
    with FakeShim({"app.py": CODE}, spec) as shim:
        yield shim


@pytest.fixture(scope="module")
def instance(shim: FakeShim) -> FakeInstance:
    return shim.start("i-main")


@pytest.fixture
def client(instance: FakeInstance) -> Iterator[httpx.Client]:
    with connect(instance) as client:
        yield client


def connect(instance: FakeInstance) -> httpx.Client:
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=instance.path, verify=NO_TLS),
        base_url="http://worker",
        timeout=30,
    )


def connect_async(instance: FakeInstance) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=instance.path, verify=NO_TLS),
        base_url="http://worker",
        timeout=30,
    )


def call_pickled(
    client: httpx.Client, method: str, *args: object, **kwargs: object
) -> httpx.Response:
    return client.post(
        f"/invoke/{method}", content=cloudpickle.dumps((args, kwargs)), headers=PICKLED
    )


# -- pickles that the activator did not check ------------------------------------------------------
SPELLINGS = [
    CONTENT_PICKLE,
    CONTENT_PICKLE.upper(),
    f"{CONTENT_PICKLE}; charset=utf-8",
    f"{CONTENT_PICKLE} ;v=1",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    "headers",
    [{}, {HEADER_TRUSTED_PICKLE: "0"}, {HEADER_TRUSTED_PICKLE: ""}, {"pilotlight-trusted": "1"}],
)
def test_a_pickle_without_the_activators_header_is_refused_unopened(
    client: httpx.Client, tmp_path: Path, spelling: str, headers: dict[str, str]
) -> None:
    marking = MarkingPickle(tmp_path / "opened")
    response = client.post(
        "/invoke/add",
        content=marking.body,
        headers={**headers, "content-type": spelling, HEADER_CALL: "req-1"},
    )

    assert (response.status_code, response.headers[HEADER_OUTCOME]) == (415, "invalid")
    assert {
        "type": "https://pilotlight.dev/problems/unsupported-media-type",
        "instance": "req-1",
    }.items() <= response.json().items()
    assert not marking.was_opened
    assert client.post("/invoke/add", json=[1]).json() == 3, (
        "the next request on this connection is read whole"
    )


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_pickle_with_the_activators_header_is_opened(
    client: httpx.Client, tmp_path: Path, spelling: str
) -> None:
    marking = MarkingPickle(tmp_path / "opened")
    response = client.post(
        "/invoke/add", content=marking.body, headers={**PICKLED, "content-type": spelling}
    )

    assert (pickle.loads(response.content), marking.was_opened) == (3, True)


@pytest.mark.parametrize(
    "kind", [f"{CONTENT_PICKLE}-stream", f"{CONTENT_PICKLE}x", "application/json", "text/plain", ""]
)
def test_a_body_of_another_type_is_json_with_the_header_too(
    client: httpx.Client, tmp_path: Path, kind: str
) -> None:
    marking = MarkingPickle(tmp_path / "opened")
    response = client.post(
        "/invoke/add", content=marking.body, headers={**PICKLED, "content-type": kind}
    )

    assert (response.status_code, response.headers[HEADER_OUTCOME], marking.was_opened) == (
        400,
        "invalid",
        False,
    )


@pytest.mark.parametrize("method", ["add", "async_add"])
@pytest.mark.parametrize(
    "body, answer", [({"x": 1}, 3), ({"x": 1, "y": 5}, 6), ([1], 3), ([1, 1], 2)]
)
def test_json_object_gives_names_and_array_gives_positions(
    client: httpx.Client, method: str, body: object, answer: int
) -> None:
    response = client.post(f"/invoke/{method}", json=body)

    assert (response.status_code, response.json()) == (200, answer)
    assert response.headers["content-type"] == "application/json"
    assert response.headers[HEADER_OUTCOME] == "ok"


@pytest.mark.parametrize(
    "body, parameter, says",
    [
        (b"{}", "x", "parameter 'x' is missing"),
        (b'{"x": 1, "z": 2}', "z", "unknown parameter 'z'"),
        (b"[1, 2, 3]", None, "3 positional arguments"),
        (b"{", None, "not JSON"),
        (b'"text"', None, "JSON object"),
        (b"\xff\xfe", None, "not JSON"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_naming_the_parameter(
    client: httpx.Client, body: bytes, parameter: str | None, says: str
) -> None:
    response = client.post("/invoke/add", content=body)

    problem = response.json()
    assert (response.status_code, response.headers[HEADER_OUTCOME]) == (400, "invalid")
    assert response.headers["content-type"] == "application/problem+json"
    assert problem["type"].endswith("/invalid-input")
    assert problem.get("parameter") == parameter
    assert says in problem["detail"]


def test_a_method_that_does_not_exist_is_not_found(client: httpx.Client) -> None:
    assert client.post("/invoke/__init__", json=[]).status_code == 404


def test_health_names_the_instance(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"instance": "i-main", "running": 0}


def test_the_status_tells_how_the_instance_came_up(client: httpx.Client) -> None:
    status = client.get("/pilotlight/health").json()

    assert list(status) == ["instance", "running", "start_kind", "phases_ms"]
    assert (status["instance"], status["running"], status["start_kind"]) == ("i-main", 0, "FORK")
    assert list(status["phases_ms"]) == ["fork", "wake"]


def test_user_exceptions_reach_json_callers_without_internals(client: httpx.Client) -> None:
    response = client.post("/invoke/fail", json={"kind": "mine"})

    problem = response.json()
    assert (response.status_code, response.headers[HEADER_OUTCOME]) == (500, "raised")
    assert problem["error"] == {"type": "app.Mine", "message": "('oh no', 7)"}
    assert "Traceback" not in response.text
    assert "app.py" not in response.text


@pytest.mark.parametrize(
    "kind, type_name, slug",
    [
        ("exit", "SystemExit", "function-raised"),
        ("memory", "MemoryError", "out-of-memory"),
        ("StopIteration", "StopIteration", "function-raised"),
        ("KeyboardInterrupt", "KeyboardInterrupt", "function-raised"),
    ],
)
def test_exceptions_that_usually_end_a_process_only_end_the_call(
    client: httpx.Client, kind: str, type_name: str, slug: str
) -> None:
    problem = client.post("/invoke/fail", json={"kind": kind}).json()

    assert problem["error"]["type"] == type_name
    assert problem["type"].endswith(slug)
    assert client.post("/invoke/add", json=[1]).json() == 3


def test_an_async_function_that_raises_is_answered_like_a_sync_one(client: httpx.Client) -> None:
    assert client.post("/invoke/async_fail").json()["error"] == {
        "type": "LookupError",
        "message": "async",
    }


@pytest.mark.parametrize("method, says", [("odd", "builtins.object"), ("not_a_number", "JSON")])
def test_a_result_that_json_cannot_carry_is_a_clear_error(
    client: httpx.Client, method: str, says: str
) -> None:
    problem = client.post(f"/invoke/{method}").json()

    assert problem["type"].endswith("/result-not-serialisable")
    assert says.removeprefix("builtins.") in problem["detail"]


def test_pickled_calls_carry_any_value(client: httpx.Client) -> None:
    response = call_pickled(client, "add", {"a"}, y={"b"})
    assert response.status_code == 500  # sets cannot be added

    response = call_pickled(client, "add", (1, 2), y=(3,))
    assert (response.headers["content-type"], pickle.loads(response.content)) == (
        CONTENT_PICKLE,
        (1, 2, 3),
    )


def test_pickled_calls_that_do_not_fit_are_refused_as_a_problem(client: httpx.Client) -> None:
    response = call_pickled(client, "add", z=1)
    assert (response.status_code, response.headers[HEADER_OUTCOME]) == (400, "invalid")

    response = client.post("/invoke/add", content=b"not a pickle", headers=PICKLED)
    assert response.status_code == 400
    assert "cannot be unpickled" in response.json()["detail"]


def test_pickled_exceptions_keep_their_type_and_carry_the_remote_traceback(
    client: httpx.Client,
) -> None:
    response = call_pickled(client, "fail", "ZeroDivisionError")

    error = pickle.loads(response.content)
    assert (response.status_code, response.headers[HEADER_OUTCOME]) == (500, "raised")
    assert type(error) is ZeroDivisionError
    assert "app.py" in error.__notes__[0]
    assert "pilotlight/worker" not in error.__notes__[0]


@pytest.mark.parametrize("kind", ["broken", "mine"])
def test_exceptions_that_cannot_be_rebuilt_here_become_remote_errors(
    client: httpx.Client, kind: str
) -> None:
    # the caller has no module `app`
    error = pickle.loads(call_pickled(client, "fail", kind).content)

    assert isinstance(error, RemoteError)
    assert error.detail["type"] in ("app.Broken", "app.Mine")
    assert "app.py" in str(error.detail["traceback"])


def test_a_plain_function_that_returns_a_coroutine_is_awaited(client: httpx.Client) -> None:
    assert client.post("/invoke/plain_returning_coroutine").json() == 3


def test_each_call_has_a_task_of_its_own_although_it_does_not_suspend(client: httpx.Client) -> None:
    before = client.post("/invoke/own_task").json()[0]
    assert [client.post("/invoke/own_task").json() for _ in range(3)] == [
        [before + n, True] for n in (1, 2, 3)
    ]


def test_arguments_whose_own_type_raises_are_the_functions_error(client: httpx.Client) -> None:
    response = client.post("/invoke/odd_arguments", json={"value": {"number": 1}})

    assert (response.status_code, response.headers[HEADER_OUTCOME]) == (500, "raised")
    assert response.json()["error"]["type"] == "LookupError"
    assert client.get("/health").json()["running"] == 0


def exchange(instance: FakeInstance, *pieces: bytes, until: bytes) -> bytes:
    """What the instance sends back to these pieces, until that is in it or it closes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(instance.path)
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.01)
        answer = b""
        while until not in answer and (more := connection.recv(65536)):
            answer += more
        return answer


def post(method: str, body: bytes, *lines: bytes) -> bytes:
    head = [b"POST /invoke/%b HTTP/1.1" % method.encode(), b"host: worker", *lines]
    return b"\r\n".join([*head, b"content-length: %d" % len(body), b"", body])


def test_requests_in_one_piece_are_answered_in_order(instance: FakeInstance) -> None:
    health = b"GET /health HTTP/1.1\r\nhost: worker\r\n\r\n"
    requests = [post("add", b"[1]"), health, post("async_add", b"[5]"), post("add", b"[2]"), health]
    answer = exchange(instance, b"".join([*requests, post("add", b"[40]")]), until=b"\r\n\r\n42")

    bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    status = b'{"instance":"i-main","running":0}'
    assert bodies == [b"3", status, b"7", b"4", status, b"42"]


def test_a_body_may_come_in_chunks_and_ask_whether_it_is_wanted(instance: FakeInstance) -> None:
    head = b"POST /invoke/add HTTP/1.1\r\nhost: w\r\nexpect: 100-continue\r\n"
    chunked = b"transfer-encoding: chunked\r\n\r\n"
    answer = exchange(
        instance, head, chunked, b"2\r\n[4\r\n", b"1\r\n0\r\n1\r\n]\r\n", b"0\r\n\r\n", until=b"42"
    )

    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("line", [b"connection: close", b"x: y"])
def test_a_connection_ends_where_its_peer_wants_no_more(
    instance: FakeInstance, line: bytes
) -> None:
    request = post("add", b"[40]", line)
    if line == b"x: y":
        request = request.replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = exchange(instance, request, until=b"never")

    assert b"\r\nconnection: close\r\n" in answer
    assert answer.endswith(b"\r\n\r\n42")


def test_a_caller_that_leaves_before_the_end_of_its_body_calls_nothing(
    instance: FakeInstance, client: httpx.Client
) -> None:
    exchange(instance, post("wait_forever", b"{}")[:-1], until=b"")
    assert client.get("/health").json()["running"] == 0


def test_a_path_is_decoded_and_its_query_ignored(client: httpx.Client) -> None:
    assert client.post("/invoke/a%64d?x=1", json=[1]).json() == 3


def test_lines_written_inside_a_call_carry_its_id(
    instance: FakeInstance, client: httpx.Client
) -> None:
    name = client.post("/invoke/shout", json=["x"], headers={HEADER_CALL: "req-7"}).json()

    assert name.startswith("call-")
    assert b"\x1ereq-7\x1ffirst x\n\x1ereq-7\x1funfinished\n" in read_until(
        instance.stdout, b"unfinished\n"
    )
    assert b"\x1ereq-7\x1fto stderr\n" in read_until(instance.stderr, b"to stderr\n")
    # a failed call's arguments are described below its traceback, without their values
    client.post("/invoke/fail", json={"kind": "mine"}, headers={HEADER_CALL: "req-8"})
    described = f"\x1ereq-8\x1f{ARGUMENTS_PREFIX}kind: str of 4\n".encode()
    assert b"app.Mine" in (told := read_until(instance.stderr, described))
    assert told.index(b"app.Mine") < told.index(described)


async def test_sixteen_calls_run_at_once_and_the_seventeenth_is_refused(
    instance: FakeInstance,
) -> None:
    async with connect_async(instance) as client:
        fifteen = [asyncio.create_task(client.post("/invoke/meet")) for _ in range(15)]
        await wait_for_running(client, 15)
        waiting = asyncio.create_task(client.post("/invoke/wait_forever"))
        await wait_for_running(client, 16)
        refused = await client.post("/invoke/meet")
        waiting.cancel()
        await wait_for_running(client, 15)
        last = await client.post("/invoke/meet")
        answers = [r.json() for r in (*await asyncio.gather(*fifteen), last)]

    assert (refused.status_code, refused.headers[HEADER_OUTCOME]) == (503, "busy")
    assert sorted(answers) == list(range(16))


@pytest.mark.parametrize(
    "method, line, logged",
    [("spin", b"spinning\n", "spin ended"), ("wait_forever", b"waiting\n", "wait ended")],
)
async def test_a_caller_that_leaves_stops_its_call(
    shim: FakeShim, method: str, line: bytes, logged: str
) -> None:
    instance = shim.start(f"i-leave-{method}")
    async with connect_async(instance) as client:
        task = asyncio.create_task(client.post(f"/invoke/{method}"))
        await asyncio.to_thread(read_until, instance.stdout, line)
        task.cancel()
        await wait_for_running(client, 0)
        assert (await client.post("/invoke/read_log")).json()[-1] == logged
        # the thread serves the next call, unharmed
        assert (await client.post("/invoke/add", json=[1])).json() == 3


@pytest.mark.parametrize("method", ["spin", "wait_forever"])
def test_a_call_past_its_deadline_is_stopped_and_answered(
    client: httpx.Client, method: str
) -> None:
    response = client.post(f"/invoke/{method}", headers={HEADER_DEADLINE: "0.02"})

    assert response.status_code == 504
    assert response.json()["clock"] == "execution"
    assert client.get("/health").json()["running"] == 0


async def test_a_call_counts_as_running_until_its_function_has_ended(shim: FakeShim) -> None:
    instance = shim.start("i-stubborn")
    async with connect_async(instance) as client:
        task = asyncio.create_task(client.post("/invoke/stubborn"))
        await asyncio.to_thread(read_until, instance.stdout, b"stubborn begins\n")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await client.get("/health")).json()["running"] == 1
        await client.post("/invoke/open_gate")
        await wait_for_running(client, 0)


async def test_a_caller_that_leaves_after_a_large_body_is_noticed(shim: FakeShim) -> None:
    instance = shim.start("i-large")
    async with connect_async(instance) as client:
        body = json.dumps({}) + " " * 1_000_000
        task = asyncio.create_task(client.post("/invoke/wait_forever", content=body))
        await asyncio.to_thread(read_until, instance.stdout, b"waiting\n")
        task.cancel()
        await wait_for_running(client, 0)


def test_the_instance_is_a_process_of_its_own_session(shim: FakeShim) -> None:
    shim.order("fork", "i-session")
    pid = shim.wait_event("forked", instance="i-session")["pid"]
    shim.wait_event("ready", instance="i-session")
    assert os.getsid(pid) == pid
