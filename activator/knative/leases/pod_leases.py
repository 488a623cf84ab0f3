"""Leases of pods: each pod belongs to one activator, so that its slots and its bill have one owner.

A claim is of one *life* of a pod (`pod_watcher.Pod.life`). It lasts until it is released, the pod's
life is over, or its owner is no longer a member (`activator.coordination`); then any member may
claim it. Each member states all its claims with every heartbeat, so that a lost answer is corrected
by the next one: claims that it does not know are released, and it learns which ones others took
while it was unreachable.

A member whose start finds no free pod is recorded, as for allowances: *starving* while it has less
than its share of the pods. The others read this in the answer to their next heartbeat, and release
a pod (`activator.balancing.rebalancing`).

While the store is unreachable nothing new is claimed, and claimed pods stay in use. A member that
cannot reach the store for longer than its membership may lose pods to others that can: such a pod
has two users meanwhile, and each bills its own calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class ClaimsUnreachable(Exception):
    """Raised when the claim store does not answer. The message names its address, never its
    password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLease:
    """The lease of one pod.

    Attributes:
        revision: key, `<function id>@<revision>`.
        instance: the id that the start requested."""

    life: str
    revision: str
    instance: str


class PodLeaseStore(Protocol):
    """The operations of one member on the claims."""

    async def claim(
        self, revision: str, instance: str, lives: Sequence[str], *, pods: int
    ) -> str | None:
        """Claim the first free one of `lives`; None when others have all of them. `pods`: number of
        pods of the revision; 0 = the pod is claimed to end it, and others need not make room.

        Repeated for the same instance it returns the same life. Raises ClaimsUnreachable; the
        result is then unknown until the next `state`, or a `release` of that instance."""

    async def release(self, life: str) -> None:
        """Release a claim; idempotent, and never another member's. Does not raise: if the store is
        unreachable, the next `state` releases it."""

    async def free(self, revision: str, lives: Sequence[str]) -> frozenset[str]:
        """Those of `lives` that no member has claimed, this one included. Raises
        ClaimsUnreachable."""

    async def state(self) -> frozenset[str]:
        """State our claims. Returns the lives that others have taken. Raises ClaimsUnreachable."""

    async def mine(self) -> list[PodLease]:
        """Restore this member's claims from the store after its restart. Raises
        ClaimsUnreachable."""

    async def aclose(self) -> None:
        """Close the connections; claims remain."""


class PodLeaseTable:
    """The owner of each life. `living`: the current members."""

    def __init__(self, living: Callable[[], Iterable[str]]) -> None:
        self._living = living
        self.owners: dict[str, tuple[str, PodLease]] = {}

    def __repr__(self) -> str:
        return f"<PodLeaseTable {len(self.owners)} claims>"

    def is_free(self, life: str, member: str) -> bool:
        """Whether `member` may claim it."""
        owner = self.owners.get(life)
        return owner is None or owner[0] == member or owner[0] not in set(self._living())


class InMemoryPodLeases:
    """`PodLeaseStore` in a table of this process. A single activator has its own; then every claim
    is granted."""

    def __init__(self, board: PodLeaseTable | None = None, *, member: str) -> None:
        self._board = board or PodLeaseTable(lambda: (member,))
        self._member = member
        self._held: dict[str, PodLease] = {}

    def __repr__(self) -> str:
        return f"<InMemoryPodLeases of {self._member}: {len(self._held)}>"

    async def claim(
        self, revision: str, instance: str, lives: Sequence[str], *, pods: int
    ) -> str | None:
        """Claim the first free one of `lives`."""
        for claim in self._held.values():
            if claim.instance == instance and claim.life in lives:
                return claim.life
        for life in lives:
            if life not in self._held and self._board.is_free(life, self._member):
                self._held[life] = PodLease(life=life, revision=revision, instance=instance)
                self._board.owners[life] = (self._member, self._held[life])
                return life
        return None

    async def release(self, life: str) -> None:
        """Release a claim."""
        self._held.pop(life, None)
        if self._board.owners.get(life, ("",))[0] == self._member:
            del self._board.owners[life]

    async def free(self, revision: str, lives: Sequence[str]) -> frozenset[str]:
        """Those of `lives` that no member has claimed."""
        return frozenset(
            life
            for life in lives
            if life not in self._held and self._board.is_free(life, self._member)
        )

    async def state(self) -> frozenset[str]:
        """State our claims. Returns the lives that others have taken."""
        lost = frozenset(life for life in self._held if not self._board.is_free(life, self._member))
        for life in lost:
            del self._held[life]
        for life, claim in self._held.items():
            self._board.owners[life] = (self._member, claim)
        for life, (owner, _) in list(self._board.owners.items()):
            if owner == self._member and life not in self._held:
                del self._board.owners[life]
        return lost

    async def mine(self) -> list[PodLease]:
        """Restore this member's claims from the table."""
        self._held = {
            life: claim
            for life, (owner, claim) in self._board.owners.items()
            if owner == self._member
        }
        return list(self._held.values())

    async def aclose(self) -> None:
        """Do nothing: there are no connections."""
