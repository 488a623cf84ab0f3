"""The Redis client that every store uses: each command is answered within ANSWER_S, or fails.

While Redis is unreachable, warm calls continue, and each store follows its own rule:

* instances (`coordination.state`): a member keeps those that it has and may replace them, for as
  long as its last heartbeat counts;
* quotas (`quotas.redis_store`): each activator counts alone, or calls are refused with 503, as
  `activator.without_redis` says;
* budgets (`billing.budgets.leases`): calls spend what was borrowed before, then 503, or each
  activator counts alone, as `activator.without_redis` says;
* idempotency keys (`idempotency.redis_store`): requests that name one are refused with 503;
* shared answers (`response_cache.redis_store`): calls run, and Redis is not asked for a second;
* pods (`knative.leases`): none is claimed, and claimed ones stay in use;
* reports of loads (`knative.autoscaler.leader`): they count as missing, which stops no pod."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

ANSWER_S = 1.0
"""Longest wait for Redis, in seconds: a reachable Redis answers in a fraction of a millisecond."""


class RedisClient(Redis):
    """Redis with one deadline for a command, including connecting and its one retry.

    It does not use the client's `socket_timeout`, which sends through asyncio.wait_for(): before
    Python 3.12 that loses a cancellation that arrives just after the command was sent, and a loop
    that lost its cancellation keeps the process from ending."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Run one command within ANSWER_S. Raises RedisError, OSError (TimeoutError is one)."""
        async with asyncio.timeout(ANSWER_S):
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


def redis_client(url: str) -> Redis:
    """Return a client that connects with its first command. Raises ValueError for an invalid
    URL."""
    return RedisClient.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=ANSWER_S,
        decode_responses=True,
        retry=Retry(NoBackoff(), 1),
    )
