"""Snapshots that nobody asked for: after a COLD start of a revision that has none, behind the
caller's back.

At most so many per hour (after an upgrade every revision misses at once, and a node has calls to
answer), one at a time, a moment after the start that wanted it. The bucket refills evenly; what
finds it empty is not queued: the next COLD start wants it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter.errors import SnapshotRefused, SnapshotterError
from snapshotter.slots.slot import SlotConnectionLost
from snapshotter.types import LaunchSpec, RevisionKey

_log = logging.getLogger(__name__)
DELAY_S = 1.0
"""The first call of the instance that just came up has the processor to itself."""
_HOUR_S = 3600.0
_PAUSE_S = 600.0
"""After one that failed for a reason that may pass (a full disk): not with every COLD start."""


class SnapshotMaker(Protocol):
    """What makes snapshots (`checkpoints.Checkpoints`)."""

    def refused(self, revision: RevisionKey) -> SnapshotRefused | None: ...

    async def make(self, launch: LaunchSpec, *, unasked: bool = False) -> object: ...

    async def aclose(self) -> None: ...


class BackgroundBuilder:
    """Owner: the event loop. `checkpoints` None: snapshots are off, and nothing is ever wanted."""

    def __init__(
        self,
        checkpoints: SnapshotMaker | None,
        *,
        background_tasks: BackgroundTasks,
        per_hour: int,
        delay_s: float = DELAY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoints = checkpoints
        self._background_tasks = background_tasks
        self._per_hour = per_hour
        self._delay_s = delay_s
        self._clock = clock
        self._tokens, self._counted_at = float(per_hour), clock()
        self._wanted: set[RevisionKey] = set()
        self._not_before: dict[RevisionKey, float] = {}
        self._one = asyncio.Lock()
        self._closing = asyncio.Event()

    def __repr__(self) -> str:
        return f"<BackgroundBuilder {len(self._wanted)} wanted, {int(self._tokens)} left this hour>"

    def want(self, launch: LaunchSpec) -> bool:
        """Have one made soon; False when it is not worth it or may not be now."""
        checkpoints = self._checkpoints
        if (
            checkpoints is None
            or not launch.snapshot
            or self._closing.is_set()
            or launch.revision in self._wanted
        ):
            return False
        if (
            checkpoints.refused(launch.revision) is not None
            or self._not_before.get(launch.revision, 0.0) > self._clock()
        ):
            return False
        self._not_before.pop(launch.revision, None)
        if not self._spend():
            return False
        self._wanted.add(launch.revision)
        self._background_tasks.run(
            self._build(checkpoints, launch), f"build snapshot {launch.revision}"
        )
        return True

    async def aclose(self) -> None:
        """Nothing is begun any more; what is being made is ended."""
        self._closing.set()
        if self._checkpoints is not None:
            await self._checkpoints.aclose()

    def _spend(self) -> bool:
        now = self._clock()
        self._tokens = min(
            float(self._per_hour),
            self._tokens + (now - self._counted_at) * self._per_hour / _HOUR_S,
        )
        self._counted_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    async def _build(self, checkpoints: SnapshotMaker, launch: LaunchSpec) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._delay_s)
                return
            async with self._one:
                if not self._closing.is_set():
                    await checkpoints.make(launch, unasked=True)
        except (SnapshotterError, SlotConnectionLost) as e:
            if not _is_template_gone(e):
                self._not_before[launch.revision] = self._clock() + _PAUSE_S
            _log.info("snapshot.not_built revision=%s error=%s", launch.revision, e)
        except asyncio.CancelledError:
            if not self._closing.is_set():
                raise
        finally:
            self._wanted.discard(launch.revision)


def _is_template_gone(error: Exception) -> bool:
    """Whether it was only too late: the Template was dropped while others were built, and the next
    COLD start makes another one."""
    reasons = error.detail.get("reasons", ()) if isinstance(error, SnapshotRefused) else ()
    return any(reason["kind"] == "template_gone" for reason in reasons)
