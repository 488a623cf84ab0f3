"""A body is read once its caller's quotas have room for it, and kept in memory only while somebody
needs it there."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from activator.async_calls.pending import LEAST_BYTES
from activator.settings import ActivatorSettings
from pilotlight.spec.function import MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.conftest import KEY, PATIENCE_S, Edge
from tests.activator.llm.openai.conftest import llm
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import TENANT, route_of, spec_of

LIMIT = 2**20
MOST = 12
POOR = "pl_poor"
KIB_100 = 100 * 1024


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(
        body_timeout_s=PATIENCE_S,
        submitted_bytes=2 * LIMIT,
        tenant_submitted_bytes=LIMIT,
        waiting_bytes=2 * LIMIT,
        tenant_waiting_bytes=LIMIT,
        max_pending_submits=2 * MOST,
    )


class _Gated:
    """Answers with the length of what came, once `gate` is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.lengths: list[int] = []

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        await self.gate.wait()
        self.lengths.append(len(request.body))
        return WorkerAnswer(body=b"%d" % len(request.body))


@pytest.fixture(name="function")
async def _function(edge: Edge) -> AsyncIterator[_Gated]:
    gated = _Gated()
    edge.fleet.behaviour = gated
    scaling = Scaling(max_instances=1)
    edge.add(route_of(spec_of(methods=(MethodSpec(parameters=("x",)),), scaling=scaling)))
    yield gated
    gated.gate.set()


