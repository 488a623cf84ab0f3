"""Streams through a real nginx with its default settings, which hold answers back: ours ask it not
to."""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.activator.conftest import KEY, Edge
from tests.activator.streams.world import EVENTS, GENERATOR, Released
from tests.activator.test_gateway import until
from tests.fakes.routes import route_of, spec_of

NGINX = shutil.which("nginx")
READ_TIMEOUT_S = 3
CONFIGURATION = """\
daemon off;
worker_processes 1;
user {user};
pid {home}/pid;
error_log {home}/error.log warn;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {home}/body;
  proxy_temp_path {home}/proxy;
  fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi;
  scgi_temp_path {home}/scgi;
  server {{
    listen unix:{home}/nginx.sock;
    location / {{
      proxy_pass {upstream};
      proxy_read_timeout {read_timeout_s}s;
      {more}
    }}
  }}
}}
"""

pytestmark = pytest.mark.skipif(
    NGINX is None and not os.environ.get("CI"), reason="no nginx: scripts/install-system-packages"
)


@pytest.fixture(name="every_s")
def _every_s() -> float:
    return 0.05


@pytest.fixture(name="more", params=["", "proxy_http_version 1.1;"], ids=["as it is", "HTTP/1.1"])
def _more(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(name="proxied")
async def _proxied(edge: Edge, short_tmp: Path, more: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client that speaks to the edge through nginx."""
    edge.add(route_of(spec_of(methods=GENERATOR)))
    home = short_tmp / "nginx"
    home.mkdir()
    text = CONFIGURATION.format(
        home=home,
        user=getpass.getuser(),
        upstream=edge.url,
        read_timeout_s=READ_TIMEOUT_S,
        more=more,
    )
    (home / "nginx.conf").write_text(text)
    process = await asyncio.create_subprocess_exec(
        str(NGINX), "-c", str(home / "nginx.conf"), "-p", str(home), "-e", str(home / "error.log")
    )
    await until((home / "nginx.sock").exists)
    async with httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=str(home / "nginx.sock"), retries=5), timeout=60
    ) as client:
        yield client
    process.terminate()
    await process.wait()


URL = "http://proxy/v1/functions/shop/hello:invoke"


async def test_each_item_arrives_before_the_next_one_is_made(
    proxied: httpx.AsyncClient, worker: Released
) -> None:
    worker.put(b"data: 0\n\n")
    async with proxied.stream("POST", URL, json={}, headers=EVENTS) as answer:
        lines = answer.aiter_lines()
        for n in range(20):
            while (line := await anext(lines)) != f"data: {n}":
                assert line in ("", ": waiting")
            worker.put(b"data: %d\n\n" % (n + 1))
        worker.put(None)
        rest = [line async for line in lines]

    assert [line for line in rest if line and line != ": waiting"][:2] == ["data: 20", "event: end"]


@pytest.mark.parametrize("more", [""])
async def test_lines_are_not_held_back_either(proxied: httpx.AsyncClient, worker: Released) -> None:
    worker.put(b"0\n")
    async with proxied.stream(
        "POST", URL, json={}, headers={"authorization": f"Bearer {KEY}"}
    ) as answer:
        lines = answer.aiter_lines()
        for n in range(20):
            assert await anext(lines) == str(n)
            worker.put(b"%d\n" % (n + 1))
        worker.put(None)


@pytest.mark.parametrize("more", [""])
@pytest.mark.slow  # waits longer than the proxy does
async def test_a_start_longer_than_the_proxys_patience_is_waited_for(
    edge: Edge, proxied: httpx.AsyncClient, worker: Released
) -> None:
    edge.fleet.gate.clear()
    call = asyncio.create_task(proxied.post(URL, json={}, headers=EVENTS))
    await asyncio.sleep(READ_TIMEOUT_S + 1)
    edge.fleet.gate.set()
    worker.put(b"data: 0\n\n", None)
    answer = await call

    assert answer.status_code == 200
    assert answer.text.count(": waiting\n\n") > 1
    assert "data: 0\n\nevent: end\n" in answer.text


@pytest.mark.parametrize("more", [""])
async def test_a_caller_who_leaves_the_proxy_leaves_the_worker(
    edge: Edge, proxied: httpx.AsyncClient, worker: Released
) -> None:
    worker.put(b"data: 0\n\n")
    async with proxied.stream("POST", URL, json={}, headers=EVENTS) as answer:
        assert await anext(answer.aiter_lines()) in ("data: 0", ": waiting")
    await until(lambda: sum(w.cancelled for w in edge.fleet.workers.values()) == 1)
