"""What an instance says of itself to whoever asks at WORKER_STATUS: who it is, how it came up, and
what that took."""

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
    """Made when the instance wakes.

    Attributes:
        instance: its id; in a cluster the name of its pod. start_kind: `COLD`, `FORK` or `RESTORE`
        (`snapshotter.types.StartKind`). before_ms, own_ms: the parts of its start, in order: before
        the instance was ordered, and since; the latter grow until it is ready.
    """

    instance: str = ""
    start_kind: str = ""
    before_ms: Mapping[str, float] = field(default_factory=dict)
    own_ms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, order: ShimOrder, *, booted_ms: Mapping[str, float], woken_ms: Mapping[str, float]
    ) -> Self:
        """The instance of an order. `booted_ms`: until the snapshot point, which is part of a COLD
        start only; `woken_ms`: since the order.

        A launcher that starts exactly one worker says itself what came before; a slot's shim has no
        part in it."""
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
        return cls(instance=order.instance, start_kind="COLD", before_ms=booted_ms, own_ms=woken_ms)

    def as_json(self, *, running: int) -> bytes:
        """The answer's body. `running`: calls at this moment."""
        body: dict[str, Any] = {
            "instance": self.instance,
            "running": running,
            "start_kind": self.start_kind,
        }
        return json.dumps({**body, "phases_ms": {**self.before_ms, **self.own_ms}}).encode()
