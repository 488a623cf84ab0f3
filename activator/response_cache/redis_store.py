"""Answers that activators share in Redis: one command for a call, within FIND_S.

`pilotlight:{<platform>}:cache:<key>` (`coordination.bounded_values`), which expires with the
answer. A value is a frame, sealed with a key that only the platform has; the frame begins with its
own key, so that a value that was moved to another key is not believed.

Redis may be dead, slow or full: then calls run as without it. After a failure it is not asked for
PAUSE_S, so that a dead one costs a call FIND_S once a second at most."""

from __future__ import annotations

import asyncio
import base64
import logging
import struct
import time
from collections.abc import Callable
from typing import Final

from redis.exceptions import RedisError

from activator.calls.response_store import KEY_BYTES, ResponseOwner, StoredResponse
from activator.coordination.bounded_values import BoundedValue, BoundedValues
from activator.coordination.redis_client import redis_client
from activator.coordination.redis_state import address_of
from activator.worker_client.connection import WHOLE_BODY_BYTES, WorkerResponse
from pilotlight.core.background_tasks import cancel_all
from pilotlight.core.crypto import DecryptionFailed, Sealer

log = logging.getLogger(__name__)

FIND_S: Final = 0.05
"""Longest wait of a call for Redis, in seconds."""
PAUSE_S: Final = 1.0
MAX_WRITES: Final = 64
"""Most answers on their way to Redis; further ones are not shared."""
TENANT_SHARE: Final = 0.5
"""Of all answers, those of one tenant's functions at most."""
MAX_HEADERS: Final = 8
MAX_HEADER_BYTES: Final = 4096
MAX_VALUE_BYTES: Final = 2 * WHOLE_BODY_BYTES
"""Longest value that is read: base64 in base64 is 16/9 of the largest answer."""
_HEAD: Final = struct.Struct(f">{KEY_BYTES}sdHB")
_LENGTHS: Final = struct.Struct(">HH")
FIND: Final = """
-- KEYS: name. ARGV: longest value.
local size = redis.call('HSTRLEN', KEYS[1], 'answer')
if size == 0 or size > tonumber(ARGV[1]) then return false end
return redis.call('HGET', KEYS[1], 'answer')
"""


class RedisResponses:
    """Stores answers in Redis. Owner: the event loop.

    Attributes:
        failures: how often Redis did not answer, or had no room."""

    def __init__(
        self,
        url: str,
        *,
        platform: str,
        sealer: Sealer,
        total_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Connects with the first call. `clock`, `wall`: in seconds. Raises ValueError for an
        invalid URL."""
        self._where = address_of(url)
        self._prefix = f"pilotlight:{{{platform}}}:cache"
        self._sealer = sealer
        self._clock = clock
        self._wall = wall
        self._redis = redis_client(url)
        self._values = BoundedValues(self._redis, prefix=self._prefix, total_bytes=total_bytes)
        self._tenant_bytes = int(total_bytes * TENANT_SHARE)
        self._writes: set[asyncio.Task[None]] = set()
        self._paused_until = 0.0
        self.failures = 0

    def __repr__(self) -> str:
        return (
            f"<RedisResponses {self._where}: {self._values!r}, {len(self._writes)} on their way, "
            f"{self.failures} failures>"
        )

    async def find(self, key: bytes, *, max_age_s: float) -> StoredResponse | None:
        """Return the answer under a key; None when there is none, or Redis does not say."""
        if self._clock() < self._paused_until:
            return None
        try:
            async with asyncio.timeout(FIND_S):
                found = await self._redis.eval(
                    FIND, 1, f"{self._prefix}:{key.hex()}", str(MAX_VALUE_BYTES)
                )
        except (RedisError, OSError) as e:
            self._on_failure(e)
            return None
        opened = self._unseal(key, found) if found else None
        if opened is None:
            return None
        stored_at, answer = opened
        age_s = max(0.0, self._wall() - stored_at)  # clocks of two machines differ
        return StoredResponse(answer, self._clock() - age_s) if age_s <= max_age_s else None

    def store(
        self,
        key: bytes,
        owner: ResponseOwner,
        answer: WorkerResponse,
        *,
        ttl_s: float,
    ) -> None:
        """Store an answer, later: its call does not wait."""
        if self._clock() < self._paused_until or len(self._writes) >= MAX_WRITES:
            return
        frame = encode_frame(key, self._wall(), answer)
        if frame is None:
            return
        task = asyncio.create_task(
            self._write(key, owner, frame, ttl_s=ttl_s),
            name="answer to Redis",
        )
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _write(self, key: bytes, owner: ResponseOwner, frame: bytes, *, ttl_s: float) -> None:
        value = BoundedValue(
            name=key.hex(),
            # not by function or caller: a tenant may have any number of small ones
            owner=owner.tenant,
            value=self._sealer.seal(base64.b64encode(frame).decode()),
            ttl_ms=int(ttl_s * 1000),
        )
        try:
            await self._values.store(value, owner_bytes=self._tenant_bytes)
        except (RedisError, OSError) as e:
            self._on_failure(e)

    def _on_failure(self, error: Exception) -> None:
        self.failures += 1
        if self._clock() >= self._paused_until:
            log.warning(
                "response_cache_without_redis redis=%s pause_s=%g error=%r",
                self._where,
                PAUSE_S,
                error,
            )
        self._paused_until = self._clock() + PAUSE_S

    def _unseal(self, key: bytes, sealed: str) -> tuple[float, WorkerResponse] | None:
        try:
            return decode_frame(key, base64.b64decode(self._sealer.open(sealed), validate=True))
        except (DecryptionFailed, ValueError) as e:
            log.warning("response_cache_value_refused redis=%s error=%s", self._where, e)
            return None

    async def aclose(self) -> None:
        """Cancel what is on its way, and close the connections."""
        await cancel_all(self._writes)
        await self._redis.aclose()


def encode_frame(key: bytes, stored_at: float, answer: WorkerResponse) -> bytes | None:
    """Return a frame: key, time, status, headers and body, each with its length; None for an answer
    with more or longer headers than are read."""
    sizes = [len(name) + len(value) for name, value in answer.headers]
    if len(sizes) > MAX_HEADERS or sum(sizes) > MAX_HEADER_BYTES:
        return None
    parts = [_HEAD.pack(key, stored_at, answer.status, len(sizes))]
    for name, value in answer.headers:
        parts += (_LENGTHS.pack(len(name), len(value)), name, value)
    return b"".join((*parts, answer.body or b""))


def decode_frame(key: bytes, frame: bytes) -> tuple[float, WorkerResponse]:
    """Return time and answer of a frame. Raises ValueError where it is not one, or has another
    key."""
    try:
        known, stored_at, status, count = _HEAD.unpack_from(frame)
        at, headers = _HEAD.size, []
        for _ in range(count):
            name_bytes, value_bytes = _LENGTHS.unpack_from(frame, at)
            at += _LENGTHS.size
            end = at + name_bytes + value_bytes
            headers.append((frame[at : at + name_bytes], frame[at + name_bytes : end]))
            at = end
    except struct.error as e:
        raise ValueError(f"the frame is cut: {e}") from e
    if known != key:
        raise ValueError("the frame has another key")
    if at > len(frame) or count > MAX_HEADERS or not 200 <= status < 300:
        raise ValueError("the frame has other lengths, or another status, than are written")
    return stored_at, WorkerResponse(None, status, headers, frame[at:])
