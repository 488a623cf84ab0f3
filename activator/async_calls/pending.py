"""The submitted calls that this activator is responsible for, and which of their states the
controller has not heard of yet."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from activator.async_calls.records import is_visible_to, namespaced_call_id
from activator.async_calls.result_stream import FINAL, StreamBuffer
from activator.routing.api_keys import Principal
from activator.routing.call_target import CallTarget
from pilotlight.protocol import CallRecord

LEAST_BYTES = 4096
"""What a call counts at least, of the bytes that calls may take: its record here and in the journal
is there whatever its body."""


class PendingCall:
    """One of them.

    Attributes:
        task: what runs it; None = it waits to be begun, or has ended.
        changed: set at the next change of `record`, and when more of its result is there.
        give_up_at: wall clock after which it is not tried again.
        target: what it calls, once it was begun.
        log: what its attempt that runs, or ran last, has streamed; None = nothing, or it has ended.
        size: bytes of its body, or of its result once it has ended.
    """

    __slots__ = ("changed", "give_up_at", "log", "record", "size", "target", "task")

    def __init__(self, record: CallRecord, size: int = 0) -> None:
        self.record = record
        self.size = size
        self.task: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()
        self.give_up_at = record.expires_at
        self.target: CallTarget | None = None
        self.log: StreamBuffer | None = None

    def wake(self) -> None:
        """Whoever waits for `changed` looks again."""
        self.changed.set()
        self.changed = asyncio.Event()

    def begin_log(self, attempt: int, content_type: str) -> StreamBuffer:
        """An attempt's answer streams."""
        self.log = StreamBuffer(attempt, content_type)
        self.wake()
        return self.log

    def __repr__(self) -> str:
        return f"<Held {self.record.id} {self.record.state}>"


class PendingCalls:
    """By id. Owner: the event loop; each call's task changes its own entry, so no lock is needed.

    Attributes:
        unsent: newest states that were not shipped, by id. news: set while there are any. bytes_of:
        by tenant, what its calls take, bodies that are still read included; a call LEAST_BYTES at
        least. calls_of: by tenant, how many they are.
    """

    def __init__(self) -> None:
        self.bytes_of: Counter[str] = Counter()
        self.calls_of: Counter[str] = Counter()
        self._held: dict[str, PendingCall] = {}
        self.unsent: dict[str, CallRecord] = {}
        self.news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<PendingCalls {len(self._held)} held, {len(self.unsent)} unsent>"

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, call_id: object) -> bool:
        return call_id in self._held

    def get(self, call_id: str) -> PendingCall | None:
        """A call by its id."""
        return self._held.get(call_id)

    def add(self, record: CallRecord, size: int = 0) -> PendingCall:
        """Be responsible for a call; nothing is told of it yet."""
        held = self._held[record.id] = PendingCall(record, size)
        _count(self.bytes_of, record.tenant, _cost(size))
        _count(self.calls_of, record.tenant, 1)
        return held

    def drop(self, call_id: str) -> None:
        """Be responsible no more."""
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

    def note(self, held: PendingCall, record: CallRecord) -> None:
        """A call changed: whoever waits for it is woken, and the controller will be told."""
        held.record = record
        if record.state in FINAL:
            held.log = None  # its result has all of it
            _count(self.bytes_of, record.tenant, _cost(len(record.result)) - _cost(held.size))
            held.size = len(record.result)
        held.wake()
        self.unsent[record.id] = record
        self.news.set()

    def of(self, caller: Principal, call_id: str) -> PendingCall | None:
        """A call that is the caller's, by the platform's id or by its own. Raises Forbidden for a
        key of another function."""
        for candidate in (call_id, namespaced_call_id(caller.tenant, call_id)):
            held = self._held.get(candidate)
            if held is not None and is_visible_to(caller, held.record):
                return held
        return None

    def tasks(self) -> list[asyncio.Task[None]]:
        """What runs now."""
        return [
            held.task
            for held in self._held.values()
            if held.task is not None and not held.task.done()
        ]


def _cost(size: int) -> int:
    return max(size, LEAST_BYTES)


def _count(counter: Counter[str], tenant: str, by: int) -> None:
    counter[tenant] += by
    if not counter[tenant]:
        del counter[tenant]
