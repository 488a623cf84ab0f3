"""Which activator a pod belongs to: one, so that its slots and its bill have one owner.

A claim is of one *life* of a pod (`pods.Pod.life`) and lasts until it is given back, the pod's life
is over, or its owner is no member any more (`activator.coordination`): then whoever wants it may
have it. Each member states all its claims with every beat, so that an answer that was lost heals
with the next one: what it holds without knowing is free again, and what others took while it was
away is told to it.

A member whose start finds no free pod is noted, as it is for allowances: *starving* while it has
less than its share of the pods that there are. The others read it in the answer to their next beat,
and give one up (`activator.balancing.rebalancing`).

When the store cannot be reached nothing new is claimed, and what is claimed is used on. A member
that cannot reach the store longer than its membership lasts may find its pods taken by others who
can: for that long such a pod has two users, and each bills its own calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class ClaimsUnreachable(Exception):
    """Raised when what activators share does not answer; the message names its address, never its
    password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLease:
    """One pod of ours.

    Attributes:
        revision: key, `<function id>@<revision>`.
        instance: the id that the start asked for.
    """

    life: str
    revision: str
    instance: str


class Claims(Protocol):
    """The verbs, as one member sees them."""

    async def claim(
        self, revision: str, instance: str, lives: Sequence[str], *, pods: int
    ) -> str | None:
        """The first of `lives` that is free, from now on ours; None when all are others'. `pods`:
        how many of the revision there are.

        Asked again for the same instance it answers the same. Raises ClaimsUnreachable; what became
        of it is then unknown until the next `state`, or a `release` of that instance."""
        ...

    async def release(self, life: str) -> None:
        """Give one back; idempotent, and never another's. Does not raise: what the store could not
        be told, the next `state` tells."""
        ...

    async def state(self) -> frozenset[str]:
        """State what is ours; lives that are not any more, because others took them. Raises
        ClaimsUnreachable."""
        ...

    async def mine(self) -> list[PodLease]:
        """What the store has of this member, after its restart; all of it is ours from now on.
        Raises ClaimsUnreachable."""
        ...

    async def aclose(self) -> None:
        """Close the connections; claims stay."""
        ...


class PodLeaseTable:
    """Whose each life is. `living`: members that count."""

    def __init__(self, living: Callable[[], Iterable[str]]) -> None:
        self._living = living
        self.owners: dict[str, tuple[str, PodLease]] = {}

    def __repr__(self) -> str:
        return f"<PodLeaseTable {len(self.owners)} claims>"

    def is_free(self, life: str, member: str) -> bool:
        """Whether `member` may have it."""
        owner = self.owners.get(life)
        return owner is None or owner[0] == member or owner[0] not in set(self._living())


class ProcessClaims:
    """`Claims` on a board in this process. A lone activator has one of its own; then every claim is
    granted."""

    def __init__(self, board: PodLeaseTable | None = None, *, member: str) -> None:
        self._board = board or PodLeaseTable(lambda: (member,))
        self._member = member
        self._held: dict[str, PodLease] = {}

    def __repr__(self) -> str:
        return f"<ProcessClaims of {self._member}: {len(self._held)}>"

    async def claim(
        self, revision: str, instance: str, lives: Sequence[str], *, pods: int
    ) -> str | None:
        """See Claims."""
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
        """See Claims."""
        self._held.pop(life, None)
        if self._board.owners.get(life, ("",))[0] == self._member:
            del self._board.owners[life]

    async def state(self) -> frozenset[str]:
        """See Claims."""
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
        """See Claims."""
        self._held = {
            life: claim
            for life, (owner, claim) in self._board.owners.items()
            if owner == self._member
        }
        return list(self._held.values())

    async def aclose(self) -> None:
        """See Claims."""
