"""The order of those who wait. Pure; every operation is O(1) in the number that wait.

Strict by priority. Within one priority tenants take turns by deficit round robin (Shreedhar & Varghese, "Efficient Fair Queuing using
Deficit Round Robin", SIGCOMM 1995; ToN 4(3), 1996): at its turn a tenant is credited its weight times the largest cost seen, and is
served while its credit covers the cost of its first. A tenant that has nothing left loses its credit. Within one tenant: first in, first
out. So a tenant that waits with a thousand calls delays another's one call by the part of a turn that its weight is, and no more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from activator.fairness.rank import Rank
from pilotlight.types import Priority

T = TypeVar("T")


class Place(Generic[T]):
    """Somebody's place in a FairQueue; compared by identity."""

    __slots__ = ("cost", "item", "rank")

    def __init__(self, item: T, rank: Rank, cost: float) -> None:
        self.item = item
        self.rank = rank
        self.cost = cost

    def __repr__(self) -> str:
        return f"<Place {self.rank.priority} {self.rank.tenant or '-'} {self.item!r}>"


class _Flow(Generic[T]):
    """One tenant's places within one priority, oldest first, and its credit."""

    __slots__ = ("credit", "is_at_turn", "places", "weight")

    def __init__(self) -> None:
        self.places: OrderedDict[Place[T], None] = OrderedDict()
        self.credit = 0.0
        self.weight = 1
        self.is_at_turn = False


class _Ring(Generic[T]):
    """The flows of one priority in the order of their turns."""

    __slots__ = ("flows", "quantum")

    def __init__(self) -> None:
        self.flows: OrderedDict[str, _Flow[T]] = OrderedDict()
        self.quantum = 0.0

    def push(self, place: Place[T], *, is_first: bool) -> None:
        if not self.flows:
            self.quantum = 0.0
        self.quantum = max(self.quantum, place.cost)  # so that one turn always suffices for one item: O(1)
        flow = self.flows.get(place.rank.tenant)
        if flow is None:
            flow = self.flows[place.rank.tenant] = _Flow()
        flow.weight = place.rank.weight
        flow.places[place] = None
        if is_first:
            flow.places.move_to_end(place, last=False)

    def remove(self, place: Place[T]) -> bool:
        flow = self.flows.get(place.rank.tenant)
        if flow is None or place not in flow.places:
            return False
        del flow.places[place]
        if not flow.places:
            del self.flows[place.rank.tenant]
        return True

    def pop(self, is_wanted: Callable[[T], bool]) -> Place[T] | None:
        for tenant, flow in self.flows.items():
            place = next(iter(flow.places))
            if is_wanted(place.item):
                self._serve(tenant, flow, place)
                return place
        return None

    def _serve(self, tenant: str, flow: _Flow[T], place: Place[T]) -> None:
        if not flow.is_at_turn or flow.credit < place.cost:
            turn = flow.weight * self.quantum
            flow.is_at_turn = True
            flow.credit = min(flow.credit + turn, turn + self.quantum)
        flow.credit -= place.cost
        del flow.places[place]
        if not flow.places:
            del self.flows[tenant]
        elif flow.credit < next(iter(flow.places)).cost:  # its turn is over
            flow.is_at_turn = False
            self.flows.move_to_end(tenant)


def _anybody(_item: object) -> bool:
    return True


class FairQueue(Generic[T]):
    """See the module. Owner: one event loop; it never awaits.

    Attributes:
        places: of all who wait, in the order of arrival. To read: who asks for each call whether anybody waits need not call `len`.
    """

    def __init__(self) -> None:
        self._rings: dict[Priority, _Ring[T]] = {priority: _Ring() for priority in sorted(Priority, key=lambda p: p.rank)}
        self.places: OrderedDict[Place[T], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[T]:
        """In the order of arrival."""
        return (place.item for place in self.places)

    def __repr__(self) -> str:
        parts = ", ".join(f"{sum(len(f.places) for f in r.flows.values())} {p}" for p, r in self._rings.items() if r.flows)
        return f"<FairQueue {parts or 'empty'}>"

    def push(self, item: T, rank: Rank, *, cost: float = 1.0, is_first: bool = False) -> Place[T]:
        """At the end of its tenant's line, or at its head. `cost` > 0: what it takes of what is handed out, in any unit."""
        place = Place(item, rank, cost)
        self._rings[rank.priority].push(place, is_first=is_first)
        self.places[place] = None
        return place

    def pop(self, is_wanted: Callable[[T], bool] = _anybody) -> T | None:
        """Take out whose turn it is; None when nobody waits.

        `is_wanted`: asked about the first of each tenant; a tenant whose first is not wanted is passed over, and keeps its credit. Only
        then the time is linear in the number of tenants.
        """
        for ring in self._rings.values():
            place = ring.pop(is_wanted)
            if place is not None:
                del self.places[place]
                return place.item
        return None

    def remove(self, place: Place[T]) -> bool:
        """Give up a place; False when it was handed out before."""
        if place not in self.places:
            return False
        del self.places[place]
        return self._rings[place.rank.priority].remove(place)

    def oldest(self) -> T | None:
        """Who waits longest."""
        return next(iter(self.places)).item if self.places else None

    def first(self) -> T | None:
        """One of those with the highest priority, without taking it out; not necessarily the one whose turn it is."""
        for ring in self._rings.values():
            for flow in ring.flows.values():
                return next(iter(flow.places)).item
        return None
