"""An occupied slot: what was launched in it, and the resources to release; and the progress of the
start that occupies it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshotter.criu.lazy import LazyPages
from snapshotter.linux import proc
from snapshotter.linux.cgroups import Group
from snapshotter.shim import cpu_priority
from snapshotter.slots.boot_limiter import NO_SHARE
from snapshotter.slots.pausable_deadline import PausableDeadline
from snapshotter.slots.slot import Slot
from snapshotter.slots.weights import Served
from snapshotter.types import GpuGrant, LaunchSpec, StartKind, TenantShare

RECORD = "housing.json"
"""File in a slot's directory with what an agent that restarts needs (`OccupiedSlot.record`)."""
_FORKING_NS = 50_000_000
"""CPU time that a Template may use between two starts and that the platform bears: forks and parked
forks cost some ms each."""


@dataclass(frozen=True, kw_only=True)
class ParkedSpot:
    """A parked fork: its name, and the group of its future instance."""

    name: str
    group: Group


@dataclass(kw_only=True, eq=False)
class OccupiedSlot:
    """One slot, what was launched in it, and the resources to release. Owner: the event loop.

    Attributes:
        boot_ms: phases until the snapshot point, `slot` first.
        took_ms: their total by wall clock, without the time spent waiting for weights or other
            boots.
        is_booting: before the snapshot point, during which the booting task clears the slot.
        transient: made only for a snapshot: its creator clears it, or a new agent that finds it.
        snapshot: the snapshot that it was restored from, None if it was booted.
        whole: restored as a process tree, and cannot be forked.
        pages: the page server that still brings its memory; None without. Until it has exited each
            fork has what is missing brought once more.
        is_pristine: no instance has run in the slot. Instances share its files with the worker, and
            an instance that is the worker itself has secrets. Unknown for a slot of an earlier
            agent.
        lease_ids: its weight leases.
        environment: the environment snapshot that its worker was booted in, None if it was booted
            from nothing, or restored.
        gpus: its GPUs, which no other slot has until this one is cleared; None without. A worker of
            a launch with GPUs becomes the instance itself, so that an instance has the GPUs of its
            slot.
        weights: its weights by name, once they are on the node.
        volumes: directories of its volumes by mount path, as it boots.
        charged_ns: CPU time of its group that was already charged, or is not charged to anyone;
            None before it is a Template.
        has_low_priority: whether its CPU priority is below that of calls.
        priority_timer: timer of the next change of its CPU priority.
        cleared: set once nothing of it is left, and its GPUs are free.
        spots, parked_bytes, timer: parked forks, their PSS as last measured, and the timer of the
            next check; owned by `prefork_pool.PreforkPool`.
    """

    slot: Slot
    launch: LaunchSpec
    group: Group
    lease_ids: tuple[str, ...] = ()
    gpus: GpuGrant | None = None
    weights: Mapping[str, Served] = field(default_factory=dict)
    volumes: Mapping[str, Path] = field(default_factory=dict)
    boot_ms: Mapping[str, float] = field(default_factory=dict)
    took_ms: float = 0.0
    is_booting: bool = False
    transient: bool = False
    snapshot: str | None = None
    environment: str | None = None
    whole: bool = False
    pages: LazyPages | None = None
    is_pristine: bool = True
    charged_ns: int | None = None
    has_low_priority: bool = False
    priority_timer: asyncio.TimerHandle | None = None
    cleared: asyncio.Event = field(default_factory=asyncio.Event)
    spots: list[ParkedSpot] = field(default_factory=list)
    parked_bytes: int = 0
    timer: asyncio.TimerHandle | None = None

    @property
    def origin(self) -> str | None:
        """The snapshot that its process came from; None if it was booted from nothing."""
        return self.snapshot or self.environment

    @property
    def has_missing_pages(self) -> bool:
        """Whether some of its memory is still in its image only."""
        return self.pages is not None and not self.pages.exited.done()

    def lower_cpu_priority(self, steps: Sequence[tuple[float, float]]) -> None:
        """Lower its CPU priority in steps (`cpu_priority.BOOT`): each step is a duration in seconds
        and a fraction of its CPU share; the priority is restored after the last step.

        Needs a cpu cgroup; without one only a process booted with low priority is affected.
        """
        self.cancel_priority_timer()
        (seconds, part), *rest = steps
        self.has_low_priority = True
        self.group.weigh(part)
        loop = asyncio.get_running_loop()
        self.priority_timer = (
            loop.call_later(seconds, self.lower_cpu_priority, rest)
            if rest
            else loop.call_later(seconds, self.restore_cpu_priority)
        )

    def cpu_ns(self) -> int:
        """CPU time used here: of everything that was in the group, or of the worker without a group
        counter."""
        used = self.group.cpu_ns()
        return proc.cpu_ns(self.slot.worker_pid) if used is None else used

    def charge_idle_ns(self) -> int:
        """CPU time that a Template has used since its snapshot point or since the last call;
        charged to the next start from it. 0 without a group counter, and 0 up to the cost of
        forking."""
        used_ns = self.group.cpu_ns()
        if self.charged_ns is None or used_ns is None:
            return 0
        idle_ns, self.charged_ns = used_ns - self.charged_ns, used_ns
        return idle_ns if idle_ns > _FORKING_NS else 0

    def restore_cpu_priority(self) -> None:
        """Restore its full CPU share."""
        self.cancel_priority_timer()
        if not self.has_low_priority:
            return
        self.has_low_priority = False
        if self.group.has_cpu_group:
            self.group.weigh(1)
        elif self.slot.worker_pid and not (
            self.slot.worker == "dead" or self.slot.is_lost or self.slot.is_ending
        ):
            cpu_priority.restore(self.slot.worker_pid)

    def cancel_priority_timer(self) -> None:
        """Cancel the timer; the priority remains as it is."""
        if self.priority_timer is not None:
            self.priority_timer.cancel()
            self.priority_timer = None

    def record(self) -> dict[str, Any]:
        """State for a restarted agent."""
        held = {
            "group": self.group.to_json(),
            "lease_ids": list(self.lease_ids),
            "gpus": self.gpus.to_json() if self.gpus is not None else None,
            "transient": self.transient,
            "snapshot": self.snapshot,
            "environment": self.environment,
            "whole": self.whole,
        }
        return {
            "launch": self.launch.to_json(),
            "boot_ms": dict(self.boot_ms),
            "took_ms": self.took_ms,
            **held,
        }

    @classmethod
    def of(cls, slot: Slot) -> OccupiedSlot | None:
        """Load the state of a slot of an earlier agent; None if nothing was launched in it. Raises
        ValueError, LookupError or TypeError if it is of another version."""
        try:
            body = json.loads((slot.directory / RECORD).read_text())
        except (FileNotFoundError, ValueError):
            return None
        launch = LaunchSpec.from_json(body["launch"])
        if launch.gpu and not body.get("gpus"):
            raise ValueError(f"slot {slot.id}: an earlier version did not record its GPUs")
        return cls(
            slot=slot,
            launch=launch,
            group=Group.from_json(body["group"]),
            lease_ids=tuple(body["lease_ids"]),
            gpus=GpuGrant.from_json(body["gpus"]) if body.get("gpus") else None,
            boot_ms=body["boot_ms"],
            took_ms=body.get("took_ms", 0.0),
            transient=body.get("transient", False),
            snapshot=body.get("snapshot"),
            environment=body.get("environment"),
            whole=body.get("whole", False),
            is_pristine=False,
            has_low_priority=True,
        )


@dataclass
class StartPhase:
    """Progress of a start, for the message of a timeout; `subject` is the slot, once there is one.

    Attributes:
        kind: the current strategy.
        before_ms: phases that preceded the slot.
        patience: deadline of the strategy.
        is_background: it gets CPU time only when no call and no other start needs it.
        share: tenant share for limited resources.
        gpus: the GPUs of its slot; None without.
        cpu_ns: CPU time of boots that this start caused, failed ones included. Failed restores are
            excluded: the platform chose to try them.
        attempt_ns: returns the CPU time of the current attempt, once a worker exists.
    """

    name: str = "slot"
    subject: str = ""
    kind: StartKind = StartKind.COLD
    before_ms: dict[str, float] = field(default_factory=dict)
    patience: PausableDeadline = field(default_factory=PausableDeadline)
    is_background: bool = False
    share: TenantShare = NO_SHARE
    gpus: GpuGrant | None = None
    cpu_ns: int = 0
    attempt_ns: Callable[[], int] = int

    def count_failed(self, occupied: OccupiedSlot) -> None:
        """Add the CPU time of a failed boot, before its group is removed."""
        if self.kind is StartKind.COLD:
            self.cpu_ns += occupied.cpu_ns()
