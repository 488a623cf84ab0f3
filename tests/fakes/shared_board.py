"""`SharedState` in the test's own process: members over one board, time in the test's hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from activator.coordination.state import (
    HeartbeatReply,
    InstanceDemand,
    SharedStateUnreachable,
    SharedStatistics,
    fair_share,
    share_of,
)
from activator.quotas.unauthenticated_limit import TokenBucket


class Board:
    """What the members share.

    Attributes:
        is_down: every verb that would need the store fails.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.is_down = False
        self.lapses: dict[str, float] = {}
        self.held: dict[str, Counter[str]] = {}
        self.refusals: dict[str, dict[str, bool]] = {}
        self.buckets: dict[str, TokenBucket] = {}

    def living(self) -> frozenset[str]:
        """Members whose time has not run out; the others' holdings are dropped."""
        now = self.clock()
        for member in [m for m, until in self.lapses.items() if until <= now]:
            del self.lapses[member]
            self.held.pop(member, None)
        return frozenset(self.lapses)


class BoardState:
    """One member."""

    def __init__(self, board: Board, *, member: str, ttl_s: float = 15.0) -> None:
        self.member = member
        self._board = board
        self._ttl_s = ttl_s
        self._held: Counter[str] = Counter()
        self._refused = 0

    async def join(self) -> None:
        """See SharedState."""
        if self._board.is_down:
            raise SharedStateUnreachable("the board is down")
        self._board.lapses[self.member] = self._board.clock() + self._ttl_s

    async def beat(self) -> HeartbeatReply | None:
        """See SharedState."""
        if self._board.is_down:
            return None
        await self.join()
        self._board.held[self.member] = +self._held
        wants = {}
        for key in +self._held:
            others = [
                starving
                for member, starving in self._board.refusals.get(key, {}).items()
                if member != self.member
            ]
            if others:
                wants[key] = InstanceDemand(wanting=len(others), starving=sum(others))
        return HeartbeatReply(members=self._board.living(), wants=wants)

    async def leave(self) -> None:
        """See SharedState."""
        self._held.clear()
        self._board.lapses.pop(self.member, None)
        self._board.held.pop(self.member, None)

    def members(self) -> frozenset[str]:
        """See SharedState."""
        return self._board.living()

    async def acquire_instances(self, key: str, wanted: int, limit: int) -> int:
        """See SharedState."""
        stated = self._board.held.setdefault(self.member, Counter())
        if self._board.is_down:
            granted = max(0, min(wanted, stated[key] - self._held[key]))
        else:
            if self.member not in self._board.living():
                await self.beat()
            living = self._board.living()
            others = sum(
                self._board.held.get(m, Counter())[key] for m in living if m != self.member
            )
            granted = max(0, min(wanted, limit - others - self._held[key]))
            self._board.held.setdefault(self.member, Counter())[key] = self._held[key] + granted
            refusals = self._board.refusals.setdefault(key, {})
            refusals.pop(self.member, None)
            if granted < wanted:
                refusals[self.member] = self._held[key] + granted < fair_share(limit, len(living))
        self._held[key] += granted
        self._refused += granted < wanted
        return granted

    def record_held(self, key: str, count: int = 1) -> None:
        """See SharedState."""
        self._held[key] += count

    def release(self, key: str, count: int = 1) -> None:
        """See SharedState."""
        self._held[key] = max(0, self._held[key] - count)
        if not self._board.is_down:
            self._board.held[self.member] = +self._held

    def share(self, count: int) -> int:
        """See SharedState."""
        return share_of(count, self.member, self._board.living())

    async def stranger_wait_s(self, address: str, *, rate_per_s: float, burst: float) -> float:
        """See SharedState."""
        if self._board.is_down:
            raise SharedStateUnreachable("the board is down")
        now = self._board.clock()
        bucket = self._board.buckets.setdefault(
            address, TokenBucket(rate_per_s=rate_per_s, burst=burst, now=now)
        )
        return bucket.take(now)

    def statistics(self) -> SharedStatistics:
        """See SharedState."""
        return SharedStatistics(
            members=len(self.members()),
            allowance=dict(+self._held),
            refused=self._refused,
            is_reachable=not self._board.is_down,
        )

    async def aclose(self) -> None:
        """Nothing to close."""
