"""What a store of idempotency keys promises: of all who claim a name at once, one runs, and the
others are told what came of it.

A claim ends with its answer (`keep`), by being given up (`forget`), or LEASE_S after its owner said
last that it still runs (`hold`): a process that died does not close a key for good.

Answers of one tenant have a bound in bytes: beyond it its own oldest go, and a repeat of theirs is
a new request. All together have one, too: beyond it the oldest of the tenant that has most go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

LEASE_S = 30.0
"""Of a claim whose owner is silent; one that lives says so each third of it."""
TENANT_BYTES = 64 * 1024 * 1024
"""Of one tenant's answers, as they are stored."""
TOTAL_BYTES = 256 * 1024 * 1024
"""Of all tenants' in Redis: half of what the chart gives it, which rewrites its log and holds
quotas, too."""
OVERHEAD_BYTES = 768
"""Of an entry beside its answer, as measured in Redis 7: names, fingerprint, what counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A name that is ours, whose it is, and the request that it stands for. Name and fingerprint
    are hashes."""

    name: str
    tenant: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What there is under a name.

    Attributes:
        fingerprint: of the request that came first.
        answer: what it was answered; None: it still runs.
    """

    fingerprint: str
    answer: bytes | None


class IdempotencyStore(Protocol):
    """Names are hashes; answers are opaque. Each method raises Unavailable while the store cannot
    be asked."""

    async def claim(self, name: str, fingerprint: str) -> Known | None:
        """Claim a name; None: it is the caller's to run now, otherwise what is known of it."""
        ...

    async def hold(self, name: str) -> None:
        """The request of this name still runs."""
        ...

    async def keep(self, claim: Claim, answer: bytes, *, ttl_s: float) -> None:
        """What a request that was claimed was answered, for so long; older answers make room for
        it."""
        ...

    async def forget(self, name: str) -> None:
        """A request that was claimed came to nothing that is kept: who comes next runs it."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...
