"""The starts of an activator that wait for an instance, by revision, and the warm pods that are
promoted for them.

The rule, for the starts of one revision:

1. A start takes whatever comes first: a pod that serves, or a fork in a promoted pod that this
   activator has claimed (`forks.pod_forks`).
2. A promoted pod that is coming is expected to serve as many starts as it has room for: its first
   instance, and forks of its Template within its memory. It has room for one where the function
   cannot be forked, or lately was not.
3. A start has a warm pod promoted only if a call waits, and the pods that are coming, with the
   room that is left in those that are here, are too few for all starts that wait. This is decided
   again with each change: a pod that came, ended or refused to fork, a start that was given up. So
   a burst from zero of starts that fit into one pod promotes one pod, and without forks one pod for
   each.
   While a promotion is late (the controller may have claimed a pod, and has not answered in time)
   no further pod is promoted for its revision, and its starts request pods of their own.
4. A promotion that is not needed any longer is not sent. A pod that was promoted is never called
   back: it serves the next start, or is given up when no activator claims it (`unclaimed_pods`).
5. A start requests a pod of the revision's own when it had no other to wait for, or has waited for
   longer than the patience. It still takes what comes first.

Each activator decides for the starts that wait in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from activator.knative.forks.pod_forks import PodForks
from activator.knative.pod_registry import OwnedPod, PodRegistry
from activator.knative.pod_watcher import Pod, PodWatcher
from activator.knative.warm.source import PromotedPod, WarmPodSource
from activator.routing.route_table import CallTarget
from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter.types import InstanceId

UNSEEN_S = 10.0
"""How long a pod that was promoted is awaited although no watch shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotions:
    """Where warm pods come from, which revisions (by key) have calls that wait here, and after how
    many seconds a start that was promised one requests a pod of its own as well; and further
    instances in promoted pods."""

    source: WarmPodSource
    has_calls: Callable[[str], bool]
    patience_s: float
    forks: PodForks = field(default_factory=PodForks)


@dataclass(slots=True, eq=False)
class WaitingStart:
    """A start that waits.

    Attributes:
        secrets: environment that the instance gets.
        began: monotonic time.
        has_promoted: a warm pod was promoted for it, or there was none; the controller gives an
            instance one pod only.
        has_requested: it has requested a pod of the revision's own.
        is_forking: an instance is being forked for it."""

    instance: InstanceId
    secrets: Mapping[str, str]
    began: float
    has_promoted: bool = False
    has_requested: bool = False
    is_forking: bool = False


@dataclass(slots=True)
class RevisionStarts:
    """The waiting starts of one revision. They claim pods one after the other: `claiming`.

    Attributes:
        promoting: warm pods that are being promoted for it."""

    target: CallTarget
    starts: list[WaitingStart] = field(default_factory=list)
    promoting: int = 0
    claiming: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Promoted:
    """A pod that was promoted here, and is not claimed yet: how many ms that took, and when."""

    key: str
    took_ms: float
    at: float


