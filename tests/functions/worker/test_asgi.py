"""Web applications through the real worker: HTTP, lifespan, root path, WebSocket."""

from __future__ import annotations

import http.client
import os
import signal
import socket
from collections.abc import Iterator

import httpx
import pytest
import websockets.sync.client

from pilotlight.protocol import HEADER_CALL, HEADER_OUTCOME, HEADER_ROOT_PATH
from pilotlight.spec.function import FunctionKind, FunctionSpec
from tests.fakes.fake_shim import FakeInstance, FakeShim, ShimTimeout, function_spec, read_until
from tests.fakes.plain_http import NO_TLS

CODE = """
import json

def build():
    print("built")

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            print("startup")
            scope["state"]["model"] = "loaded"
            await send({"type": "lifespan.startup.complete"})
            await receive()
            print("shutdown")
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            while (message := await receive())["type"] == "websocket.receive":
                await send({"type": "websocket.send", "text": scope["path"] + " " + message["text"]})
            print("left")
        elif scope["path"].endswith("/fail"):
            raise ValueError("secret detail of /srv")
        elif scope["path"].endswith("/late"):
            head = [(b"content-length", b"5")]
            await send({"type": "http.response.start", "status": 500, "headers": head})
            await send({"type": "http.response.body", "body": b"sor", "more_body": True})
            if scope["query_string"] != b"cut":
                await send({"type": "http.response.body", "body": b"ry"})
            raise ValueError("after the answer")
        else:
            print("asked for", scope["path"])
            seen = {k: scope[k] for k in ("path", "root_path", "method", "state", "extensions")}
            body = json.dumps({**seen, "query": scope["query_string"].decode(), "raw": scope["raw_path"].decode()}).encode()
            await send({"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": body})
    return app
"""


def asgi_spec(qualname: str = "build") -> FunctionSpec:
    return function_spec(qualname=qualname, kind=FunctionKind.ASGI, max_inputs=8)


@pytest.fixture(scope="module")
def shim() -> Iterator[FakeShim]:
    with FakeShim({"app.py": CODE}, asgi_spec()) as shim:
        yield shim


@pytest.fixture(scope="module")
def instance(shim: FakeShim) -> FakeInstance:
    return shim.start()


def test_the_application_sees_the_public_path(instance: FakeInstance, client: httpx.Client) -> None:
    headers = {HEADER_ROOT_PATH: "/fn/app/web", HEADER_CALL: "req-1"}
    response = client.put("/asgi/a%20b?q=1", headers=headers)

    assert response.status_code == 201
    assert response.headers[HEADER_OUTCOME] == "ok"
    assert response.json() == {
        "path": "/fn/app/web/a b",
        "raw": "/fn/app/web/a%20b",
        "root_path": "/fn/app/web",
        "method": "PUT",
        "query": "q=1",
        "state": {"model": "loaded"},
        "extensions": {},
    }
    assert b"\x1ereq-1\x1fasked for /fn/app/web/a b\n" in read_until(instance.stdout, b"a b\n")


def test_without_a_root_path_the_application_is_at_the_root(client: httpx.Client) -> None:
    assert client.get("/asgi").json()["path"] == "/"
    assert client.get("/asgi/x").json()["path"] == "/x"


def test_an_application_that_raises_is_answered_without_internals(
    instance: FakeInstance, client: httpx.Client
) -> None:
    response = client.get("/asgi/fail")

    assert (response.status_code, response.headers[HEADER_OUTCOME]) == (500, "raised")
    assert response.json()["error"]["type"] == "ValueError"
    assert b"Traceback" in read_until(instance.stderr, b"/srv\n")


