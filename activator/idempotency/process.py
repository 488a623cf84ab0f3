"""Idempotency keys in this process: for an activator that is alone. They end with it."""

from __future__ import annotations

import time
from collections.abc import Callable

from activator.idempotency.store import LEASE_S, Known

MAX_BYTES = 64 * 1024 * 1024
"""Of answers that are kept; beyond it the oldest go, and a repeat of theirs is a new request. Of requests that run none goes."""
_OVERHEAD_BYTES = 256
"""Of an entry beside its answer: empty ones must not be free."""


class _Entry:
    __slots__ = ("answer", "ends_at", "fingerprint")

    def __init__(self, fingerprint: str, ends_at: float) -> None:
        self.fingerprint = fingerprint
        self.answer: bytes | None = None
        self.ends_at = ends_at

    @property
    def size_bytes(self) -> int:
        return _OVERHEAD_BYTES + len(self.answer or b"")


class ProcessIdempotency:
    """See `IdempotencyStore`. Owner: the event loop; no method waits, so none is interrupted."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._entries: dict[str, _Entry] = {}
        """The oldest first: an entry moves to the end when its answer is kept."""
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._clock = clock

    def __repr__(self) -> str:
        return f"<ProcessIdempotency {len(self._entries)} keys, {self._size_bytes} bytes>"

    async def claim(self, name: str, fingerprint: str) -> Known | None:
        entry = self._entries.get(name)
        if entry is not None and entry.ends_at > self._clock():
            return Known(fingerprint=entry.fingerprint, answer=entry.answer)
        self._drop(name)
        self._put(name, _Entry(fingerprint, self._clock() + LEASE_S))
        return None

    async def hold(self, name: str) -> None:
        entry = self._entries.get(name)
        if entry is not None and entry.answer is None:
            entry.ends_at = self._clock() + LEASE_S

    async def keep(self, name: str, fingerprint: str, answer: bytes, *, ttl_s: float) -> None:
        self._drop(name)
        entry = _Entry(fingerprint, self._clock() + ttl_s)
        entry.answer = answer
        self._put(name, entry)

    async def forget(self, name: str) -> None:
        entry = self._entries.get(name)
        if entry is not None and entry.answer is None:
            self._drop(name)

    async def aclose(self) -> None:
        """There is nothing to close."""

    def _put(self, name: str, entry: _Entry) -> None:
        self._entries[name] = entry
        self._size_bytes += entry.size_bytes
        while self._size_bytes > self._max_bytes:
            oldest = next((name for name, entry in self._entries.items() if entry.answer is not None), None)
            if oldest is None:
                return
            self._drop(oldest)

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._size_bytes -= entry.size_bytes