class WaitingStarts:
    """Owner: the event loop."""

    def __init__(
        self,
        pods: PodWatcher,
        claimed: PodRegistry,
        promotions: Promotions | None,
        *,
        give_back: Callable[[OwnedPod], Awaitable[None]],
    ) -> None:
        """`promotions`: None = the cluster has no warm pods. `give_back`: releases an idle pod when
        the pool has none left."""
        self._pods = pods
        self._claimed = claimed
        self._promotions = promotions
        self._give_back = give_back
        self._of: dict[str, RevisionStarts] = {}
        self._promoted: dict[str, _Promoted] = {}
        self._late: dict[asyncio.Task[Any], str] = {}
        self._tasks = BackgroundTasks()

    def __repr__(self) -> str:
        return f"<WaitingStarts {len(self)}, {len(self._promoted)} promoted pods are coming>"

    def __len__(self) -> int:
        return sum(len(waiting.starts) for waiting in self._of.values())

    def are_waiting(self, key: str) -> bool:
        """Whether a start of that revision waits."""
        return key in self._of

    def claiming(self, key: str) -> asyncio.Lock:
        """The lock under which one of the waiting starts of a revision claims a pod."""
        return self._of[key].claiming

    @contextmanager
    def waits(
        self, target: CallTarget, instance: InstanceId, secrets: Mapping[str, str]
    ) -> Iterator[WaitingStart]:
        """A start waits until the end of the context."""
        waiting = self._of.setdefault(target.key, RevisionStarts(target))
        start = WaitingStart(instance, secrets, time.monotonic())
        waiting.starts.append(start)
        try:
            yield start
        finally:
            waiting.starts.remove(start)
            if not waiting.starts:
                del self._of[target.key]

    # -- promotions --------------------------------------------------------------------------------
    def promote(self, key: str) -> None:
        """Begin the promotions that a revision's starts need by the rule. A start that is cancelled
        does not cancel what was sent: the pod is the next start's."""
        promotions, waiting = self._promotions, self._of[key]
        if promotions is None or not promotions.has_calls(key):
            return
        for start in waiting.starts:
            if self._missing(waiting) <= 0 or key in self._late.values():
                return
            if start.has_promoted or start.has_requested:
                continue
            start.has_promoted = True
            waiting.promoting += 1
            self._tasks.run(
                self._promote(promotions, waiting, start), name=f"promote {start.instance}"
            )

    async def _promote(
        self, promotions: Promotions, waiting: RevisionStarts, start: WaitingStart
    ) -> None:
        target, room = waiting.target, promotions.forks.room(waiting.target)
        task = asyncio.current_task()
        assert task is not None

        def is_needed() -> bool:
            if task in self._late:
                return self.are_waiting(target.key)
            return self._missing(waiting) + room > 0

        def on_late() -> None:
            if task not in self._late:
                waiting.promoting -= 1
                self._late[task] = target.key
                self._pods.notify(target.key)

        try:
            pod = await promotions.source.promote(
                target, start.instance, start.secrets, is_needed=is_needed, on_late=on_late
            )
            if pod is not None:
                self._record(target, pod)
            elif is_needed():
                for one in waiting.starts:  # there is none for these either
                    one.has_promoted = True
                if (idle := promotions.forks.longest_idle(self._claimed)) is not None:
                    await self._give_back(idle)  # the pool needs the room
        finally:
            if self._late.pop(task, None) is None:
                waiting.promoting -= 1
            self._pods.notify(target.key)

    def _record(self, target: CallTarget, promoted: PromotedPod) -> None:
        """Record a pod that is coming, unless it has come, or gone, meanwhile."""
        pod = self._pods.find(promoted.uid)
        if pod is None or (pod.is_coming and pod not in self._claimed):
            self._promoted[promoted.uid] = _Promoted(
                key=target.key, took_ms=promoted.took_ms, at=time.monotonic()
            )

    def is_promised(self, key: str, start: WaitingStart) -> bool:
        """Whether a start may expect an instance in a promoted pod soon, and so requests no pod of
        the revision's own."""
        if self._promotions is None:
            return False
        waited_s = time.monotonic() - start.began
        return waited_s < self._promotions.patience_s and self._missing(self._of[key]) <= 0

    def promised(self, key: str) -> int:
        """Number of a revision's starts that wait for a promoted pod, or for a fork in one, and
        have requested no pod of the revision's own."""
        waiting = self._of.get(key)
        if waiting is None or self._promotions is None:
            return 0
        forking = sum(one.is_forking and not one.has_requested for one in waiting.starts)
        return forking + min(_unserved(waiting), self._expected(waiting))

    def _missing(self, waiting: RevisionStarts) -> int:
        """How many of the starts have nothing to wait for; below 0: how many more there could
        be."""
        return _unserved(waiting) - self._expected(waiting)

    def _expected(self, waiting: RevisionStarts) -> int:
        """How many starts the promoted pods that are coming will serve, and those that are here."""
        assert self._promotions is not None
        forks, target = self._promotions.forks, waiting.target
        claimed = self._claimed.of_revision(target.key)
        free = sum(forks.free(target, held) for held in claimed)
        return free + waiting.promoting * forks.room(target) + sum(self._coming(forks, target))

    def _coming(self, forks: PodForks, target: CallTarget) -> Iterator[int]:
        """The room of each pod that was promoted here, and does not serve yet."""
        now = time.monotonic()
        for uid, promoted in list(self._promoted.items()):
            if promoted.key != target.key:
                continue
            pod = self._pods.find(uid)
            if pod is not None:
                yield forks.room(target, pod) if pod.is_coming else 0
            elif now - promoted.at < UNSEEN_S:
                yield forks.room(target)
            else:
                del self._promoted[uid]

    # -- events ------------------------------------------------------------------------------------
    def on_claimed(self, pod: Pod) -> float | None:
        """Handle the claim of a pod, by whom ever; returns how many ms its promotion took, if it
        was promoted here."""
        promoted = self._promoted.pop(pod.uid, None)
        return promoted.took_ms if promoted is not None else None

    def on_ended(self, pod: Pod) -> None:
        """Handle the end of a pod: no start waits for it any longer."""
        self._promoted.pop(pod.uid, None)

    async def aclose(self) -> None:
        """Finish promotions in progress, and give up late ones."""
        for task in self._late:
            task.cancel()
        await self._tasks.aclose()


def _unserved(waiting: RevisionStarts) -> int:
    """Number of starts that have requested no pod of the revision's own, and are not being
    forked."""
    return sum(not (one.has_requested or one.is_forking) for one in waiting.starts)
