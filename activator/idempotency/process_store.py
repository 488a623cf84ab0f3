"""Idempotency keys in the memory of this process, for a single activator. They are lost when it
ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from activator.coordination.bounded_values import OVERHEAD_BYTES
from activator.idempotency.store_protocol import LEASE_S, TENANT_BYTES, Claim, Known

MAX_BYTES = 64 * 1024 * 1024
"""Limit of stored responses; beyond it the oldest of the tenant with the most are evicted. Running
requests are never evicted."""


class _Entry:
    __slots__ = ("answer", "ends_at", "fingerprint", "tenant")

    def __init__(
        self, fingerprint: str, ends_at: float, *, tenant: str = "", answer: bytes | None = None
    ) -> None:
        self.fingerprint = fingerprint
        self.tenant = tenant
        self.answer = answer
        self.ends_at = ends_at

    @property
    def size_bytes(self) -> int:
        return OVERHEAD_BYTES + len(self.answer or b"")


class ProcessIdempotency:
    """`IdempotencyStore` in memory. Owner: the event loop; no method awaits, so each is atomic."""

    def __init__(
        self,
        *,
        max_bytes: int = MAX_BYTES,
        tenant_bytes: int = TENANT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entries: dict[str, _Entry] = {}
        self._answers: dict[str, dict[str, None]] = {}
        """By tenant: names whose responses are stored, the oldest first."""
        self._bytes_of: Counter[str] = Counter()
        self._max_bytes = max_bytes
        self._tenant_bytes = tenant_bytes
        self._size_bytes = 0
        self._clock = clock

    def __repr__(self) -> str:
        return (
            f"<ProcessIdempotency at most {self._tenant_bytes} bytes each: {len(self._entries)} "
            f"keys, {self._size_bytes} bytes>"
        )

    async def claim(self, name: str, fingerprint: str) -> Known | None:
        entry = self._entries.get(name)
        if entry is not None and entry.ends_at > self._clock():
            return Known(fingerprint=entry.fingerprint, answer=entry.answer)
        self._put(name, _Entry(fingerprint, self._clock() + LEASE_S))
        return None

    async def renew(self, name: str) -> None:
        entry = self._entries.get(name)
        if entry is not None and entry.answer is None:
            entry.ends_at = self._clock() + LEASE_S

    async def store(self, claim: Claim, answer: bytes, *, ttl_s: float) -> None:
        self._put(
            claim.name,
            _Entry(claim.fingerprint, self._clock() + ttl_s, tenant=claim.tenant, answer=answer),
        )

    async def release(self, name: str) -> None:
        entry = self._entries.get(name)
        if entry is not None and entry.answer is None:
            self._drop(name)

    async def aclose(self) -> None:
        """There is nothing to close."""

    def _put(self, name: str, entry: _Entry) -> None:
        self._drop(name)
        self._entries[name] = entry
        self._size_bytes += entry.size_bytes
        if entry.answer is not None:
            self._answers.setdefault(entry.tenant, {})[name] = None
            self._bytes_of[entry.tenant] += entry.size_bytes
            while self._bytes_of[entry.tenant] > self._tenant_bytes:
                self._drop(next(iter(self._answers[entry.tenant])))
        while self._size_bytes > self._max_bytes and self._answers:
            self._drop(max(map(self._oldest, self._answers), key=self._dispensable))

    def _oldest(self, tenant: str) -> str:
        return next(iter(self._answers[tenant]))

    def _dispensable(self, name: str) -> tuple[bool, int]:
        """Sort key for eviction: expired entries first, then those of the tenant with the most
        bytes."""
        entry = self._entries[name]
        return entry.ends_at <= self._clock(), self._bytes_of[entry.tenant]

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        self._size_bytes -= entry.size_bytes
        if entry.answer is not None:
            self._bytes_of[entry.tenant] -= entry.size_bytes
            del self._answers[entry.tenant][name]
            if not self._answers[entry.tenant]:
                del self._answers[entry.tenant], self._bytes_of[entry.tenant]
