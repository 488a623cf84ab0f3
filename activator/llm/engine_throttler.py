"""The throttler of a language model's server: its instances accept as many calls as their KV memory
allows, and calls are routed by prompt prefix.

It differs from other throttlers in two ways. The slots of an instance change with the state of its
engine (`engine_state`), so that calls that would wait inside the engine wait here instead, in the
fair queue. And a call is routed not to the least loaded instance but to the one with its prompt's
prefix (`prefix_affinity`), among as many as the autoscaler keeps: the others get no calls, so that
they become idle."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from activator.balancing.instance import Instance, Reservation, slots_of
from activator.balancing.throttler import Throttler
from activator.balancing.wait_queue import EngineLoad
from activator.llm.engine_metrics import EngineMetrics, Histogram
from activator.llm.engine_state import KV_TARGET, EngineState, EngineTracker
from activator.llm.prefix_affinity import LOAD, by_key, of_two
from activator.routing.route_table import CallTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTerms:
    """`kv_target`: share of its KV memory that an engine's calls may use; `load`: see
    `prefix_affinity.LOAD`."""

    kv_target: float = KV_TARGET
    load: float = LOAD


class EngineThrottler(Throttler):
    """The throttler of one revision of a language model."""

    def __init__(
        self,
        target: CallTarget,
        *,
        engine_terms: EngineTerms = EngineTerms(),  # frozen
        chance: random.Random | None = None,
        **parts: Any,
    ) -> None:
        """`parts`: those of every Throttler."""
        self.engine_terms = engine_terms
        self._chance = chance or random.Random()
        self._watched: dict[str, EngineTracker] = {}
        self._wanted: int | None = None
        super().__init__(target, **parts)

    # -- engine state ------------------------------------------------------------------------------
    def watched(self, instance: Instance) -> EngineTracker:
        """The tracker of an instance's engine. Trackers of removed instances are dropped."""
        found = self._watched.get(instance.id)
        if found is None:
            self._watched = {
                known: watched
                for known, watched in self._watched.items()
                if known in self.instances
            }
            found = self._watched[instance.id] = EngineTracker(
                slots_of(self.target.spec), kv_target=self.engine_terms.kv_target
            )
        return found

    def record_metrics(
        self, instance: Instance, reading: EngineMetrics | None
    ) -> EngineState | None:
        """Record an engine's metrics, or (None) a failed scrape, and set its instance's capacity
        accordingly.

        Returns the current state."""
        watched = self.watched(instance)
        view = (
            watched.record(reading, self._clock()) if reading is not None else watched.record_miss()
        )
        before = instance.capacity
        instance.capacity = view.slots if view is not None else slots_of(self.target.spec)
        if instance.capacity > before:
            self.retry_slots()
        return view

    def views(self) -> Mapping[str, EngineState]:
        """The state of engines, by instance."""
        found = (
            (instance_id, self._watched[instance_id].view)
            for instance_id in list(self.instances)
            if instance_id in self._watched
        )
        return {instance_id: view for instance_id, view in found if view is not None}

    @property
    def slots_each(self) -> int:
        """Average slots of the current instances, because new ones have the same memory."""
        views = [
            view for instance in self.live() if (view := self.watched(instance).view) is not None
        ]
        return (
            max(1, sum(view.slots for view in views) // len(views))
            if views
            else slots_of(self.target.spec)
        )

    def engine_load(self, now: float) -> EngineLoad | None:
        """The aggregated state of its engines; None when none has answered recently."""
        live = list(self.live())
        views = [view for instance in live if (view := self.watched(instance).view) is not None]
        if not views:
            return None
        first = self._first_tokens(live)
        objectives = self.target.spec.objectives
        peaks = [view.peak_prompt_tokens_per_s for view in views if view.peak_prompt_tokens_per_s]
        return EngineLoad(
            slots=sum(view.slots for view in views) / len(views),
            queued_tokens=self._wait_queue.tokens
            + sum(int(view.waiting * view.mean_prompt_tokens) for view in views),
            tokens_per_s=sum(peaks) / len(peaks) if peaks else None,
            first_tokens=int(first.count) if first is not None else 0,
            late=first.longer_than(objectives.first_token_s) / first.count
            if first is not None and objectives is not None
            else None,
        )

    def _first_tokens(self, live: Collection[Instance]) -> Histogram | None:
        """First tokens of all instances together since the newest one started; earlier ones are not
        representative."""
        since = max(instance.started_at for instance in live)
        together: Histogram | None = None
        for instance in live:
            own = self.watched(instance).first_tokens_since(since)
            if own is not None:
                together = own if together is None else together.plus(own)
        return together

    # -- which instance ----------------------------------------------------------------------------
    def set_desired_instances(self, wanted: int) -> None:
        """The autoscaler wants to keep so many: calls go to those that have been there longest."""
        self._wanted = wanted

    def reserve_nowait(
        self, affinity: int | None = None, *, now: float | None = None
    ) -> Reservation | None:
        """Reserve a slot if one is free, see Throttler."""
        return super().reserve_nowait(affinity, now=now) if self._has_stream() else None

    def _assign_free_slots(
        self, now: float, fresh: Instance | None = None, start_ms: float = 0.0
    ) -> None:
        while self._wait_queue.places and self._has_stream():
            if not any(instance.has_slot(now) for instance in self.instances.values()):
                self._schedule_retry_when_unblocked(now)
                return
            waiter = self._wait_queue.next()
            if waiter is None:
                return
            instance = (
                fresh
                if fresh is not None and fresh.has_slot(now)
                else self._choose(now, waiter.affinity)
            )
            assert instance is not None  # one has a slot
            self._assign(waiter, instance, now, start_ms if instance is fresh else None)

    def _has_stream(self) -> bool:
        """Whether one more call may run (`TokenLimits.max_streams`). Several activators each have
        their share."""
        limits = self.target.spec.limits
        if limits is None or limits.max_streams is None:
            return True
        return self.in_flight < max(1, self._gate.share(limits.max_streams))

    def _choose(self, now: float, affinity: int | None = None) -> Instance | None:
        """Choose an instance with a free slot; kept instances have priority."""
        live = list(self.live())
        if len(live) < 2:
            return live[0] if live and live[0].has_slot(now) else None
        for instances in self._kept_first(live):
            chosen = (
                by_key(affinity, instances, now, load=self.engine_terms.load)
                if affinity is not None
                else None
            )
            chosen = chosen or of_two(instances, now, self._chance)
            if chosen is not None:
                return chosen
        return None

    def _kept_first(self, live: list[Instance]) -> Iterator[list[Instance]]:
        wanted = self._wanted
        if wanted is not None and wanted < len(live):
            yield live[: max(1, wanted)]  # oldest first
            yield live[max(1, wanted) :]
        else:
            yield live
