"""LRU cache of successful responses, for functions that declare `cached_answer()` as a fallback.

Limited in bytes. It stores one response per function, method, caller's tenant and exact argument
bytes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from activator.calls.response import PASSED_ON
from activator.worker_client.connection import WorkerResponse

if TYPE_CHECKING:
    from activator.calls.call import Call

MAX_BYTES = 64 * 1024 * 1024
"""Limit of all responses that an activator stores."""
OVERHEAD_BYTES = 512
"""Size of an entry besides its body and headers: its key and the table's overhead."""
HEADER_OVERHEAD_BYTES = 160
"""Size of a header besides its text: two byte strings and their tuple."""

Key = tuple[str, str, str, bytes, bytes]


class CachedResponse(NamedTuple):
    """A response and its time, in monotonic seconds."""

    answer: WorkerResponse
    at: float

    @property
    def size(self) -> int:
        """Size in bytes."""
        headers = sum(
            len(name) + len(value) + HEADER_OVERHEAD_BYTES for name, value in self.answer.headers
        )
        return len(self.answer.body or b"") + headers + OVERHEAD_BYTES


class ResponseCache:
    """LRU cache of successful responses. Owner: the event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, CachedResponse] = OrderedDict()
        self.bytes = 0

    def __repr__(self) -> str:
        return (
            f"<ResponseCache {len(self._entries)} responses, {self.bytes}/{self._max_bytes} bytes>"
        )

    def store(self, call: Call, answer: WorkerResponse, now: float) -> None:
        """Store a successful response, replacing an older one."""
        entry = CachedResponse(_bare(answer), now)
        if answer.body is None or entry.size > self._max_bytes:
            return
        key = _key(call)
        before = self._entries.pop(key, None)
        if before is not None:
            self.bytes -= before.size
        self._entries[key] = entry
        self.bytes += entry.size
        while self.bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.bytes -= oldest.size

    def find(self, call: Call, *, max_age_s: float, now: float) -> WorkerResponse | None:
        """Return the last successful response to the same arguments; None when there is none, or it
        is older than `max_age_s`."""
        key = _key(call)
        entry = self._entries.get(key)
        if entry is None or now - entry.at > max_age_s:
            return None
        self._entries.move_to_end(key)
        return entry.answer


def _bare(answer: WorkerResponse) -> WorkerResponse:
    """Return the response without headers of the individual call, and without its connection."""
    return WorkerResponse(
        None,
        answer.status,
        [header for header in answer.headers if header[0] in PASSED_ON],
        answer.body,
    )


def _key(call: Call) -> Key:
    target = call.target
    asked = hashlib.blake2b(b"%d:%b" % (len(call.accept), call.accept), digest_size=16)
    asked.update(call.body)
    # callers without a key share entries only among themselves
    caller = call.caller.tenant or (target.tenant if call.caller.key_id else "")
    return (target.function_id, call.place, caller, call.content_type, asked.digest())
