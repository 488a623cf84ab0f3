"""The connection to the platform's Redis, as every store has it: each command is answered within
ANSWER_S, or fails."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

ANSWER_S = 1.0
"""Longest wait for Redis: it answers in a fraction of a millisecond, or it is not there."""


class RedisClient(Redis):
    """Redis with one deadline for a command, connecting and its one retry included.

    Not the client's `socket_timeout`: that sends through asyncio.wait_for(), which before Python
    3.12 loses a cancellation that arrives as the command has gone out, and a loop that lost its
    cancellation keeps the process from ending."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """See Redis. Raises RedisError, OSError (TimeoutError is one)."""
        async with asyncio.timeout(ANSWER_S):
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


def redis_client(url: str) -> Redis:
    """Connects with the first command. Raises ValueError when the URL is none."""
    return RedisClient.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=ANSWER_S,
        decode_responses=True,
        retry=Retry(NoBackoff(), 1),
    )
