"""Floors of pods that change: a revision's `min-scale` is raised while its function has traffic
(its spare instances, under Knative's autoscaler) and in the windows of its scaling schedules (under
both autoscalers), and set back afterwards.

KPA knows no `buffer_instances`, and PodAutoscalers have no schedules. The Revision's annotation is
changed (only its `spec` is immutable): Knative's revision controller copies it to the
PodAutoscaler, which KPA reads at each of its ticks and our leader when it changes, and puts right
what is changed on the PodAutoscaler itself (knative/serving
pkg/reconciler/revision/reconcile_resources.go, annotationsNeedReconcilingForKPA).

How many pods are busy follows from the observations of activators, by Little's law: seconds of
execution per second, divided by the calls that an instance is to run at once. Calls are observed
when they end, and starts when they end."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.database.store import Store
from pilotlight.controller.kubernetes.desired_state import DesiredState
from pilotlight.controller.slo import observations
from pilotlight.errors import InvalidInput
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import ClusterError, NotFound
from pilotlight.kubernetes.kinds import REVISION
from pilotlight.kubernetes.manifests.autoscaling import MIN_SCALE
from pilotlight.kubernetes.manifests.knative_service import revision_names
from pilotlight.kubernetes.manifests.revisions import RevisionOf
from pilotlight.protocol import FunctionRoute
from pilotlight.schedules.scaling_schedules import ScheduledFloor, floor_at
from pilotlight.spec.instances.scaling import Scaling, buffer_count
from pilotlight.spec.observations import SHADOW_ARM, Observation

log = logging.getLogger(__name__)

EVERY_S = 5.0
LOOK_ROUNDS = 12
"""Rounds after which the cluster is asked again what the floors are; in between only new floors
are read and written."""
ACTIVE_MINUTES = 2
"""Observations are counted by the minute: the current one and the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTraffic:
    """What a revision's calls were in the last `seconds`.

    Attributes:
        calls: ended calls, and starts of instances.
        exec_s: seconds that calls executed."""

    calls: int
    exec_s: float
    seconds: float

    @classmethod
    def of(cls, counted: Observation | None, *, seconds: float) -> ObservedTraffic:
        """From observations of `seconds`; None = there are none."""
        if counted is None:
            return cls(calls=0, exec_s=0.0, seconds=seconds)
        ended = counted.answered + counted.failed + counted.cancelled + counted.starts
        return cls(calls=ended, exec_s=counted.exec_ms / 1000, seconds=seconds)


def floor_of(scaling: Scaling, traffic: ObservedTraffic, *, scheduled: int = 0) -> int:
    """The `min-scale` of a revision: while it has traffic its busy instances and the spare ones, at
    most `max_instances`; otherwise `min_instances`. Never less than what is `scheduled`."""
    least = min(scaling.max_instances, max(scaling.min_instances, scheduled))
    if not traffic.calls:
        return least
    at_once = scaling.target_inputs or scaling.max_inputs
    busy = max(1, math.ceil(traffic.exec_s / traffic.seconds / at_once))
    spare = buffer_count(scaling.buffer_instances, busy=busy)
    return min(scaling.max_instances, max(least, busy + spare))


class BufferFloors:
    """Keeps the floors of all functions with scaling schedules, and with spare instances where
    `counts_spare`. Owner: its task, in the leading controller.

    Attributes:
        writes: number of patches sent."""

    def __init__(
        self,
        cluster: Cluster,
        state: DesiredState,
        store: Store,
        *,
        counts_spare: bool = True,
        may_write: Callable[[], bool] = lambda: True,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._state = state
        self._store = store
        self._counts_spare = counts_spare
        self._may_write = may_write
        self._wall = wall
        self._rounds = 0
        self._known: dict[str, int] = {}
        self._scheduled: dict[str, ScheduledFloor] = {}
        self.writes = 0

    def __repr__(self) -> str:
        return f"<BufferFloors {self.writes} writes>"

    async def run(self) -> None:
        """Run until cancelled. Errors are logged, and the next round repeats what failed."""
        while True:
            await self.update()
            await asyncio.sleep(EVERY_S)

    async def update(self) -> None:
        """Compare and write the floors of all functions once."""
        if self._rounds % LOOK_ROUNDS == 0:
            self._known.clear()  # somebody may have changed them
            self._scheduled.clear()
        self._rounds += 1
        for route in list(self._state.functions.values()):
            try:
                await self._update_function(route)
            except (ClusterError, InvalidInput, SQLAlchemyError, ValueError, KeyError) as e:
                log.warning("event=floor_not_written function=%s error=%s", route.id, e)

    async def _update_function(self, route: FunctionRoute) -> None:
        tenancy = self._state.tenancy(route.tenant, route.environment)
        if tenancy is None or route.stopped:
            return
        made = [self._state.revision(route, tenancy, name) for name in revision_names(route)]
        traffic: Mapping[str, ObservedTraffic] = {}
        if any(self._is_spare(one) for one in made):
            traffic = await anyio.to_thread.run_sync(self._observed, route.id)
        nothing = ObservedTraffic(calls=0, exec_s=0.0, seconds=1.0)
        for one in made:
            if self._is_spare(one) or one.spec.scaling.schedules:
                seen = traffic.get(one.revision, nothing) if self._is_spare(one) else nothing
                scheduled = self._scheduled_floor(one)
                await self._write(one, floor_of(one.spec.scaling, seen, scheduled=scheduled))

    def _scheduled_floor(self, made: RevisionOf) -> int:
        now, known = self._wall(), self._scheduled.get(made.key)
        if known is None or not known.is_valid(now):
            known = self._scheduled[made.key] = floor_at(made.spec.scaling.schedules, now)
        return known.min_instances

    def _is_spare(self, made: RevisionOf) -> bool:
        return self._counts_spare and bool(made.spec.scaling.buffer_instances)

    def _observed(self, function: str) -> Mapping[str, ObservedTraffic]:
        """Traffic of the function's revisions, without copies for a shadow."""
        now = self._wall()
        since_s = (now // 60 - (ACTIVE_MINUTES - 1)) * 60
        with self._store.read() as sql:
            counted = observations.window(
                sql, function_id=function, since_s=since_s, until_s=now + 60
            )
        found: dict[str, ObservedTraffic] = {}
        for (revision, arm), one in counted.items():
            if arm == SHADOW_ARM:
                continue
            new = ObservedTraffic.of(one, seconds=max(1.0, now - since_s))
            old = found.get(revision)
            found[revision] = (
                new
                if old is None
                else ObservedTraffic(
                    calls=old.calls + new.calls,
                    exec_s=old.exec_s + new.exec_s,
                    seconds=new.seconds,
                )
            )
        return found

    async def _write(self, made: RevisionOf, floor: int) -> None:
        if self._known.get(made.key) == floor:
            return
        namespace = made.tenancy.namespace
        live = await self._cluster.get(REVISION, made.name, namespace)
        if live is None or not self._may_write():
            return
        there = (live["metadata"].get("annotations") or {}).get(MIN_SCALE, "0")
        if there == str(floor):
            self._known[made.key] = floor
            return
        body = {"metadata": {"annotations": {MIN_SCALE: str(floor)}}}
        try:
            await self._cluster.patch(REVISION, made.name, namespace, body)
        except NotFound:
            return
        self._known[made.key] = floor
        self.writes += 1
        log.info("event=floor_written revision=%s from=%s to=%d", made.key, there, floor)