def test_a_connection_outlives_an_error_after_the_whole_answer(instance: FakeInstance) -> None:
    """Starlette's error middleware answers 500 and raises again; the next caller's request is on
    the same pooled connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(instance.path)
        for _ in range(2):
            connection.sendall(b"GET /asgi/late HTTP/1.1\r\nHost: worker\r\n\r\n")
            with http.client.HTTPResponse(connection) as response:
                response.begin()
                assert (response.status, response.read()) == (500, b"sorry")
            assert b"Traceback" in read_until(instance.stderr, b"after the answer\n")
        connection.sendall(b"GET /asgi/late?cut HTTP/1.1\r\nHost: worker\r\n\r\n")
        with http.client.HTTPResponse(connection) as response:
            response.begin()
            with pytest.raises(http.client.IncompleteRead):
                response.read()


def test_invoke_does_not_exist_for_an_application(client: httpx.Client) -> None:
    assert client.post("/invoke/").status_code == 404
    assert client.get("/health").status_code == 200


def test_websockets_pass_through(instance: FakeInstance) -> None:
    headers = {HEADER_ROOT_PATH: "/fn/app/web"}
    with websockets.sync.client.unix_connect(
        instance.path, "ws://worker/asgi/chat", additional_headers=headers
    ) as socket:
        socket.send("hello")
        assert socket.recv() == "/fn/app/web/chat hello"
    read_until(instance.stdout, b"left\n")


def test_lifespan_runs_once_around_the_instances_life(shim: FakeShim) -> None:
    instance = shim.start("i-life")
    pid = shim.wait_event("forked", instance="i-life")["pid"]
    assert read_until(instance.stdout, b"startup\n") == b"built\nstartup\n"
    os.kill(pid, signal.SIGTERM)
    assert shim.wait_event("exited", instance="i-life")["status"] == 0
    assert read_until(instance.stdout, b"never") == b"shutdown\n"


def test_a_request_to_end_drains_and_closes_an_open_websocket(shim: FakeShim) -> None:
    instance = shim.start("i-drain")
    with websockets.sync.client.unix_connect(instance.path, "ws://worker/asgi/chat") as socket:
        socket.send("hello")
        socket.recv()
        with httpx.Client(transport=httpx.HTTPTransport(uds=instance.path, verify=NO_TLS)) as one:
            assert one.post("http://worker/pilotlight/end").status_code == 200
        with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
            socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
    assert shim.wait_event("exited", instance="i-drain")["status"] == 0


@pytest.mark.parametrize("failure", ["raise", "report"])
def test_a_failing_lifespan(failure: str) -> None:
    report = 'await send(dict(type="lifespan.startup.failed", message="no db"))'
    code = f"""
        async def app(scope, receive, send):
            if scope["type"] == "lifespan":
                {report if failure == "report" else 'raise TypeError("what is lifespan?")'}
            else:
                await send(dict(type="http.response.start", status=204, headers=[]))
                await send(dict(type="http.response.body"))
        def build(): return app
    """
    with FakeShim({"app.py": code}, asgi_spec()) as shim:
        if failure == "report":
            with pytest.raises(ShimTimeout, match="no db"):
                shim.start()
            return
        instance = shim.start()  # ASGI: an application may not know lifespan at all
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=instance.path, verify=NO_TLS),
            base_url="http://worker",
            timeout=30,
        ) as client:
            assert client.get("/asgi/").status_code == 204


def test_a_class_may_carry_the_application() -> None:
    code = """
        class Web:
            def __init__(self):
                self.hits = 0
            def serve(self):
                async def app(scope, receive, send):
                    if scope["type"] == "http":
                        self.hits += 1
                        await send(dict(type="http.response.start", status=200, headers=[]))
                        await send(dict(type="http.response.body", body=str(self.hits).encode()))
                return app
            serve._pilotlight_marks = {"asgi": True}
    """
    with FakeShim({"app.py": code}, asgi_spec("Web")) as shim:
        instance = shim.start()
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=instance.path, verify=NO_TLS),
            base_url="http://worker",
            timeout=30,
        ) as client:
            assert [client.get("/asgi/").text for _ in range(2)] == ["1", "2"]


def test_a_fastapi_application_with_its_docs() -> None:
    code = """
        import fastapi
        def build():
            app = fastapi.FastAPI()
            @app.get("/square/{x}")
            def square(x: int):
                return x * x
            return app
    """
    with FakeShim({"app.py": code}, asgi_spec()) as shim:
        instance = shim.start()
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=instance.path, verify=NO_TLS),
            base_url="http://worker",
            timeout=30,
        ) as client:
            assert (
                client.get("/asgi/square/7", headers={HEADER_ROOT_PATH: "/fn/a/web"}).json() == 49
            )
            assert (
                "/fn/a/web/openapi.json"
                in client.get("/asgi/docs", headers={HEADER_ROOT_PATH: "/fn/a/web"}).text
            )
