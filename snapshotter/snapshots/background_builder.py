"""Automatic snapshots, built in the background after a COLD start of a revision that has none.

At most so many per hour (after an upgrade every revision misses at once, and the node must also
answer calls), one at a time, shortly after the start. The token bucket refills evenly; a request
that finds it empty is not queued: the next COLD start makes another one. A failure that may be
temporary is tried again after each of `RETRY_S`, from the same bucket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter.errors import SnapshotRefused, SnapshotterError
from snapshotter.slots.replies import SlotConnectionLost
from snapshotter.types import LaunchSpec, RevisionKey

_log = logging.getLogger(__name__)
DELAY_S = 1.0
"""The first call of the new instance has the processor to itself."""
_HOUR_S = 3600.0
RETRY_S = (30.0, 120.0)
"""Pauses before a failure with a possibly temporary cause (a full disk) is tried again."""
_PAUSE_S = 600.0
"""Pause after the last of them, so that not every COLD start retries."""


class SnapshotMaker(Protocol):
    """Creates snapshots (`checkpoints.Checkpoints`)."""

    def refused(self, revision: RevisionKey) -> SnapshotRefused | None: ...

    async def make(self, launch: LaunchSpec, *, unasked: bool = False) -> object: ...

    async def aclose(self) -> None: ...


class BackgroundBuilder:
    """Builds snapshots in the background. Owner: the event loop. `checkpoints` None: snapshots are
    off."""

    def __init__(
        self,
        checkpoints: SnapshotMaker | None,
        *,
        background_tasks: BackgroundTasks,
        per_hour: int,
        delay_s: float = DELAY_S,
        retry_s: Sequence[float] = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoints = checkpoints
        self._background_tasks = background_tasks
        self._per_hour = per_hour
        self._delay_s = delay_s
        self._retry_s = tuple(retry_s)
        self._clock = clock
        self._tokens, self._counted_at = float(per_hour), clock()
        self._wanted: set[RevisionKey] = set()
        self._not_before: dict[RevisionKey, float] = {}
        self._one = asyncio.Lock()
        self._closing = asyncio.Event()

    def __repr__(self) -> str:
        return f"<BackgroundBuilder {len(self._wanted)} wanted, {int(self._tokens)} left this hour>"

    def want(self, launch: LaunchSpec) -> bool:
        """Request a snapshot; False if it is unnecessary or not allowed now."""
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
        if not self.spend():
            return False
        self._wanted.add(launch.revision)
        self._background_tasks.run(
            self._build(checkpoints, launch), f"build snapshot {launch.revision}"
        )
        return True

    async def aclose(self) -> None:
        """Start no more builds and stop the running one."""
        self._closing.set()
        if self._checkpoints is not None:
            await self._checkpoints.aclose()

    def spend(self) -> bool:
        """Take a build from this hour's budget; False if it is used up."""
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

    def forget(self, *, revision: str | None, function: str | None) -> None:
        """Drop the requests of a revision, or of a function id (the part of a revision's key before
        `@`), that have not begun."""
        self._wanted -= {
            key
            for key in self._wanted
            if key == revision or (function is not None and key.partition("@")[0] == function)
        }

    async def _build(self, checkpoints: SnapshotMaker, launch: LaunchSpec) -> None:
        try:
            if not await self._may_begin(launch, self._delay_s):
                return
            for pause_s in self._retry_s:
                if not await self._is_to_be_retried(checkpoints, launch):
                    return
                if not await self._may_begin(launch, pause_s) or not self.spend():
                    return
            await self._is_to_be_retried(checkpoints, launch)
        except asyncio.CancelledError:
            if not self._closing.is_set():
                raise
        finally:
            self._wanted.discard(launch.revision)

    async def _may_begin(self, launch: LaunchSpec, pause_s: float) -> bool:
        """Wait `pause_s`; False if the snapshot is not to be made then."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), pause_s)
        return not self._closing.is_set() and launch.revision in self._wanted

    async def _is_to_be_retried(self, checkpoints: SnapshotMaker, launch: LaunchSpec) -> bool:
        """Make the snapshot; True if that failed for a cause that may be temporary."""
        try:
            async with self._one:
                if not self._closing.is_set():
                    await checkpoints.make(launch, unasked=True)
        except (SnapshotterError, SlotConnectionLost) as e:
            _log.info("snapshot.not_built revision=%s error=%s", launch.revision, e)
            if _is_template_gone(e):
                return False
            self._not_before[launch.revision] = self._clock() + _PAUSE_S
            if checkpoints.refused(launch.revision) is not None:
                return False
            return isinstance(e, SnapshotRefused) and bool(e.detail.get("passing"))
        self._not_before.pop(launch.revision, None)
        return False


def _is_template_gone(error: Exception) -> bool:
    """Whether the request was only too late: the Template was dropped while others were built, and
    the next COLD start creates another one."""
    reasons = error.detail.get("reasons", ()) if isinstance(error, SnapshotRefused) else ()
    return any(reason["kind"] == "template_gone" for reason in reasons)
