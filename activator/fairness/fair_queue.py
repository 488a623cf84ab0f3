"""A fair queue. Pure; every operation is O(1) in the number of entries.

Priorities are strict. Within one priority, tenants are served by deficit round robin (Shreedhar &
Varghese, "Efficient Fair Queuing using Deficit Round Robin", SIGCOMM 1995; ToN 4(3), 1996): at its
turn a tenant is credited its weight times the largest cost seen, and is served while its credit
covers the cost of its first entry. A tenant with no entries left loses its credit. Within one
tenant the order is first in, first out. A tenant that had no entries gets its first turn before the
waiting tenants (like new flows in FQ-CoDel, RFC 8290 §4.2), and is one of them afterwards, even if
it runs empty meanwhile. So a tenant with a thousand waiting calls delays another's single call only
by what is being served at that time, and a tenant that always waits gets the share of a round that
its weight gives it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from activator.fairness.queue_priority import QueuePriority
from pilotlight.spec.identifiers import Priority

T = TypeVar("T")


class Entry(Generic[T]):
    """An entry of a FairQueue, compared by identity."""

    __slots__ = ("cost", "item", "rank")

    def __init__(self, item: T, rank: QueuePriority, cost: float) -> None:
        self.item = item
        self.rank = rank
        self.cost = cost

    def __repr__(self) -> str:
        return f"<Entry {self.rank.priority} {self.rank.tenant or '-'} {self.item!r}>"


class _Flow(Generic[T]):
    """One tenant's entries within one priority, oldest first, and its credit."""

    __slots__ = ("credit", "is_at_turn", "places", "weight")

    def __init__(self) -> None:
        self.places: OrderedDict[Entry[T], None] = OrderedDict()
        self.credit = 0.0
        self.weight = 1
        self.is_at_turn = False


class _Ring(Generic[T]):
    """The flows of one priority: new ones first, then the others in the order of their turns.

    Attributes:
        fresh: flows that had no entries, and no turn since.
        flows: the others. A flow that is empty after its turn as a fresh one stays here until its
            next turn would come.
        waiting: number of entries in all flows."""

    __slots__ = ("flows", "fresh", "quantum", "waiting")

    def __init__(self) -> None:
        self.fresh: OrderedDict[str, _Flow[T]] = OrderedDict()
        self.flows: OrderedDict[str, _Flow[T]] = OrderedDict()
        self.quantum = 0.0
        self.waiting = 0

    def push(self, place: Entry[T], *, is_first: bool) -> None:
        if not self.waiting:
            self.flows.clear()
            self.quantum = 0.0
        # so that one turn always suffices for one entry: O(1)
        self.quantum = max(self.quantum, place.cost)
        tenant = place.rank.tenant
        flow = self.flows.get(tenant) or self.fresh.get(tenant)
        if flow is None:
            flow = self.fresh[tenant] = _Flow()
        flow.weight = place.rank.weight
        flow.places[place] = None
        self.waiting += 1
        if is_first:
            flow.places.move_to_end(place, last=False)

    def remove(self, place: Entry[T]) -> bool:
        tenant = place.rank.tenant
        flow = self.flows.get(tenant) or self.fresh.get(tenant)
        if flow is None or place not in flow.places:
            return False
        del flow.places[place]
        self.waiting -= 1
        if not flow.places:
            self.fresh.pop(tenant, None)
        return True

    def pop(self, is_wanted: Callable[[T], bool]) -> Entry[T] | None:
        for tenant, flow in self.fresh.items():
            place = next(iter(flow.places))
            if is_wanted(place.item):
                self._serve(flow, place)
                if not flow.is_at_turn:
                    del self.fresh[tenant]
                    self.flows[tenant] = flow
                return place
        return self._pop_in_turn(is_wanted)

    def _pop_in_turn(self, is_wanted: Callable[[T], bool]) -> Entry[T] | None:
        rested: list[str] = []
        found: Entry[T] | None = None
        for tenant, flow in self.flows.items():
            if not flow.places:
                rested.append(tenant)
                continue
            place = next(iter(flow.places))
            if is_wanted(place.item):
                found = place
                self._serve(flow, place)
                if not flow.places:
                    rested.append(tenant)
                elif not flow.is_at_turn:
                    self.flows.move_to_end(tenant)
                break
        for tenant in rested:
            del self.flows[tenant]
        return found

    def _serve(self, flow: _Flow[T], place: Entry[T]) -> None:
        if not flow.is_at_turn or flow.credit < place.cost:
            turn = flow.weight * self.quantum
            flow.credit = min(flow.credit + turn, turn + self.quantum)
        flow.credit -= place.cost
        del flow.places[place]
        self.waiting -= 1
        if not flow.places:
            flow.credit = 0.0
        # otherwise its turn is over
        flow.is_at_turn = bool(flow.places) and flow.credit >= next(iter(flow.places)).cost

    def first(self) -> Entry[T] | None:
        """The first entry of one of the flows."""
        for flow in chain(self.fresh.values(), self.flows.values()):
            if flow.places:
                return next(iter(flow.places))
        return None


def _any_item(_item: object) -> bool:
    return True


class FairQueue(Generic[T]):
    """A queue with strict priorities and fair turns of tenants. Owner: one event loop; it never
    awaits.

    Attributes:
        places: all entries in the order of arrival, read-only. Testing it is faster than `len` on
            the path of each call."""

    def __init__(self) -> None:
        self._rings: dict[Priority, _Ring[T]] = {
            priority: _Ring() for priority in sorted(Priority, key=lambda p: p.rank)
        }
        self.places: OrderedDict[Entry[T], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[T]:
        """Iterate in the order of arrival."""
        return (place.item for place in self.places)

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{ring.waiting} {priority}" for priority, ring in self._rings.items() if ring.waiting
        )
        return f"<FairQueue {parts or 'empty'}>"

    def push(
        self, item: T, rank: QueuePriority, *, cost: float = 1.0, is_first: bool = False
    ) -> Entry[T]:
        """Add an entry at the end of its tenant's flow, or at its head. `cost` > 0: the amount of
        the shared resource that it needs, in any unit."""
        place = Entry(item, rank, cost)
        self._rings[rank.priority].push(place, is_first=is_first)
        self.places[place] = None
        return place

    def pop(self, is_wanted: Callable[[T], bool] = _any_item) -> T | None:
        """Remove and return the item whose turn it is; None when the queue is empty.

        `is_wanted`: called with the first item of each tenant. A tenant whose first item is not
        wanted is skipped, and keeps its credit. Only then the time is linear in the number of
        tenants."""
        for ring in self._rings.values():
            place = ring.pop(is_wanted) if ring.waiting else None
            if place is not None:
                del self.places[place]
                return place.item
        return None

    def remove(self, place: Entry[T]) -> bool:
        """Remove an entry. Returns False when it is not in the queue."""
        if place not in self.places:
            return False
        del self.places[place]
        return self._rings[place.rank.priority].remove(place)

    def oldest(self) -> T | None:
        """The item that waits longest."""
        return next(iter(self.places)).item if self.places else None

    def first(self) -> T | None:
        """An item with the highest priority, which stays in the queue; not necessarily the one
        whose turn it is."""
        for ring in self._rings.values():
            if ring.waiting and (place := ring.first()) is not None:
                return place.item
        return None
