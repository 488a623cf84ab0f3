"""Answers in Redis, and a Redis that is dead, slow, full, or not to be trusted."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from activator.calls.response_store import ResponseOwner, StoredResponse
from activator.coordination import redis_client
from activator.response_cache import redis_store
from activator.response_cache.redis_store import (
    MAX_HEADERS,
    RedisResponses,
    decode_frame,
    encode_frame,
)
from activator.settings import ActivatorSettings
from activator.worker_client.connection import WHOLE_BODY_BYTES, WorkerResponse
from pilotlight.spec.policies import ResponseCacheSpec
from tests.activator.conftest import Edge, served
from tests.activator.response_cache.test_cached_calls import Counting, told
from tests.activator.test_gateway import until
from tests.fakes.redis_server import MortalRedis
from tests.fakes.routes import TEST_KEY, route_of, spec_of

KEY, OTHER = b"k" * 32, b"o" * 32
OWNER = ResponseOwner("t", "t/main/shop/hello", "t")
ANSWER = WorkerResponse(None, 200, [(b"content-type", b"application/json")], b'{"a":1}')
SHARED = ResponseCacheSpec(ttl_s=60, shared=True)


def store_at(url: str, *, platform: str = "p", total_bytes: int = 2**20) -> RedisResponses:
    return RedisResponses(url, platform=platform, sealer=TEST_KEY.replies, total_bytes=total_bytes)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stall of a busy machine is not a Redis that is away."""
    monkeypatch.setattr(redis_store, "FIND_S", 30.0)
    monkeypatch.setattr(redis_client, "ANSWER_S", 30.0)


@pytest.fixture(name="store")
async def _store(redis_url: str) -> AsyncIterator[RedisResponses]:
    store = store_at(redis_url, platform=uuid.uuid4().hex[:8])
    yield store
    await store.aclose()


async def put(
    store: RedisResponses,
    key: bytes = KEY,
    answer: WorkerResponse = ANSWER,
    *,
    owner: ResponseOwner = OWNER,
    ttl_s: float = 60.0,
) -> None:
    """Store an answer, and wait until it is there."""
    store.store(key, owner, answer, ttl_s=ttl_s)
    await until(lambda: " 0 on their way" in repr(store))


async def body_of(store: RedisResponses, key: bytes = KEY) -> bytes | None:
    found = await store.find(key, max_age_s=60.0)
    return found.answer.body if found is not None else None


# -- what is stored ----------------------------------------------------------------------------------
async def test_an_answer_is_found_by_its_key_with_its_age(store: RedisResponses) -> None:
    await put(store)
    found = await store.find(KEY, max_age_s=60.0)
    assert found is not None
    assert (found.answer.status, found.answer.headers, found.answer.body) == (
        200,
        ANSWER.headers,
        ANSWER.body,
    )
    assert 0 <= time.monotonic() - found.at < 30
    assert await body_of(store, OTHER) is None


async def test_an_answer_expires_in_redis(store: RedisResponses, redis_url: str) -> None:
    await put(store, ttl_s=20.0)
    async with Redis.from_url(redis_url, decode_responses=True) as raw:
        keys = [key async for key in raw.scan_iter("*")]
        left = {key: await raw.pttl(key) for key in keys}
        assert all(0 < ms <= 20_000 for ms in left.values()), left


async def test_sizes_are_limited_for_a_tenant_and_for_all(redis_url: str) -> None:
    answer = WorkerResponse(None, 200, [], b"x" * 1000)
    store = store_at(redis_url, platform=uuid.uuid4().hex[:8], total_bytes=20_000)
    try:
        for number in range(8):
            await put(store, bytes([number]) * 32, answer)
        kept = [number for number in range(8) if await body_of(store, bytes([number]) * 32)]
        assert kept == [5, 6, 7]
        for number in range(8, 20):
            owner = ResponseOwner(f"t-{number}", "f", "")
            await put(store, bytes([number]) * 32, answer, owner=owner)
        kept = [number for number in range(20) if await body_of(store, bytes([number]) * 32)]
        assert 4 <= len(kept) <= 7
    finally:
        await store.aclose()


async def test_many_functions_and_callers_of_a_tenant_displace_its_own_answers(
    redis_url: str,
) -> None:
    answer = WorkerResponse(None, 200, [], b"x" * 1000)
    store = store_at(redis_url, platform=uuid.uuid4().hex[:8], total_bytes=20_000)
    quiet = ResponseOwner("quiet", "quiet/main/shop/hello", "quiet")
    try:
        for number in range(2):
            await put(store, bytes([number]) * 32, answer, owner=quiet)
        for number in range(2, 30):
            owner = ResponseOwner("loud", f"loud/main/shop/f-{number}", f"caller-{number}")
            await put(store, bytes([number]) * 32, answer, owner=owner)
        assert [await body_of(store, bytes([number]) * 32) for number in range(2)] == (
            [answer.body] * 2
        )
    finally:
        await store.aclose()


# -- what is not believed ----------------------------------------------------------------------------
async def test_a_value_that_was_moved_or_changed_is_not_believed(
    store: RedisResponses, redis_url: str
) -> None:
    await put(store)
    async with Redis.from_url(redis_url, decode_responses=True) as raw:
        (name,) = [key async for key in raw.scan_iter("*") if KEY.hex() in key]
        sealed = str(await raw.hget(name, "answer"))
        for value in (sealed, "k1.x", "", "x" * 2**20):
            await raw.hset(name.replace(KEY.hex(), OTHER.hex()), "answer", value)
            assert await body_of(store, OTHER) is None
        await raw.hset(name, "answer", sealed[:-5] + "AAAA=")
        assert await body_of(store) is None
    assert store.failures == 0


