"""Good answers that are kept for worse times, of functions that declare `cached_answer()` as a
fallback.

Bounded in bytes; the one used longest ago goes first. One answer per function, method, caller's
tenant and arguments, to the byte."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from activator.http.response_headers import PASSED_ON
from activator.worker_client.connection import WorkerResponse

if TYPE_CHECKING:
    from activator.calls.runner import Call

MAX_BYTES = 64 * 1024 * 1024
"""Of all answers that an activator keeps."""
OVERHEAD_BYTES = 512
"""What an entry costs beside its body and its headers: its key and the table's own."""
HEADER_OVERHEAD_BYTES = 160
"""What a header costs beside its text: two byte strings and their pair."""

Key = tuple[str, str, str, bytes, bytes]


class CachedResponse(NamedTuple):
    """An answer, and when it was given, in monotonic seconds."""

    answer: WorkerResponse
    at: float

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        headers = sum(
            len(name) + len(value) + HEADER_OVERHEAD_BYTES for name, value in self.answer.headers
        )
        return len(self.answer.body or b"") + headers + OVERHEAD_BYTES


class ResponseCache:
    """See the module. Owner: the event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Key, CachedResponse] = OrderedDict()
        self.bytes = 0

    def __repr__(self) -> str:
        return f"<Answers {len(self._kept)} kept, {self.bytes}/{self._max_bytes} bytes>"

    def keep(self, call: Call, answer: WorkerResponse, now: float) -> None:
        """Keep a good answer, in the place of an older one."""
        kept = CachedResponse(_bare(answer), now)
        if answer.body is None or kept.size > self._max_bytes:
            return
        key = _key(call)
        before = self._kept.pop(key, None)
        if before is not None:
            self.bytes -= before.size
        self._kept[key] = kept
        self.bytes += kept.size
        while self.bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.bytes -= oldest.size

    def find(self, call: Call, *, max_age_s: float, now: float) -> WorkerResponse | None:
        """The last good answer to the same arguments; None when there is none, or none so young."""
        key = _key(call)
        kept = self._kept.get(key)
        if kept is None or now - kept.at > max_age_s:
            return None
        self._kept.move_to_end(key)
        return kept.answer


def _bare(answer: WorkerResponse) -> WorkerResponse:
    """Without what its worker said of that very call, and without its connection."""
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
    # a caller without a key shares with its like alone
    caller = call.caller or (target.tenant if call.key_id else "")
    return (target.function_id, call.place, caller, call.content_type, asked.digest())
