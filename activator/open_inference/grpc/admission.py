"""Bounds on what callers hold in the process for gRPC: calls, messages that are read, and bytes.

A caller is its credentials once the activator has accepted them, and its network before. All that
have no such credentials get half of each bound together, so that strangers keep no others out."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

from activator.http.trusted_proxies import network_of
from activator.open_inference.grpc.statuses import Refused, refused

MAX_CALLS: Final = 1024
MAX_CALLS_OF_CALLER: Final = 512
MAX_READING: Final = 64
MAX_READING_OF_CALLER: Final = 16
"""Messages that are read at the same time: each may take the largest size of a message."""
MAX_KNOWN: Final = 4096
"""Credentials that are remembered, by their hash; the least recently used are forgotten first."""
_ALL: Final = "all"
_STRANGERS: Final = "strangers"


@dataclass(frozen=True, slots=True)
class Party:
    """Who a call counts as. `name`: a hash of its credentials, or its network."""

    name: str
    is_known: bool


class Room:
    """What one call holds. Owner: the call."""

    def __init__(self, admission: Admission, party: Party) -> None:
        self.party = party
        self._admission = admission
        self._held = 0

    def __repr__(self) -> str:
        return f"<Room {self._held} bytes>"

    def reserve(self, size: int) -> None:
        """Reserve bytes until the call ends. Raises Refused."""
        self._admission.reserve(self.party, size)
        self._held += size

    def release(self) -> None:
        """Release all of them."""
        self._admission.free(self.party, self._held)
        self._held = 0


class Admission:
    """Admits calls. Owner: the event loop; what changes does so between awaits."""

    def __init__(self, *, max_bytes: int) -> None:
        """`max_bytes`: of messages and answers of calls that run; one caller gets half."""
        self._max_bytes = max_bytes
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._reading = asyncio.Semaphore(MAX_READING)
        self._strangers_reading = asyncio.Semaphore(MAX_READING // 2)
        self._reading_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<Admission {self._calls[_ALL]} calls, {self._bytes[_ALL]} bytes>"

    def party_of(self, address: str, authorization: str) -> Party:
        """Return who a caller at this address counts as."""
        name = _digest(authorization)
        if name in self._known:
            self._known.move_to_end(name)
            return Party(name, is_known=True)
        return Party(network_of(address), is_known=False)

    def remember(self, authorization: str) -> None:
        """Remember credentials that the activator has accepted."""
        if not authorization:
            return
        self._known[_digest(authorization)] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    @contextmanager
    def call(self, party: Party) -> Iterator[Room]:
        """Count a call while it runs. Raises Refused."""
        bounds = _bounds(party, MAX_CALLS_OF_CALLER, MAX_CALLS)
        if any(self._calls[name] >= most for name, most in bounds):
            raise Refused(
                refused(
                    f"too many calls run: at most {MAX_CALLS_OF_CALLER} of a caller, {MAX_CALLS} "
                    f"in all, half of these without a known API key"
                )
            )
        for name, _ in bounds:
            self._calls[name] += 1
        room = Room(self, party)
        try:
            yield room
        finally:
            room.release()
            _reduce(self._calls, party, 1)

    @asynccontextmanager
    async def reading(self, party: Party, wait_s: float) -> AsyncIterator[None]:
        """Count a message while it is read. Raises Refused after `wait_s`."""
        own = self._reading_of.setdefault(party.name, asyncio.Semaphore(MAX_READING_OF_CALLER))
        needed = [own, *([] if party.is_known else [self._strangers_reading]), self._reading]
        held: list[asyncio.Semaphore] = []
        try:
            try:
                async with asyncio.timeout(wait_s):
                    for each in needed:
                        await each.acquire()
                        held.append(each)
            except TimeoutError as e:
                raise Refused(refused("too many messages are being read")) from e
            yield
        finally:
            for each in held:
                each.release()

    def reserve(self, party: Party, size: int) -> None:
        """Count bytes of a call. One that is alone may have more than the bound. Raises Refused."""
        for name, most in _bounds(party, self._max_bytes // 2, self._max_bytes):
            if self._bytes[name] and self._bytes[name] + size > most:
                raise Refused(
                    refused("messages and answers of calls that run use activator.waiting_bytes")
                )
        for name, _ in _bounds(party, 0, 0):
            self._bytes[name] += size

    def free(self, party: Party, size: int) -> None:
        """Stop counting bytes of a call."""
        _reduce(self._bytes, party, size)


def _bounds(party: Party, of_caller: int, of_all: int) -> list[tuple[str, int]]:
    own = [(f"caller {party.name}", of_caller), (_ALL, of_all)]
    return own if party.is_known else [*own, (_STRANGERS, of_all // 2)]


def _reduce(counts: Counter[str], party: Party, by: int) -> None:
    for name, _ in _bounds(party, 0, 0):
        counts[name] -= by
        if not counts[name]:
            del counts[name]


def _digest(authorization: str) -> str:
    return hashlib.sha256(authorization.encode()).hexdigest()