async def _status_without_a_body(edge: Edge, path: str, headers: str = "") -> bytes:
    """The status of a request whose body does not come."""
    place = urlsplit(edge.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    lines = (
        f"host: x\r\nauthorization: Bearer {POOR}\r\ncontent-type: "
        f"application/json\r\ncontent-length: 500\r\n{headers}"
    )
    writer.write(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode())
    try:
        return (await asyncio.wait_for(reader.readline(), PATIENCE_S)).split(b" ", 1)[1].strip()
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.mark.parametrize(
    "path,headers",
    [
        pytest.param(
            "/v1/functions/shop/hello:invoke", "idempotency-key: a\r\n", id="idempotency key"
        ),
        pytest.param(
            "/v1/models/shop/hello:predict",
            "idempotency-key: a\r\n",
            id="idempotency key of a model server",
        ),
        pytest.param("/v1/chat/completions", "", id="language model"),
        pytest.param("/v1/functions/shop/chat:invoke", "", id="language model by its name"),
        pytest.param("/v1/functions/shop/chat:submit", "", id="language model, submitted"),
        pytest.param("/fn/shop/chat/v1/chat/completions", "", id="language model behind fn"),
    ],
)
async def test_who_is_over_its_quota_is_refused_before_its_body_comes(
    edge: Edge, function: _Gated, path: str, headers: str
) -> None:
    function.gate.set()
    edge.add(route_of(llm("chat")))
    edge.add_key(POOR, quotas={"requests_per_s": 0.01, "burst": 1})
    assert (await edge.call(key=POOR, json={"x": 1})).status_code == 200

    assert await _status_without_a_body(edge, path, headers) == b"429 Too Many Requests"


async def test_a_request_under_a_key_counts_once(edge: Edge, function: _Gated) -> None:
    function.gate.set()
    edge.add_key(POOR, quotas={"requests_per_s": 0.01, "burst": 2, "concurrent": 1})

    codes = [
        (await edge.call(key=POOR, json={"x": n}, headers={"idempotency-key": str(n)})).status_code
        for n in range(3)
    ]

    assert codes == [200, 200, 429]


async def test_submitted_bodies_are_not_kept_in_memory(edge: Edge, function: _Gated) -> None:
    await edge.call("shop/hello:submit", json={"x": "y"})
    tracemalloc.start()
    try:
        for _ in range(9):
            assert (
                await edge.call("shop/hello:submit", json={"x": "y" * KIB_100})
            ).status_code == 202
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept < 5 * KIB_100
    function.gate.set()
    await until(lambda: len(function.lengths) == 10, timeout_s=PATIENCE_S)
    assert (
        sorted(function.lengths)[1:]
        == [KIB_100 + len(json.dumps({"x": ""}, separators=(",", ":")))] * 9
    )


async def test_submitted_calls_of_one_tenant_have_a_bound_in_bytes(
    edge: Edge, function: _Gated
) -> None:
    edge.add_key("pl_other", tenant="other")
    edge.add(route_of(spec_of(methods=(MethodSpec(parameters=("x",)),)), tenant="other"))
    large = {"x": "y" * (LIMIT // 2)}
    assert (await edge.call("shop/hello:submit", json=large)).status_code == 202

    refused = await edge.call("shop/hello:submit", json=large)
    others = await edge.call("shop/hello:submit", key="pl_other", json=large)

    assert (refused.status_code, others.status_code) == (429, 202)
    assert "activator.tenant_submitted_bytes" in refused.json()["detail"]
    assert "retry-after" in refused.headers


async def test_small_submitted_calls_of_one_tenant_leave_room_for_others(
    edge: Edge, function: _Gated
) -> None:
    edge.add_key("pl_other", tenant="other")
    edge.add(route_of(spec_of(methods=(MethodSpec(parameters=("x",)),)), tenant="other"))

    codes = [
        (await edge.call("shop/hello:submit", json={"x": "y"})).status_code for _ in range(MOST + 1)
    ]
    others = await edge.call("shop/hello:submit", key="pl_other", json={"x": "y"})

    assert codes == [202] * MOST + [429]
    assert others.status_code == 202


async def test_a_submitted_call_takes_room_however_small_it_is(
    edge: Edge, function: _Gated
) -> None:
    with edge.calls.reading(TENANT, LIMIT - 2 * LEAST_BYTES):
        codes = [
            (await edge.call("shop/hello:submit", json={"x": "y"})).status_code for _ in range(3)
        ]

    assert codes == [202, 202, 429]
    function.gate.set()
    await until(lambda: len(function.lengths) == 2, timeout_s=PATIENCE_S)
    assert edge.calls.pending.bytes_of == {TENANT: 2 * LEAST_BYTES}


async def test_room_is_set_aside_for_bodies_that_are_still_read(
    edge: Edge, function: _Gated
) -> None:
    edge.add_key(POOR)
    place = urlsplit(edge.url)
    head = f"host: x\r\nauthorization: Bearer {POOR}\r\ncontent-length: {LIMIT - 100}\r\n\r\n"
    _, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(f"POST /v1/functions/shop/hello:submit HTTP/1.1\r\n{head}".encode())
    await until(lambda: edge.calls.pending.bytes_of[TENANT] > LIMIT // 2)

    while_reading = await edge.call("shop/hello:submit", json={"x": "y" * 200})
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    await until(lambda: not edge.calls.pending.bytes_of[TENANT])

    assert while_reading.status_code == 429
    assert (await edge.call("shop/hello:submit", json={"x": "y" * 200})).status_code == 202


HALF = {"x": "y" * (LIMIT // 2 + 1)}


def _pieces(value: object) -> AsyncIterator[bytes]:
    """A body whose length nobody knows before."""
    data = json.dumps(value).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(data), KIB_100):
            yield data[at : at + KIB_100]

    return pieces()


@pytest.mark.parametrize(
    "path,headers",
    [
        pytest.param("functions/shop/hello:invoke", {}, id="call"),
        pytest.param("functions/shop/hello:invoke", {"idempotency-key": "b"}, id="idempotency key"),
        pytest.param("models/shop/hello:predict", {}, id="model server"),
        pytest.param("chat/completions", {}, id="language model"),
    ],
)
async def test_bodies_of_calls_that_wait_have_a_bound_in_bytes(
    edge: Edge, function: _Gated, path: str, headers: dict[str, str]
) -> None:
    edge.add_key("pl_other", tenant="other")
    edge.add(route_of(spec_of(methods=(MethodSpec(parameters=("x",)),)), tenant="other"))
    waiting = [asyncio.create_task(edge.call(json=HALF))]
    await until(lambda: edge.gateway.bodies.bytes_of[TENANT] > LIMIT // 2)

    for body in ({"json": HALF}, {"content": _pieces(HALF)}):
        own = {"authorization": f"Bearer {KEY}", "content-type": "application/json", **headers}
        refused = await edge.client.post(f"{edge.url}/v1/{path}", headers=own, **body)
        assert refused.status_code == 429, refused.text
        assert "activator.tenant_waiting_bytes" in refused.text
        assert "retry-after" in refused.headers
    waiting.append(asyncio.create_task(edge.call(key="pl_other", json=HALF)))
    await until(lambda: edge.gateway.bodies.bytes_of["other"] > LIMIT // 2)

    function.gate.set()
    assert [(await task).status_code for task in waiting] == [200, 200]
    await until(lambda: not edge.gateway.bodies.bytes_of)
    assert repr(edge.gateway.bodies) == f"<Bodies 0/{2 * LIMIT} bytes of 0 tenants>"


async def test_all_tenants_together_have_a_bound_too(edge: Edge, function: _Gated) -> None:
    edge.gateway.bodies.acquire("a", LIMIT)
    edge.gateway.bodies.acquire("b", LIMIT // 2)

    refused = await edge.call(json=HALF)

    assert refused.status_code == 429
    assert "activator.waiting_bytes" in refused.json()["detail"]


async def test_a_body_alone_has_room_however_large(edge: Edge, function: _Gated) -> None:
    function.gate.set()

    assert (await edge.call(json={"x": "y" * 2 * LIMIT})).status_code == 200


async def test_a_caller_that_leaves_gives_the_room_of_its_body_back(
    edge: Edge, function: _Gated
) -> None:
    waiting = asyncio.create_task(edge.call(json=HALF))
    await until(lambda: bool(edge.gateway.bodies.bytes_of[TENANT]))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    await until(lambda: not edge.gateway.bodies.bytes_of)