@pytest.mark.parametrize("cut", [0, 10, 50, 60])
def test_a_frame_that_was_cut_is_refused(cut: int) -> None:
    frame = encode_frame(KEY, 5.0, ANSWER)
    assert frame is not None
    assert decode_frame(KEY, frame)[0] == 5.0
    with pytest.raises(ValueError, match="the frame"):
        decode_frame(KEY, frame[:cut])
    with pytest.raises(ValueError, match="another key"):
        decode_frame(OTHER, frame)


def test_a_frame_has_few_headers_and_a_success() -> None:
    many = [(b"n", b"v")] * (MAX_HEADERS + 1)
    assert encode_frame(KEY, 0.0, WorkerResponse(None, 200, many, b"")) is None
    assert encode_frame(KEY, 0.0, WorkerResponse(None, 200, [(b"n", b"v" * 5000)], b"")) is None
    failed = encode_frame(KEY, 0.0, WorkerResponse(None, 500, [], b""))
    assert failed is not None
    with pytest.raises(ValueError, match="another status"):
        decode_frame(KEY, failed)


async def test_the_largest_answer_fits(store: RedisResponses) -> None:
    large = WorkerResponse(None, 200, [], b"x" * WHOLE_BODY_BYTES)
    await put(store, answer=large)
    assert await body_of(store) == large.body


# -- a Redis that does not answer --------------------------------------------------------------------
async def test_a_dead_redis_is_not_asked_for_a_while(mortal_redis: MortalRedis) -> None:
    store = store_at(mortal_redis.url)
    mortal_redis.kill()
    assert await body_of(store) is None
    assert store.failures == 1
    assert await body_of(store) is None
    store.store(KEY, OWNER, ANSWER, ttl_s=60.0)
    assert (store.failures, " 0 on their way" in repr(store)) == (1, True)
    await store.aclose()


async def test_a_full_redis_stores_nothing_and_fails_nothing(mortal_redis: MortalRedis) -> None:
    async with Redis.from_url(mortal_redis.url) as raw:
        await raw.config_set("maxmemory", "1")
    store = store_at(mortal_redis.url)
    await put(store)
    assert store.failures == 1
    assert await body_of(store) is None
    await store.aclose()


async def test_a_frozen_redis_delays_a_call_by_its_deadline_only(
    mortal_redis: MortalRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "FIND_S", 0.05)
    store = store_at(mortal_redis.url)
    mortal_redis.freeze()
    try:
        began = time.monotonic()
        assert await body_of(store) is None
        assert 0.04 < time.monotonic() - began < 10.0, "FIND_S, and not the client's own deadline"
        assert store.failures == 1
    finally:
        mortal_redis.thaw()
        await store.aclose()


# -- calls -------------------------------------------------------------------------------------------
async def test_activators_share_the_answers_of_functions_that_say_so(
    redis_url: str, short_tmp: Path
) -> None:
    found = []
    runs = Counting()
    for name in ("a", "b"):
        (short_tmp / name).mkdir()
        store = store_at(redis_url)
        edge = Edge(short_tmp / name, ActivatorSettings(), runs, shared=store)
        async with served(edge):
            edge.add(route_of(spec_of(cache=SHARED)))
            edge.add(route_of(spec_of("own", cache=replace(SHARED, shared=False))))
            found.append(told(await edge.call(json={"x": 1})))
            found.append(told(await edge.call(json={"x": 1})))
            found.append(told(await edge.call("shop/own:invoke", json={"x": 1})))
            await until(lambda store=store: " 0 on their way" in repr(store))
        await store.aclose()
    assert found == [
        (200, "1", "miss"),
        (200, "1", "hit"),
        (200, "2", "miss"),
        (200, "1", "hit"),
        (200, "1", "hit"),
        (200, "3", "miss"),
    ]


async def test_calls_run_while_redis_is_dead(mortal_redis: MortalRedis, short_tmp: Path) -> None:
    store, runs = store_at(mortal_redis.url), Counting()
    mortal_redis.kill()
    async with served(Edge(short_tmp, ActivatorSettings(), runs, shared=store)) as edge:
        edge.add(route_of(spec_of(cache=SHARED)))
        assert told(await edge.call(json={"x": 1})) == (200, "1", "miss")
        assert told(await edge.call(json={"x": 1})) == (200, "1", "hit"), "this process has it"
        assert told(await edge.call(json={"x": 2})) == (200, "2", "miss")
    await store.aclose()


def test_what_is_written_is_no_pickle() -> None:
    frame = encode_frame(KEY, 1.0, ANSWER)
    assert frame is not None
    assert base64.b64encode(frame)[:8] == base64.b64encode(KEY)[:8]


async def test_of_equal_calls_one_asks_redis(
    redis_url: str, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, runs, asked = store_at(redis_url), Counting(), 0
    runs.gate.clear()
    find = store.find

    async def counted(key: bytes, *, max_age_s: float) -> StoredResponse | None:
        nonlocal asked
        asked += 1
        return await find(key, max_age_s=max_age_s)

    monkeypatch.setattr(store, "find", counted)
    async with served(Edge(short_tmp, ActivatorSettings(), runs, shared=store)) as edge:
        edge.add(route_of(spec_of(cache=SHARED)))
        tasks = [asyncio.create_task(edge.call(json={"x": 1})) for _ in range(5)]
        await until(lambda: edge.flights.waiting == 4 and runs.calls == 1)
        assert asked == 1
        runs.gate.set()
        assert sorted([told(await task)[2] or "" for task in tasks]) == ["hit"] * 4 + ["miss"]
    await store.aclose()
