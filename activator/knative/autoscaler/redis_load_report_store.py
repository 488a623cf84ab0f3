"""`LoadReportStore` in Redis: one hash of statements, one channel. Ages are by Redis' own clock.

Keys, under `pilotlight:{<platform>}:` like those of `activator.coordination.scripts`: `stated`
(hash: member → `<ms> <statement>`), channel `poked`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from typing import Any

from redis.exceptions import RedisError

from activator.coordination.redis_client import ANSWER_S, redis_client
from activator.coordination.redis_state import address_of
from activator.knative.autoscaler.load_report import Statement, StoredReport, from_text, to_text
from activator.knative.autoscaler.load_report_store import BoardUnreachable

log = logging.getLogger(__name__)

FORGET_MS = 3_600_000
"""Statements of a removed platform are deleted after an hour."""
LISTEN_S = 0.5
"""Timeout of one poll for requests."""
AGAIN_S = 0.5

_POST = f"""
local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], now .. ' ' .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], {FORGET_MS})
for i = 4, #ARGV do redis.call('PUBLISH', ARGV[3], ARGV[i]) end
"""
_READ = """
local t = redis.call('TIME')
return {t[1] * 1000 + math.floor(t[2] / 1000), redis.call('HGETALL', KEYS[1])}
"""


class RedisBoard:
    """The store in Redis. Owner: the event loop."""

    def __init__(self, url: str, *, platform: str, member: str) -> None:
        """Connects with the first operation. Raises ValueError when the URL is invalid."""
        self._member = member
        self._where = address_of(url)
        prefix = f"pilotlight:{{{platform}}}:"
        self._stated, self._poked = f"{prefix}stated", f"{prefix}poked"
        self._redis = redis_client(url)
        self._post, self._read = (
            self._redis.register_script(_POST),
            self._redis.register_script(_READ),
        )

    def __repr__(self) -> str:
        return f"<RedisBoard of {self._member} at {self._where}>"

    async def post(self, statement: Statement, pokes: Collection[str] = ()) -> None:
        """Replace this member's statement. Raises BoardUnreachable."""
        try:
            await self._post(
                keys=[self._stated], args=[self._member, to_text(statement), self._poked, *pokes]
            )
        except (RedisError, OSError) as e:
            raise self._unreachable(e) from e

    async def read(self) -> Mapping[str, StoredReport]:
        """Read the statements of all members. Raises BoardUnreachable."""
        try:
            now_ms, flat = await self._read(keys=[self._stated])
        except (RedisError, OSError) as e:
            raise self._unreachable(e) from e
        found: dict[str, StoredReport] = {}
        for member, text in zip(flat[0::2], flat[1::2], strict=True):
            posted = _parsed(text, int(now_ms))
            if posted is not None:
                found[member] = posted
        return found

    async def pokes(self) -> AsyncGenerator[str, None]:
        """Yield keys of revisions that need a decision. Waits for Redis while it is unreachable;
        the statements contain what was requested meanwhile."""
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    async with asyncio.timeout(ANSWER_S):
                        await channel.subscribe(self._poked)
                    async with aclosing(_messages(channel)) as messages:
                        async for message in messages:
                            yield message
            except (RedisError, OSError) as e:
                log.info(
                    "cannot receive decision requests address=%s error=%s",
                    self._where,
                    type(e).__name__,
                )
                await asyncio.sleep(AGAIN_S)

    async def delete(self) -> None:
        """Delete the own statement; if Redis does not answer, it expires soon."""
        try:
            await self._redis.hdel(self._stated, self._member)
        except (RedisError, OSError) as e:
            log.info("statement not deleted address=%s error=%s", self._where, type(e).__name__)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    def _unreachable(self, error: Exception) -> BoardUnreachable:
        return BoardUnreachable(f"Redis at {self._where} does not answer ({type(error).__name__})")


async def _messages(channel: Any) -> AsyncGenerator[str, None]:
    while True:
        message = await channel.get_message(ignore_subscribe_messages=True, timeout=LISTEN_S)
        if message is not None:
            yield str(message["data"])


def _parsed(text: str, now_ms: int) -> StoredReport | None:
    """Parse a stored statement. None for another version's: its member counts as silent."""
    at_ms, _, said = text.partition(" ")
    try:
        return StoredReport(statement=from_text(said), age_s=max(0.0, (now_ms - int(at_ms)) / 1000))
    except ValueError as e:
        log.warning("invalid statement error=%s", e)
        return None
