"""The store of idempotency keys: of concurrent claims of a name one runs, and the others get its
response.

A claim ends when its response is stored (`store`), when it is released (`release`), or LEASE_S
after its owner last renewed it (`renew`), so that a process that died does not block a key.

The responses of one tenant are limited in bytes: beyond it its oldest are evicted, and a repeat of
those runs again. All tenants together are limited, too: beyond it the oldest of the tenant with the
most are evicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

LEASE_S = 30.0
"""Seconds until a claim lapses without renewal; its owner renews it each third of that."""
TENANT_BYTES = 64 * 1024 * 1024
"""Limit of one tenant's responses, in stored bytes."""
TOTAL_BYTES = 256 * 1024 * 1024
"""Limit of all tenants' responses in Redis: half of the memory that the chart gives it, which also
holds quotas and rewrites its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claimed name, its tenant, and the fingerprint of its request. Name and fingerprint are
    hashes."""

    name: str
    tenant: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The entry under a name.

    Attributes:
        fingerprint: of the first request.
        answer: its response; None = it still runs.
    """

    fingerprint: str
    answer: bytes | None


class IdempotencyStore(Protocol):
    """Stores claims and responses. Names are hashes; responses are opaque. Each method raises
    Unavailable while the store does not answer."""

    async def claim(self, name: str, fingerprint: str) -> Known | None:
        """Claim a name. Returns None when the caller must run the request, else the existing
        entry."""

    async def renew(self, name: str) -> None:
        """Renew the claim of a request that still runs."""

    async def store(self, claim: Claim, answer: bytes, *, ttl_s: float) -> None:
        """Store the response of a claimed request for `ttl_s`, evicting older ones where a limit is
        reached."""

    async def release(self, name: str) -> None:
        """Release the claim of a request without a response to store: the next request runs."""

    async def aclose(self) -> None:
        """Close connections."""
