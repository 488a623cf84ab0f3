"""Makes the next starts of a revision fast: what `POST …:warmup` does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from activator.balancing.fleet import Fleet
from activator.balancing.instance_lifecycle import start_error_for_caller
from activator.balancing.throttler import Throttler
from activator.routing.call_target import CallTarget
from snapshotter import errors as agent_errors
from snapshotter.types import SnapshotState

log = logging.getLogger(__name__)


def _ignore(_stage: str) -> None:
    """Default of `stage`: do nothing."""


class WarmUp:
    """Warms up revisions. Owner: the event loop."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        throttler_of: Callable[[CallTarget], Throttler],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._throttler_of = throttler_of
        self._clock = clock

    async def run(
        self, target: CallTarget, stage: Callable[[str], None] = _ignore, *, snapshot: bool = True
    ) -> Mapping[str, Any]:
        """Make a revision's next starts fast: a Template, a proven snapshot, and one running
        instance. With `snapshot` False only the instance, as soon as possible: what else its start
        leads to follows in the background.

        The snapshot is made of a Template before an instance runs beside it; otherwise a worker
        would be booted only for it. `stage` is called with `template`, `snapshot`, `instance` as
        they begin; without a Template `snapshot` is the last. Reasons against a snapshot are part
        of the report, and no failure: FORK and COLD remain. Raises like `Throttler.reserve`.
        Concurrent warm-ups share one on the node."""
        began = self._clock()
        report: dict[str, Any] = {"revision": target.revision}
        if snapshot and target.launch.forkable and self._fleet.has_templates:
            stage("template")
            try:
                template = await self._fleet.prepare(target)
            except agent_errors.SnapshotterError as e:
                raise start_error_for_caller(target, e) from e
            report["template"] = template.to_json()
            report["prepare_ms"] = (self._clock() - began) * 1000
            report["snapshot"] = await self._checkpoint(target, stage)
        stage("instance")
        reservation = await self._throttler_of(target).reserve(target.spec.clocks.startup_s)
        info = reservation.instance.info
        report |= {
            "start_kind": info.start_kind.value,
            "phases_ms": dict(info.phases_ms),
            "start_ms": reservation.start_ms,
            "instance": info.id,
        }
        reservation.release_unused()
        if snapshot and "snapshot" not in report:
            report["snapshot"] = await self._checkpoint(target, stage)
        return report

    async def _checkpoint(
        self, target: CallTarget, stage: Callable[[str], None]
    ) -> Mapping[str, Any]:
        """Make a snapshot. Returns `SnapshotInfo`, or `{"refused": [reasons]}`, `{"off": why}`,
        `{"failed": message}`."""
        if not target.spec.snapshot:
            return {"off": "the function sets snapshot=False"}
        if not target.launch.snapshot:
            return {
                "off": f"switched off: `pilotlight snapshot enable "
                f"{target.app}/{target.function}` allows it again"
            }
        stage("snapshot")
        try:
            info = await self._fleet.checkpoint(target)
        except agent_errors.SnapshotRefused as e:
            return {
                "refused": list(
                    e.detail.get("reasons")
                    or [{"kind": "other", "what": "", "where": None, "message": str(e)}]
                )
            }
        except agent_errors.Unsupported as e:
            return {"off": str(e)}
        except agent_errors.SnapshotterError as e:
            log.warning("no snapshot target=%r code=%s error=%s", target, e.code, e)
            return {"failed": str(e)}
        if info.state is SnapshotState.READY:
            self._throttler_of(target).start_times.snapshot_proven(info.restore_ms / 1000)
        return info.to_json()
