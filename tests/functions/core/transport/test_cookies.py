"""A client with `no_cookies` stores no cookie of a server, and sends those that one request
brings."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from pilotlight.core.transport.cookies import no_cookies
from tests.fakes.loopback import LoopbackServer, handler_for
from tests.fakes.plain_http import NO_TLS
from tests.fakes.user_code import Answer, Asked


class CookieServer:
    """Sets a cookie with every answer, and records the `Cookie` header of each request."""

    def __init__(self) -> None:
        self.cookies: list[str] = []
        self.server = LoopbackServer(("127.0.0.1", 0), handler_for(self.answer))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, asked: Asked) -> Answer:
        self.cookies.append(asked.headers.get("cookie", ""))
        return Answer(headers={"set-cookie": f"session=of-visitor-{len(self.cookies)}; Path=/"})


@pytest.fixture(name="server")
def _server() -> Iterator[CookieServer]:
    made = CookieServer()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def test_a_client_sends_no_cookie_of_an_earlier_answer(server: CookieServer) -> None:
    with httpx.Client(base_url=server.url, verify=NO_TLS, cookies=no_cookies()) as client:
        first = client.get("/")
        client.get("/")

    assert server.cookies == ["", ""]
    assert first.headers["set-cookie"].startswith("session="), (
        "whoever forwards the answer forwards its cookies"
    )


async def test_an_asynchronous_client_sends_no_cookie_of_an_earlier_answer(
    server: CookieServer,
) -> None:
    async with httpx.AsyncClient(
        base_url=server.url, verify=NO_TLS, cookies=no_cookies()
    ) as client:
        await client.get("/")
        await client.get("/")

    assert server.cookies == ["", ""]


def test_a_cookie_header_of_one_request_is_sent_with_that_request_only(
    server: CookieServer,
) -> None:
    with httpx.Client(base_url=server.url, verify=NO_TLS, cookies=no_cookies()) as client:
        client.get("/", headers={"cookie": "session=own"})
        client.get("/")

    assert server.cookies == ["session=own", ""]


def test_a_client_of_httpx_alone_would_send_it(server: CookieServer) -> None:
    with httpx.Client(base_url=server.url, verify=NO_TLS) as client:
        client.get("/")
        client.get("/")

    assert server.cookies == ["", "session=of-visitor-1"]
