"""Discrete-event simulation of a function's instances under Poisson arrivals.

Calls wait in one queue in order of arrival, and go to the instance with the fewest calls that has a
free slot, as the activator assigns them. The calls of an instance share its speed: with n of them
each advances at `speeds[n - 1]` of the speed of a call alone, so an instance has one clock of work
by which all its calls advance (processor sharing; Parekh and Gallager, "A generalized processor
sharing approach to flow control", 1993).

The times of calls are drawn from measured ones (bootstrap; B. Efron, 1979). The same seed gives the
same arrivals and times for any number of instances, so that these are compared under one load."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

CALLS = 30_000
"""Calls that are measured: 300 of them are beyond the 99th percentile."""
_WARM_UP = 6_000
"""Calls before these, in which the queue fills."""
_FILLS = 5
"""Further calls before these for each slot: several generations of calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A call's work: its time if it runs alone, in ms, to its first token or byte, and in all."""

    first_ms: float
    whole_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What was simulated.

    Attributes:
        latencies_ms, firsts_ms: sorted times from arrival to the last and to the first byte.
        ended_ms: the same as `latencies_ms`, in the order in which calls ended.
        waited: share of calls that waited for a slot.
        busy: mean number of instances with at least one call.
    """

    latencies_ms: Sequence[float]
    firsts_ms: Sequence[float]
    ended_ms: Sequence[float]
    waited: float
    busy: float


def simulate(
    works: Sequence[Work],
    *,
    rate_per_s: float,
    instances: int,
    speeds: Sequence[float],
    calls: int = CALLS,
    seed: int = 0,
) -> Simulated:
    """Simulate `calls` calls after the queue has filled. `speeds`: speed of each of 1, 2, … calls
    of an instance, as shares of that of a call alone; its length is the number of slots."""
    first = _WARM_UP + _FILLS * instances * len(speeds)
    arrivals = _arrivals(works, rate_per_s, first + calls, seed)
    return _Simulation(instances, speeds, first).run(arrivals)


def _arrivals(
    works: Sequence[Work], rate_per_s: float, calls: int, seed: int
) -> Iterator[tuple[float, Work]]:
    source, now = random.Random(seed), 0.0
    for _ in range(calls):
        now += source.expovariate(rate_per_s) * 1000
        yield now, works[int(source.random() * len(works))]


@dataclass(slots=True)
class _Instance:
    """An instance.

    Attributes:
        clock: work that each of its calls has advanced by, at the time `at`.
        ends, firsts: its calls by the clock at which they end and reach their first byte.
        version: changes whenever its next end does.
        busy: time with at least one call.
    """

    clock: float = 0.0
    at: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    firsts: list[tuple[float, int]] = field(default_factory=list)
    version: int = 0
    busy: float = 0.0


class _Simulation:
    """One run; times in ms. Calls are numbered in order of arrival; those from `first` on
    count."""

    def __init__(self, instances: int, speeds: Sequence[float], first: int) -> None:
        self._instances = [_Instance() for _ in range(instances)]
        self._speeds = speeds
        self._first = first
        self._least = [(0, number) for number in range(instances)]
        self._events: list[tuple[float, int, int]] = []
        self._waiting: deque[int] = deque()
        self._arrivals: list[tuple[float, Work]] = []
        self._latencies: list[float] = []
        self._firsts: list[float] = []
        self._waited = 0

    def run(self, arrivals: Iterator[tuple[float, Work]]) -> Simulated:
        """Run until all calls have ended."""
        now = since = 0.0
        for call, (now, work) in enumerate(arrivals):
            self._end_until(now)
            if call == self._first:
                since = now
                self._busy(now)
            self._arrivals.append((now, work))
            self._arrive(call, now)
        busy = self._busy(now) / (now - since)
        self._end_until(float("inf"))
        return Simulated(
            latencies_ms=sorted(self._latencies),
            firsts_ms=sorted(self._firsts),
            ended_ms=self._latencies,
            waited=self._waited / len(self._latencies),
            busy=busy,
        )

    def _busy(self, now: float) -> float:
        """Time of all instances with calls, since it was asked last."""
        total = 0.0
        for instance in self._instances:
            self._advance(instance, now)
            total += instance.busy
            instance.busy = 0.0
        return total

    def _arrive(self, call: int, now: float) -> None:
        free = self._least_loaded()
        if free is not None:
            self._begin(free, call, now)
            return
        self._waiting.append(call)
        self._waited += call >= self._first

    def _least_loaded(self) -> int | None:
        """The instance with the fewest calls; None if none has a free slot. Each change adds an
        entry to `_least`; those that are no longer true are dropped here."""
        while True:
            calls, number = self._least[0]
            if calls == len(self._instances[number].ends):
                return number if calls < len(self._speeds) else None
            heapq.heappop(self._least)

    def _begin(self, number: int, call: int, now: float) -> None:
        instance, work = self._instances[number], self._arrivals[call][1]
        self._advance(instance, now)
        heapq.heappush(instance.ends, (instance.clock + work.whole_ms, call))
        if work.first_ms < work.whole_ms:
            heapq.heappush(instance.firsts, (instance.clock + work.first_ms, call))
        self._change(number, now)

    def _end_until(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            now, number, version = heapq.heappop(self._events)
            instance = self._instances[number]
            if version != instance.version:
                continue
            self._advance(instance, now)
            _, call = heapq.heappop(instance.ends)
            if call >= self._first:
                self._latencies.append(now - self._arrivals[call][0])
                work = self._arrivals[call][1]
                if work.first_ms >= work.whole_ms:
                    self._firsts.append(self._latencies[-1])
            if self._waiting:
                self._begin(number, self._waiting.popleft(), now)
            else:
                self._change(number, now)

    def _advance(self, instance: _Instance, now: float) -> None:
        if calls := len(instance.ends):
            speed, begin, at = self._speeds[calls - 1], instance.clock, instance.at
            instance.clock += (now - at) * speed
            instance.busy += now - at
            while instance.firsts and instance.firsts[0][0] <= instance.clock:
                mark, call = heapq.heappop(instance.firsts)
                if call >= self._first:
                    self._firsts.append(at + (mark - begin) / speed - self._arrivals[call][0])
        instance.at = now

    def _change(self, number: int, now: float) -> None:
        """Note its number of calls, and when the next of them ends."""
        instance = self._instances[number]
        instance.version += 1
        calls = len(instance.ends)
        heapq.heappush(self._least, (calls, number))
        if calls:
            left = max(0.0, instance.ends[0][0] - instance.clock) / self._speeds[calls - 1]
            heapq.heappush(self._events, (now + left, number, instance.version))
