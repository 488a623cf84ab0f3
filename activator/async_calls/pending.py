"""The submitted calls that this activator is responsible for, and their states that were not
shipped to the controller yet."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from activator.async_calls.pending_call import PendingCall
from activator.async_calls.records import is_visible_to, namespaced_call_id
from activator.async_calls.result_stream import FINAL
from activator.routing.api_keys import Principal
from pilotlight.protocol import CallRecord

LEAST_BYTES = 4096
"""Least number of bytes that a call counts, because its record in memory and in the journal exists
whatever the size of its body."""


class PendingCalls:
    """Pending calls by id. Owner: the event loop; each call's task changes its own entry, so no
    lock is needed.

    Attributes:
        unsent: newest states that were not shipped, by id.
        news: set while `unsent` is not empty.
        bytes_of: by tenant, bytes of its calls, including bodies that are being read; at least
            LEAST_BYTES for each call.
        calls_of: by tenant, number of its calls.
    """

    def __init__(self) -> None:
        self.bytes_of: Counter[str] = Counter()
        self.calls_of: Counter[str] = Counter()
        self._held: dict[str, PendingCall] = {}
        self.unsent: dict[str, CallRecord] = {}
        self.news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<PendingCalls {len(self._held)} pending, {len(self.unsent)} unsent>"

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, call_id: object) -> bool:
        return call_id in self._held

    def __iter__(self) -> Iterator[PendingCall]:
        return iter(self._held.values())

    def get(self, call_id: str) -> PendingCall | None:
        """Return a call by its id."""
        return self._held.get(call_id)

    def add(self, record: CallRecord, size: int = 0) -> PendingCall:
        """Add a call; its state is not shipped yet."""
        held = self._held[record.id] = PendingCall(record, size)
        _count(self.bytes_of, record.tenant, _cost(size))
        _count(self.calls_of, record.tenant, 1)
        return held

    def drop(self, call_id: str) -> None:
        """Remove a call."""
        held = self._held.pop(call_id, None)
        if held is not None:
            _count(self.bytes_of, held.record.tenant, -_cost(held.size))
            _count(self.calls_of, held.record.tenant, -1)

    @contextmanager
    def reading(self, tenant: str, size: int) -> Iterator[None]:
        """Count a body of so many bytes while it is read."""
        _count(self.bytes_of, tenant, _cost(size))
        try:
            yield
        finally:
            _count(self.bytes_of, tenant, -_cost(size))

    def record_change(self, held: PendingCall, record: CallRecord) -> None:
        """Store a changed record: wakes the waiting tasks, and marks the record to be shipped to
        the controller."""
        held.record = record
        if record.state in FINAL:
            held.log = None  # its result has all of it
            _count(self.bytes_of, record.tenant, _cost(len(record.result)) - _cost(held.size))
            held.size = len(record.result)
        held.notify()
        self.unsent[record.id] = record
        self.news.set()

    def find_for(self, caller: Principal, call_id: str) -> PendingCall | None:
        """Return a call of the caller, by the platform's id or by the caller's. Raises Forbidden
        for a key of another function."""
        for candidate in (call_id, namespaced_call_id(caller.tenant, call_id)):
            held = self._held.get(candidate)
            if held is not None and is_visible_to(caller, held.record):
                return held
        return None

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the running tasks."""
        return [held.task for held in self if held.task is not None and not held.task.done()]


def _cost(size: int) -> int:
    return max(size, LEAST_BYTES)


def _count(counter: Counter[str], tenant: str, by: int) -> None:
    counter[tenant] += by
    if not counter[tenant]:
        del counter[tenant]
