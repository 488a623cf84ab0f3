"""Successful responses in memory: those of response caches, and those that functions with a
`cached_answer()` fall back to.

Limited in bytes, for each function that says so and for all. What is dropped is the longest unused
response of the function, and of its callers, that has the most bytes: a tenant that fills the store
drops its own."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from activator.calls.response import PASSED_ON
from activator.worker_client.connection import WorkerResponse

if TYPE_CHECKING:
    from activator.calls.call import Call

MAX_BYTES = 64 * 1024 * 1024
"""Default limit of all responses that an activator stores."""
OVERHEAD_BYTES = 768
"""Size of an entry besides its body and headers: its key, its owner and the tables' overhead."""
HEADER_OVERHEAD_BYTES = 160
"""Size of a header besides its text: two byte strings and their tuple."""
KEY_BYTES = 32


class StoredResponse(NamedTuple):
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


class ResponseOwner(NamedTuple):
    """Whose response it is: the function's tenant, its name (`CallTarget.name`), and the caller's
    tenant ("" = it has no key)."""

    tenant: str
    function: str
    caller: str


class _Share:
    """The bytes of all, of a tenant, of a function, or of the callers of one tenant, which alone
    has responses."""

    __slots__ = ("bytes", "name", "parent", "parts", "responses")

    def __init__(self, name: str = "", parent: _Share | None = None) -> None:
        self.name = name
        self.parent = parent
        self.bytes = 0
        self.parts: dict[str, _Share] = {}
        self.responses: OrderedDict[bytes, StoredResponse] = OrderedDict()

    def part(self, name: str) -> _Share:
        """Return the share of that name below this one, a new one where there is none."""
        found = self.parts.get(name)
        if found is None:
            found = self.parts[name] = _Share(name, self)
        return found

    def add(self, size: int) -> None:
        """Count bytes here and in all shares above; empty ones are removed."""
        share: _Share | None = self
        while share is not None:
            share.bytes += size
            if share.parent is not None and not share.bytes:
                del share.parent.parts[share.name]
            share = share.parent


class ResponseStore:
    """Stores responses. Owner: the event loop.

    Attributes:
        on_dropped: called with the owner of a response that made room for others."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._all = _Share()
        self._shares: dict[bytes, _Share] = {}
        self.on_dropped: Callable[[ResponseOwner], None] | None = None

    def __repr__(self) -> str:
        size = f"{self.size_bytes}/{self._max_bytes} bytes"
        return f"<ResponseStore {len(self._shares)} responses, {size}>"

    @property
    def size_bytes(self) -> int:
        """Size of all responses."""
        return self._all.bytes

    def sizes(self) -> dict[str, int]:
        """Return the size of the responses of each function, by its name. Thread-safe."""
        tenants = list(self._all.parts.values())
        return {
            name: function.bytes
            for tenant in tenants
            for name, function in list(tenant.parts.items())
        }

    def store(
        self,
        key: bytes,
        owner: ResponseOwner,
        response: StoredResponse,
        *,
        max_bytes: int | None = None,
    ) -> None:
        """Store a response under a key, replacing an older one. `max_bytes`: limit of all of its
        function; None = that of the store alone."""
        if response.answer.body is None:
            return
        self._remove(key)
        function = self._all.part(owner.tenant).part(owner.function)
        share = self._shares[key] = function.part(owner.caller)
        share.responses[key] = response
        share.add(response.size)
        while max_bytes is not None and function.bytes > max_bytes:
            self._drop(function)
        while self._all.bytes > self._max_bytes:
            self._drop(self._all)

    def find(self, key: bytes, *, max_age_s: float, now: float) -> StoredResponse | None:
        """Return the last response under a key; None when there is none, or it is older than
        `max_age_s`."""
        share = self._shares.get(key)
        if share is None:
            return None
        found = share.responses[key]
        if now - found.at > max_age_s:
            return None
        share.responses.move_to_end(key)
        return found

    def _drop(self, share: _Share) -> None:
        """Drop the longest unused response of the largest part of the largest part of a share."""
        while share.parts:
            share = max(share.parts.values(), key=lambda part: part.bytes)
        owner = ResponseOwner(*_path(share))
        self._remove(next(iter(share.responses)))
        if self.on_dropped is not None:
            self.on_dropped(owner)

    def _remove(self, key: bytes) -> None:
        share = self._shares.pop(key, None)
        if share is not None:
            share.add(-share.responses.pop(key).size)


def _path(share: _Share) -> list[str]:
    names = []
    while share.parent is not None:
        names.append(share.name)
        share = share.parent
    return names[::-1]


def bare(answer: WorkerResponse) -> WorkerResponse:
    """Return the response without headers of the individual call, and without its connection."""
    return WorkerResponse(
        None,
        answer.status,
        [header for header in answer.headers if header[0] in PASSED_ON],
        answer.body,
    )


def owner_of(call: Call) -> ResponseOwner:
    """Return whose response that of a call is. Callers without a key share responses only among
    themselves."""
    target = call.target
    caller = call.caller.tenant or (target.tenant if call.caller.key_id else "")
    return ResponseOwner(target.tenant, target.name, caller)


def key_of(call: Call, kind: bytes, *parts: bytes) -> bytes:
    """Return the key of a call's response among those of a `kind`: a digest of the function, the
    caller's tenant, the method, the content types, and `parts`. Calls with equal keys get equal
    answers."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for text in (
        kind,
        call.target.function_id.encode(),
        owner_of(call).caller.encode(),
        call.place.encode(),
        call.content_type,
        call.accept,
        *parts,
    ):
        digest.update(len(text).to_bytes(8, "big"))
        digest.update(text)
    return digest.digest()


def fallback_key(call: Call) -> bytes:
    """Return the key of the response that a call may fall back to: of any revision, to the same
    argument bytes."""
    return key_of(call, b"fallback", call.body)
