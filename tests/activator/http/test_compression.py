"""Content codings: compressed requests are decoded within their limit, JSON answers are compressed
for callers that accept it."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from typing import Any

import httpx
import pytest

from activator.http import compression
from activator.settings import ActivatorSettings
from pilotlight import errors
from pilotlight.spec.function import MethodSpec
from tests.activator.conftest import PATIENCE_S, Edge
from tests.activator.test_gateway import problem_of
from tests.fakes.fake_controller import FakeController
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of

LIMIT = 1_000_000
LARGE = {"text": "abc " * 5_000}


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(
        max_body_bytes=LIMIT, body_timeout_s=PATIENCE_S, header_timeout_s=PATIENCE_S
    )


@pytest.fixture(name="any_arguments")
def _any_arguments(edge: Edge) -> Edge:
    edge.add(route_of(spec_of(methods=(MethodSpec(),))))
    return edge


async def send(
    edge: Edge, body: bytes, coding: str, path: str = "shop/hello:invoke"
) -> httpx.Response:
    return await edge.call(path, content=body, headers={"content-encoding": coding})


@pytest.mark.parametrize(
    "coding, encode",
    [("gzip", gzip.compress), ("X-GZip", gzip.compress), ("deflate", zlib.compress)],
)
async def test_a_compressed_body_is_decoded(any_arguments: Edge, coding: str, encode: Any) -> None:
    for _ in ("cold", "warm"):
        answer = await send(any_arguments, encode(json.dumps(LARGE).encode()), coding)
        assert (answer.status_code, answer.json()) == (200, LARGE)
    plain = await send(any_arguments, b'{"x": 1}', "identity")
    assert plain.json() == {"x": 1}


async def test_a_submitted_body_and_one_under_a_key_are_decoded(
    any_arguments: Edge, controller: FakeController
) -> None:
    body = gzip.compress(b'{"x": 2}')
    assert (await send(any_arguments, body, "gzip", "shop/hello:submit")).status_code == 202
    headers = {"content-encoding": "gzip", "idempotency-key": "one", "accept-encoding": "gzip"}
    for replayed, level in ((False, 9), (True, 0)):
        body = gzip.compress(b'{"x": 2}', level)
        answer = await any_arguments.call(content=body, headers=headers)
        assert (answer.json(), "idempotency-replayed" in answer.headers) == ({"x": 2}, replayed)


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "compress"])
async def test_an_unknown_coding_is_415_and_names_the_known_ones(
    any_arguments: Edge, coding: str
) -> None:
    answer = await send(any_arguments, b"x", coding)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, deflate")
    assert str(problem_of(answer)["type"]).endswith("/unsupported-media-type")


@pytest.mark.parametrize(
    "body, why",
    [
        pytest.param(b'{"x": 1}', "incorrect header check", id="plain"),
        pytest.param(gzip.compress(b'{"x": 1}')[:-4], "incomplete", id="cut off"),
        pytest.param(
            gzip.compress(b'{"x": 1}')[:-8] + b"12345678", "incorrect data check", id="wrong sum"
        ),
        pytest.param(
            gzip.compress(b"[1]") + gzip.compress(b"[2]"), "bytes after its end", id="two members"
        ),
        pytest.param(
            gzip.compress(bytes(65_513), 0).ljust(70_000), "bytes after", id="at a piece's end"
        ),
    ],
)
async def test_a_body_that_is_not_of_its_coding_is_refused(
    any_arguments: Edge, body: bytes, why: str
) -> None:
    answer = await send(any_arguments, body, "gzip")
    assert (answer.status_code, why in str(problem_of(answer)["detail"])) == (400, True)


async def test_a_bomb_is_refused_at_the_limit(any_arguments: Edge) -> None:
    answer = await send(any_arguments, gzip.compress(bytes(LIMIT + 1)), "gzip")
    assert (answer.status_code, problem_of(answer)["limit_bytes"]) == (413, LIMIT)
    assert any_arguments.fleet.started == []


async def test_a_bomb_takes_little_memory_and_lets_others_run() -> None:
    bomb = gzip.compress(bytes(50_000_000), 1)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    reserved: list[int] = []
    tracemalloc.start()
    try:
        with pytest.raises(errors.TooLarge):
            await compression.decode(bomb, b"gzip", limit_bytes=5_000_000, acquire=reserved.append)
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()
        task.cancel()
    assert sum(reserved) <= 5_000_000
    assert turns >= 15  # one in 256 KiB


async def test_a_large_json_answer_is_compressed_for_those_who_accept_it(
    any_arguments: Edge,
) -> None:
    small = {"text": "abc"}
    for accept, body, coding in (
        ("gzip, deflate", LARGE, "gzip"),
        ("identity;q=0.5, GZIP;q=0.8", LARGE, "gzip"),
        ("gzip;q=0, deflate", LARGE, None),
        ("br", LARGE, None),
        ("gzip", small, None),
    ):
        for _ in ("cold", "warm"):
            async with any_arguments.client.stream(
                "POST",
                f"{any_arguments.url}/v1/functions/shop/hello:invoke",
                json=body,
                headers={"authorization": "Bearer pl_test", "accept-encoding": accept},
            ) as answer:
                raw = b"".join([piece async for piece in answer.aiter_raw()])
            assert answer.headers.get("content-encoding") == coding
            assert int(answer.headers["content-length"]) == len(raw)
            if coding:
                assert answer.headers["vary"] == "accept-encoding"
                assert len(raw) < 1_000
                raw = gzip.decompress(raw)
            assert json.loads(raw) == body
    records = await any_arguments.settle()
    assert len(records) == 10
    assert {record.outcome for record in records.values()} == {"ok"}


@pytest.mark.parametrize(
    "content_type", ["text/event-stream", "application/x-ndjson", "text/plain", "image/png"]
)
async def test_streams_and_other_types_are_not_compressed(
    any_arguments: Edge, content_type: str
) -> None:
    async def answered(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(body=b"data: 1\n\n" * 5_000, content_type=content_type)

    any_arguments.fleet.behaviour = answered
    for _ in ("cold", "warm"):
        answer = await any_arguments.call(json={}, headers={"accept-encoding": "gzip"})
        assert answer.status_code == 200
        assert "content-encoding" not in answer.headers


async def test_a_record_is_compressed_too(
    any_arguments: Edge, controller: FakeController, shipping: object
) -> None:
    accepted = await any_arguments.call("shop/hello:submit", json=LARGE)
    url = f"{any_arguments.url}/v1/calls/{accepted.json()['id']}"
    headers = {"authorization": "Bearer pl_test", "accept-encoding": "gzip"}
    answer = await any_arguments.client.get(url, params={"wait_s": 20}, headers=headers)
    assert (answer.headers["content-encoding"], answer.json()["result"]) == ("gzip", LARGE)
