"""A cluster on a clock that jumps: instances that start, serve and end, calls that wait for slots,
and GPUs that may run out.

Who decides is a `Policy` per function; the world only does as it is told and keeps the books: every
instance holds one GPU from the moment it gets it to its end, and that time is either starting, busy
or idle. Owner of everything: the one loop of `World.run`."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.autoscaling.traces import Function, Trace


@dataclass(eq=False, slots=True)
class Pod:
    """One instance. `held_at`: when it got its GPU; `ready_at`: when it could take calls; None =
    not yet."""

    id: str
    asked_at: float
    held_at: float | None = None
    ready_at: float | None = None
    in_flight: int = 0
    calls: int = 0
    held_s: float = 0.0
    idle_since: float = 0.0
    is_draining: bool = False
    is_gone: bool = False


@dataclass(slots=True)
class Books:
    """What one run cost and how long its calls waited.

    Attributes:
        starting_s, busy_s, idle_s: GPU time of instances on their way, with a call, without one.
        waits_s: one per served call.
        starts: instances that got a GPU.
    """

    starting_s: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    starts: int = 0

    @property
    def gpu_s(self) -> float:
        """All of it."""
        return self.starting_s + self.busy_s + self.idle_s

    def add(self, other: Books) -> None:
        """Another run."""
        self.starting_s += other.starting_s
        self.busy_s += other.busy_s
        self.idle_s += other.idle_s
        self.waits_s += other.waits_s
        self.starts += other.starts


class Policy(Protocol):
    """Who decides for one function: told of everything that happens to it."""

    def arrived(self) -> None:
        """A call came; it has a slot by now, or waits."""

    def ended(self) -> None:
        """A call ended."""

    def came(self, pod: Pod) -> None:
        """An instance is ready."""

    def is_start_needed(self) -> bool:
        """Whether the last of the starts that wait for a GPU is still needed; asked by placements
        that withdraw others."""


class Placement(Protocol):
    """Which start gets the next free GPU."""

    def choose(self, waiting: list[tuple[Scaled, Pod]]) -> tuple[Scaled, Pod] | None:
        """One of those that wait, or None."""


class Fifo:
    """As a plain scheduler does it: in turn."""

    def choose(self, waiting: list[tuple[Scaled, Pod]]) -> tuple[Scaled, Pod] | None:
        """See Placement."""
        return waiting[0] if waiting else None


class Scaled:
    """One function in the world: its instances and its line."""

    def __init__(self, world: World, function: Function) -> None:
        self.world = world
        self.function = function
        self.pods: dict[str, Pod] = {}
        self.line: deque[tuple[float, float]] = deque()
        self.policy: Policy = _Nobody()
        self._begun = (0.0, 0)
        self._names = itertools.count()

    def __repr__(self) -> str:
        return (
            f"<RevisionScaler {self.function.name} {self.ready} ready, {self.starting} "
            f"starting, {len(self.line)} waiting>"
        )

    # -- what a policy reads -----------------------------------------------------------------------
    def live(self) -> Iterator[Pod]:
        """Instances that take calls."""
        return (
            pod for pod in self.pods.values() if pod.ready_at is not None and not pod.is_draining
        )

    @property
    def ready(self) -> int:
        """How many take calls."""
        return sum(1 for _ in self.live())

    @property
    def starting(self) -> int:
        """On their way, or waiting for a GPU."""
        return sum(1 for pod in self.pods.values() if pod.ready_at is None)

    @property
    def in_flight(self) -> int:
        """Calls with a slot."""
        return sum(pod.in_flight for pod in self.pods.values())

    @property
    def free_slots(self) -> int:
        """Calls that could go in now."""
        return sum(self.function.max_inputs - pod.in_flight for pod in self.live())

    # -- what a policy does ------------------------------------------------------------------------
    def start(self, count: int) -> None:
        """Bring up so many more, as GPUs become free."""
        for _ in range(count):
            pod = Pod(f"{self.function.name}-{next(self._names)}", self.world.now)
            self.pods[pod.id] = pod
            self.world.request(self, pod)

    def end(self, pod: Pod) -> None:
        """No more calls for it; it ends when it has none."""
        pod.is_draining = True
        if not pod.in_flight:
            self._over(pod)

    def withdraw(self, pod: Pod) -> None:
        """Nobody needs it: it has no GPU yet, and gets none."""
        pod.is_gone = True
        del self.pods[pod.id]
        self.world.waiting.remove((self, pod))

    # -- what happens ------------------------------------------------------------------------------
    def call(self, took_s: float) -> None:
        """A call comes."""
        self.line.append((self.world.now, took_s))
        self.hand_out()
        self.policy.arrived()

    def placed(self, pod: Pod) -> None:
        """It got a GPU: it starts."""
        now = pod.held_at = self.world.now
        self.world.books.starts += 1
        self._begun = (now, self._begun[1] + 1 if self._begun[0] == now else 0)
        self.world.at(now + self.function.start_time(*self._begun), lambda: self._came(pod))

    def _came(self, pod: Pod) -> None:
        if pod.is_gone:
            return
        pod.ready_at = pod.idle_since = self.world.now
        assert pod.held_at is not None
        self.world.books.starting_s += pod.ready_at - pod.held_at
        self.hand_out()
        self.policy.came(pod)

    def hand_out(self) -> None:
        """Free slots go to those who wait: of the least loaded, among equals of the last one
        used."""
        now, slots = self.world.now, self.function.max_inputs
        while self.line:
            pod = min(
                (p for p in self.live() if p.in_flight < slots),
                key=lambda p: (p.in_flight, -p.idle_since),
                default=None,
            )
            if pod is None:
                return
            came_at, took_s = self.line.popleft()
            self.world.books.waits_s.append(now - came_at)
            if not pod.in_flight:
                self.world.books.idle_s += now - pod.idle_since
                pod.idle_since = now
            pod.in_flight += 1
            self.world.at(now + took_s, lambda pod=pod, took_s=took_s: self._ended(pod, took_s))  # type: ignore[misc]

    def _ended(self, pod: Pod, took_s: float) -> None:
        now = self.world.now
        pod.in_flight -= 1
        pod.calls += 1
        pod.held_s += took_s
        if not pod.in_flight:
            self.world.books.busy_s += now - pod.idle_since
            pod.idle_since = now
            if pod.is_draining:
                self._over(pod)
        self.hand_out()
        self.policy.ended()

    def _over(self, pod: Pod) -> None:
        if pod.held_at is None:
            self.withdraw(pod)
            return
        pod.is_gone = True
        del self.pods[pod.id]
        if pod.ready_at is None:
            self.world.books.starting_s += self.world.now - pod.held_at
        else:
            self.world.books.idle_s += self.world.now - pod.idle_since
        self.world.gpu_freed()


class World:
    """The clock, the GPUs and the books of one run.

    Attributes:
        waiting: starts that have no GPU yet, in the order in which they were asked for.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        policy: Callable[[Scaled], Policy],
        placement: Placement | None = None,
    ) -> None:
        self.now = 0.0
        self.books = Books()
        self.waiting: list[tuple[Scaled, Pod]] = []
        self.functions = [Scaled(self, function) for function in trace.functions]
        self.gpus = trace.gpus
        self._held = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._placement = placement or Fifo()
        for scaled in self.functions:
            scaled.policy = policy(scaled)
            self._call_next(scaled, iter(scaled.function.calls))

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Have something happen then; what is due at one time happens in the order in which it was
        asked for."""
        heapq.heappush(self._events, (when, next(self._order), what))

    def run(self) -> Books:
        """Until nothing more happens: all calls served, all instances gone."""
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
        return self.books

    def request(self, scaled: Scaled, pod: Pod) -> None:
        """A start wants a GPU: it gets a free one at once where no other start waits."""
        if not self.waiting and self._has_room:
            self._held += 1
            scaled.placed(pod)
        else:
            self.waiting.append((scaled, pod))
            self.place()

    @property
    def _has_room(self) -> bool:
        return self.gpus is None or self._held < self.gpus

    def place(self) -> None:
        """Free GPUs go to starts that wait."""
        while self.waiting and self._has_room:
            chosen = self._placement.choose(self.waiting)
            if chosen is None:
                return
            self.waiting.remove(chosen)
            self._held += 1
            chosen[0].placed(chosen[1])

    def gpu_freed(self) -> None:
        """An instance is gone."""
        self._held -= 1
        self.place()

    def _call_next(self, scaled: Scaled, calls: Iterator[tuple[float, float]]) -> None:
        following = next(calls, None)
        if following is None:
            return

        def come() -> None:
            self._call_next(scaled, calls)
            scaled.call(following[1])

        self.at(following[0], come)


class _Nobody:
    """Until a policy is there."""

    def arrived(self) -> None:
        """Nothing."""

    def ended(self) -> None:
        """Nothing."""

    def came(self, pod: Pod) -> None:
        """Nothing."""

    def is_start_needed(self) -> bool:
        """No."""
        return False
