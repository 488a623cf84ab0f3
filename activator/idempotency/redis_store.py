"""Idempotency keys in Redis, for several activators: each is a hash of the request's fingerprint
and its sealed response.

`pilotlight:{<platform>}:once:<name>` (the braces keep them on one slot of a Redis Cluster). Sizes
of responses are counted in: `…:once-of:<tenant>`, a tenant's names and sizes by expiry time,
`…:once-bytes`, each tenant's sum, `…:once-ends`, the first expiry of each tenant, and
`…:once-total`, the sum of all (`coordination.bounded_values`). EVAL is atomic
(https://redis.io/docs/latest/develop/programmability/). While Redis does not answer, requests are
refused with 503, because it is unknown whether they ran."""

from __future__ import annotations

import base64
from typing import Any

from redis.exceptions import RedisError

from activator.coordination.bounded_values import BoundedValue, BoundedValues
from activator.coordination.redis_client import redis_client
from activator.coordination.redis_state import address_of
from activator.idempotency.store_protocol import (
    LEASE_S,
    TENANT_BYTES,
    TOTAL_BYTES,
    Claim,
    Known,
)
from pilotlight import errors
from pilotlight.core.crypto import DecryptionFailed, Sealer

CLAIM = """
-- Returns the fingerprint and the response ('' while it runs) of an existing entry; nothing when the name was claimed. KEYS: name. ARGV: fingerprint, ms.
local known = redis.call('HMGET', KEYS[1], 'fingerprint', 'answer')
if known[1] then return {known[1], known[2] or ''} end
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {}
"""
HOLD = (
    "if redis.call('HEXISTS', KEYS[1], 'answer') == 0 then redis.call('PEXPIRE', KEYS[1], "
    "ARGV[1]) end return 1"
)
FORGET = (
    "if redis.call('HEXISTS', KEYS[1], 'answer') == 0 then redis.call('DEL', KEYS[1]) end return 1"
)


class RedisIdempotency:
    """`IdempotencyStore` in Redis. Owner: the event loop."""

    def __init__(
        self,
        url: str,
        *,
        platform: str,
        sealer: Sealer,
        tenant_bytes: int = TENANT_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ) -> None:
        """Connects with the first claim. Raises ValueError for an invalid URL."""
        self._where = address_of(url)
        self._platform = f"pilotlight:{{{platform}}}:"
        self._prefix = f"{self._platform}once:"
        self._tenant_bytes = tenant_bytes
        self._total_bytes = total_bytes
        self._sealer = sealer
        self._lease_ms = int(LEASE_S * 1000)
        self._redis = redis_client(url)
        self._values = BoundedValues(
            self._redis, prefix=f"{self._platform}once", total_bytes=total_bytes
        )

    def __repr__(self) -> str:
        return (
            f"<RedisIdempotency {self._where}, at most {self._tenant_bytes} bytes each, "
            f"{self._total_bytes} bytes of all>"
        )

    async def claim(self, name: str, fingerprint: str) -> Known | None:
        found = await self._eval(CLAIM, [name], fingerprint, self._lease_ms)
        if not found:
            return None
        return Known(
            fingerprint=str(found[0]), answer=self._unseal(str(found[1])) if found[1] else None
        )

    async def renew(self, name: str) -> None:
        await self._eval(HOLD, [name], self._lease_ms)

    async def store(self, claim: Claim, answer: bytes, *, ttl_s: float) -> None:
        value = BoundedValue(
            name=claim.name,
            owner=claim.tenant,
            fingerprint=claim.fingerprint,
            value=self._sealer.seal(base64.b64encode(answer).decode()),
            ttl_ms=int(ttl_s * 1000),
        )
        try:
            await self._values.store(value, owner_bytes=self._tenant_bytes)
        except (RedisError, OSError) as e:
            raise self._unavailable() from e

    async def release(self, name: str) -> None:
        await self._eval(FORGET, [name])

    async def aclose(self) -> None:
        await self._redis.aclose()

    def _unseal(self, sealed: str) -> bytes:
        try:
            return base64.b64decode(self._sealer.open(sealed))
        except DecryptionFailed as e:
            raise errors.Conflict(
                f"the response stored under this idempotency key cannot be decrypted: {e}"
            ) from e

    async def _eval(self, script: str, keys: list[str], *args: Any) -> Any:
        """`keys`: a name, which gets the prefix, followed by complete keys."""
        try:
            return await self._redis.eval(
                script, len(keys), self._prefix + keys[0], *keys[1:], *args
            )
        except (RedisError, OSError) as e:
            raise self._unavailable() from e

    def _unavailable(self) -> errors.Unavailable:
        return errors.Unavailable(
            f"idempotency keys are stored in Redis at {self._where}, which does not answer: it "
            f"is unknown whether this request ran before",
            retry_after_s=1,
        )
