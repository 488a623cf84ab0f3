"""Every store's connection to Redis: a deadline for each command, and no cancellation lost."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from activator.coordination import redis_client
from tests.fakes.redis_server import MortalRedis

TURNS = 60
"""More turns of the event loop than a command takes."""


async def _commands(client: Redis) -> None:
    while True:
        await client.ping()


async def test_a_loop_that_asks_redis_ends_whenever_it_is_cancelled(redis_url: str) -> None:
    client = redis_client.redis_client(redis_url)
    await client.ping()
    for turns in range(TURNS):
        task = asyncio.create_task(_commands(client))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=2)
        task.cancel()
        assert done, f"cancelled after {turns} turns of the event loop, it went on"
        assert task.cancelled()
    await client.aclose()


async def test_a_redis_that_stands_still_is_waited_for_until_the_deadline(
    mortal_redis: MortalRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = redis_client.redis_client(mortal_redis.url)
    await client.ping()
    mortal_redis.freeze()
    monkeypatch.setattr(redis_client, "ANSWER_S", 0.2)
    with pytest.raises(TimeoutError):
        await client.ping()
    monkeypatch.undo()
    mortal_redis.thaw()
    assert await client.ping(), "the connection that was left is not asked again"
    await client.aclose()


async def test_a_redis_that_is_gone_is_an_error_at_once(mortal_redis: MortalRedis) -> None:
    client = redis_client.redis_client(mortal_redis.url)
    mortal_redis.kill()
    with pytest.raises((RedisError, OSError)):
        await client.ping()
    with contextlib.suppress(RedisError, OSError):
        await client.aclose()
