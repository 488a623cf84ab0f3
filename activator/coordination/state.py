"""`SharedState`: atomic verbs over what activators share. There is no "get", so nobody can decide
on a number that is old.

The model: each member holds an *allowance* per revision, and the allowances of living members never
add up to more than the revision's max_instances. A member states its holdings with every beat
(absolute numbers, so that a lost answer heals with the next one); a member that has not beaten for
its time to live is not a member any more, and what it held is free. The allowance is taken before
an instance is started and given back after it is gone.

A member that is refused is noted: as *starving* while it holds less than its fair share
(max_instances over the members, at least one), as merely *wanting* otherwise. The others read it in
the answer to their next beat and make room (`Throttler.make_room`).

When the store cannot be reached, a member keeps what it holds and may replace what it gave back,
for as long as its last beat is young enough to count with the others; beyond that it gets nothing.
A store that lost its memory may grant too much until every member has stated its holdings again,
which takes one beat."""

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
    """How many other members were refused a start of one revision within the last moments; the
    starving are among the wanting."""

    wanting: int
    starving: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    """The answer to a beat.

    Attributes:
        members: ids of the activators that live. wants: by revision key that this member holds, who
        wants some of it; only where somebody does.
    """

    members: frozenset[str]
    wants: Mapping[str, InstanceDemand] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStatistics:
    """For metrics: members as of the last beat, allowance by revision key, refusals so far, and
    whether the store answers."""

    members: int
    allowance: Mapping[str, int]
    refused: int
    is_reachable: bool


class InstanceLeases(Protocol):
    """The part that throttlers know."""

    async def take_instances(self, key: str, wanted: int, limit: int) -> int:
        """Ask for `wanted` more instances of revision `key`, `limit` for all members together;
        returns how many were granted."""
        ...

    def hold(self, key: str, count: int = 1) -> None:
        """State that `count` instances are there already (adopted); nobody is asked, the next beat
        tells."""
        ...

    def give_back(self, key: str, count: int = 1) -> None:
        """`count` instances are gone, or never came; told at once by a beat out of turn."""
        ...

    def share(self, count: int) -> int:
        """This member's part of a number that all members provide together (min_instances)."""
        ...


class SharedState(InstanceLeases, Protocol):
    """Everything that is shared, as one member sees it."""

    async def join(self) -> None:
        """Be a member; what an earlier life of the same id held stays counted. Raises
        SharedStateUnreachable."""
        ...

    async def beat(self) -> HeartbeatReply | None:
        """State the holdings and stay a member; None when the store does not answer."""
        ...

    async def leave(self) -> None:
        """Stop being a member; what is held is free at once."""
        ...

    def members(self) -> frozenset[str]:
        """Members as of the last beat."""
        ...

    async def stranger_wait_s(self, address: str, *, rate_per_s: float, burst: float) -> float:
        """Take one token from the bucket of `address`: 0.0, or the seconds until there is one.
        Raises SharedStateUnreachable."""
        ...

    def statistics(self) -> SharedStatistics:
        """For metrics."""
        ...


def fair_share(limit: int, members: int) -> int:
    """Instances that a member may insist on."""
    return max(1, limit // max(1, members))


def share_of(count: int, member: str, members: frozenset[str]) -> int:
    """`count` dealt out one by one to the members in order of their ids: the parts add up, whoever
    is there."""
    everyone = sorted(members | {member})
    each, rest = divmod(count, len(everyone))
    return each + (everyone.index(member) < rest)


def platform_id(token: str) -> str:
    """The platform's name in a Redis that several share: of its key, because home paths are alike
    on most machines."""
    return hashlib.sha256(b"redis\0" + token.encode()).hexdigest()[:16]
