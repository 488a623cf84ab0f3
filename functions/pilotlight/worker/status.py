"""The status of an instance, served at WORKER_STATUS: its id, how it started, and the durations of
the start's phases."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pilotlight.worker.process.shim_channel import ShimOrder
from pilotlight.worker.snapshot.quiesce import FROZEN_VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus:
    """Status of an instance, created when it wakes.

    Attributes:
        instance: its id; in a cluster the name of its pod.
        start_kind: `COLD`, `IMPORT`, `FORK` or `RESTORE` (`snapshotter.types.StartKind`).
        before_ms, own_ms: the phases of its start, in order: before the instance was ordered, and
            since; the latter grow until it is ready.
    """

    instance: str = ""
    start_kind: str = ""
    before_ms: Mapping[str, float] = field(default_factory=dict)
    own_ms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        order: ShimOrder,
        *,
        booted_ms: Mapping[str, float],
        woken_ms: Mapping[str, float],
        booted: str = "COLD",
    ) -> Self:
        """The status of an order's instance. `booted_ms`: phases until the snapshot point, which
        only COLD and IMPORT include; `woken_ms`: phases since the order. `booted`: COLD or IMPORT.

        A launcher that starts exactly one worker passes the earlier phases itself; a slot's shim
        does not."""
        if order.start:
            return cls(
                instance=order.instance,
                start_kind=str(order.start["kind"]),
                before_ms=order.start["phases_ms"],
                own_ms=woken_ms,
            )
        if order.op != "serve":
            return cls(instance=order.instance, start_kind="FORK", own_ms=woken_ms)
        if FROZEN_VARIABLE in os.environ:
            return cls(instance=order.instance, start_kind="RESTORE", own_ms=woken_ms)
        return cls(instance=order.instance, start_kind=booted, before_ms=booted_ms, own_ms=woken_ms)

    def as_json(self, *, running: int) -> bytes:
        """The response body. `running`: number of running calls."""
        body: dict[str, Any] = {
            "instance": self.instance,
            "running": running,
            "start_kind": self.start_kind,
        }
        return json.dumps({**body, "phases_ms": {**self.before_ms, **self.own_ms}}).encode()
