"""`SharedState`: atomic operations on the state that activators share. There is no "get", so no
decision is made on a stale number.

Each member holds an *allowance* per revision, and the allowances of live members never add up to
more than the revision's max_instances. A member states its holdings with every heartbeat (absolute
numbers, so that the next heartbeat repairs a lost answer); a member without a heartbeat for its
time to live lapses, and its holdings are free. The allowance is acquired before an instance is
started and released after it has ended.

A refused member is recorded: as *starving* while it holds less than its fair share (max_instances
over the members, at least one), otherwise as *wanting*. The others read it in the answer to their
next heartbeat and make room (`InstancePool.make_room`).

While the store is unreachable, a member keeps its holdings and may replace what it released, for as
long as its last heartbeat still counts with the others; after that it gets nothing. A store that
lost its data may grant too much until every member has stated its holdings again, which takes one
heartbeat."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

TTL_S = 15.0
"""A member that did not beat for this long is not one: far above a restart by the supervisor (2 s)
and a stall on a loaded machine."""
BEAT_S = 0.5
"""Between beats; also how long a starving member waits until the others know."""


class SharedStateUnreachable(Exception):
    """Raised when the shared state does not answer; the message names its address, never its
    password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDemand:
    """How many other members were recently refused a start of one revision; `wanting` includes the
    starving."""

    wanting: int
    starving: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    """The answer to a heartbeat.

    Attributes:
        members: ids of the live activators.
        wants: by revision key that this member holds: the demand of other members, where there is
            any.
    """

    members: frozenset[str]
    wants: Mapping[str, InstanceDemand] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStatistics:
    """Values for metrics: members as of the last heartbeat, allowance by revision key, refusals so
    far, and whether the store answers."""

    members: int
    allowance: Mapping[str, int]
    refused: int
    is_reachable: bool


class InstanceLeases(Protocol):
    """The part of the shared state that throttlers use."""

    async def acquire_instances(self, key: str, wanted: int, limit: int) -> int:
        """Request `wanted` more instances of revision `key`, at most `limit` for all members
        together; returns how many were granted."""

    def record_held(self, key: str, count: int = 1) -> None:
        """Count `count` instances that exist already (adopted) without a request; the next
        heartbeat reports them."""

    def release(self, key: str, count: int = 1) -> None:
        """Release the allowance of `count` instances that ended or never started; an extra
        heartbeat reports it at once."""

    def share(self, count: int) -> int:
        """Return this member's part of a number that all members provide together
        (min_instances)."""


class SharedState(InstanceLeases, Protocol):
    """All shared state, as one member sees it."""

    async def join(self) -> None:
        """Become a member; what an earlier process of the same id held stays counted. Raises
        SharedStateUnreachable."""

    async def beat(self) -> HeartbeatReply | None:
        """State the holdings and stay a member; None when the store does not answer."""

    async def leave(self) -> None:
        """End the membership; its holdings are free at once."""

    def members(self) -> frozenset[str]:
        """Return the members as of the last heartbeat."""

    async def stranger_wait_s(self, address: str, *, rate_per_s: float, burst: float) -> float:
        """Take one token from the bucket of `address`: 0.0, or the seconds until there is one.
        Raises SharedStateUnreachable."""

    def statistics(self) -> SharedStatistics:
        """Return the values for metrics."""


def fair_share(limit: int, members: int) -> int:
    """Return the number of instances that each member is entitled to."""
    return max(1, limit // max(1, members))


def share_of(count: int, member: str, members: frozenset[str]) -> int:
    """Return the part of `member` when `count` is dealt out one by one in order of member ids; the
    parts always add up to `count`."""
    everyone = sorted(members | {member})
    each, rest = divmod(count, len(everyone))
    return each + (everyone.index(member) < rest)


def platform_id(token: str) -> str:
    """The platform's name in a Redis that several share: of its key, because home paths are alike
    on most machines."""
    return hashlib.sha256(b"redis\0" + token.encode()).hexdigest()[:16]
