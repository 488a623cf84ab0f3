"""Waiting calls with the same batch key, and the measured costs of their method."""

from __future__ import annotations

import math

from pilotlight.sdk.batches import BatchLists
from pilotlight.spec.policies import BatchPolicy
from pilotlight.worker.batching.adaptive_wait import AdaptiveWait
from pilotlight.worker.batching.batch_key import BatchKey
from pilotlight.worker.batching.items import BatchItem
from pilotlight.worker.batching.latency_model import LatencyModel
from pilotlight.worker.batching.release_policy import BatchState
from pilotlight.worker.user_code.target import Method

AGEING_S = 1.0
"""A waiting group moves up one priority rank per this much time, so that low priorities do not
starve."""


class BatchedMethod:
    """A batched method with its measured costs."""

    __slots__ = ("costs", "lists", "method", "policy")

    def __init__(self, method: Method, policy: BatchPolicy) -> None:
        self.method = method
        self.policy = policy
        self.lists = BatchLists(method.call)
        self.costs: dict[int, LatencyModel] = {}

    def cost(self, bucket: int) -> LatencyModel:
        """The latency model of this bucket's batches."""
        return self.costs.setdefault(bucket, LatencyModel())


class BatchGroup:
    """Waiting calls with the same batch key.

    Attributes:
        silent_since: since when a lane is free and no call arrived; None while no lane is free.
        is_odd: whether its first call has a new key, while keys that differ only in shapes are
            known.
    """

    __slots__ = ("_deadline_at", "batched", "is_odd", "kind", "members", "patience", "silent_since")

    def __init__(
        self, kind: BatchKey, batched: BatchedMethod, patience: AdaptiveWait, *, is_odd: bool
    ) -> None:
        self.kind = kind
        self.batched = batched
        self.patience = patience
        self.is_odd = is_odd
        self.members: list[BatchItem] = []
        self.silent_since: float | None = None
        self._deadline_at = math.inf

    def __repr__(self) -> str:
        return f"<BatchGroup {self.kind} of {len(self.members)}>"

    def joined_by(self, member: BatchItem, now: float, *, is_free: bool) -> None:
        """Add a call."""
        if self.members:
            self.end_silence(now, came=True)
            self.is_odd = False
        self.members.append(member)
        self._deadline_at = min(self._deadline_at, member.ends_at)
        self.silent_since = now if is_free else None

    def left_by(self, member: BatchItem) -> None:
        """Remove a call."""
        self.members.remove(member)
        self._deadline_at = min((one.ends_at for one in self.members), default=math.inf)

    def take(self, now: float) -> tuple[BatchItem, ...]:
        """Remove and return the first calls, at most a batch of them."""
        self.end_silence(now, came=False)
        size = self.batched.policy.max_batch_size
        taken, self.members = tuple(self.members[:size]), self.members[size:]
        self._deadline_at = min((one.ends_at for one in self.members), default=math.inf)
        self.silent_since = now if self.members else None
        return taken

    def end_silence(self, now: float, *, came: bool) -> None:
        """Record the end of a silence: a call arrived, or the batch is released."""
        if self.silent_since is not None:
            self.patience.note(len(self.members), now - self.silent_since, came=came)
            self.silent_since = None

    def lose_lane(self, now: float) -> None:
        """Handle the loss of the free lane to other groups."""
        if self.silent_since is not None and now > self.silent_since:
            self.end_silence(now, came=False)
        self.silent_since = None

    def seen(self, now: float, *, free_s: float, can_grow: bool, is_draining: bool) -> BatchState:
        """The group's state, as input of `decide_release`."""
        line, size = self.batched.cost(self.kind.bucket).line, len(self.members)
        patient = line is not None and not self.is_odd
        return BatchState(
            size=size,
            oldest_at=self.members[0].came_at,
            held_s=free_s - self.members[0].free_s,
            silent_since=now if self.silent_since is None else self.silent_since,
            deadline_at=self._deadline_at,
            cost=line,
            patience_s=self.patience.seconds(size, line.fixed_s)
            if patient and line is not None
            else 0.0,
            can_grow=can_grow,
            is_draining=is_draining,
        )

    def urgency(self, now: float) -> tuple[int, float]:
        """Sort key of release, lowest first: by priority, then by age."""
        oldest_at = self.members[0].came_at
        return self.kind.rank - int((now - oldest_at) / AGEING_S), oldest_at
