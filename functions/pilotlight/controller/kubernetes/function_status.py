"""The rollout status of each function in the cluster, for which a deploy waits."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pilotlight.controller.kubernetes.ownership import ClusterOwnership
from pilotlight.kubernetes.errors import ClusterError, Invalid, ManifestWarned


class Phase(enum.StrEnum):
    """READY: as desired, and Knative reports that it can be called. PENDING: in progress. FAILED:
    it stays so until someone intervenes."""

    READY = "ready"
    PENDING = "pending"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionStatus:
    """Status of one function in the cluster.

    Attributes:
        reason: one word from Knative (`RevisionMissing`, `ImagePullBackOff`, …), the API server or
            this platform; "" when READY.
        message: what happened, to which object, and what to do.
        generation: of the traffic document that the status describes.
        revision: the newest revision that the status describes.
        since: wall clock, seconds since the epoch, of the last change of phase or reason.
    """

    phase: Phase
    reason: str = ""
    message: str = ""
    generation: int = 0
    revision: str = ""
    since: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "phase": str(self.phase)}


class FunctionStatuses:
    """The status of every function, by its id. Written by the reconciler in the event loop; read by
    requests, also from threads.

    No lock is needed: a dictionary of frozen records, replaced one at a time.
    """

    def __init__(self) -> None:
        self._known: dict[str, FunctionStatus] = {}
        self.is_kept = False
        """Whether a reconciler runs in this process; without one every status is unknown."""
        self.ownership: ClusterOwnership | None = None
        """Whose objects the leader found in the cluster; None before it looked."""

    def __repr__(self) -> str:
        phases = [status.phase for status in self._known.values()]
        return (
            f"<FunctionStatuses {', '.join(f'{phases.count(phase)} {phase}' for phase in Phase)}>"
        )

    def get(self, function: str) -> FunctionStatus | None:
        """Return the function's status; None without a cluster."""
        return self._known.get(
            function,
            FunctionStatus(phase=Phase.PENDING, reason="NotSeen") if self.is_kept else None,
        )

    def set(self, function: str, status: FunctionStatus, *, now: float) -> None:
        """Set a function's status; `since` stays while phase and reason do not change."""
        known = self._known.get(function)
        is_same = known is not None and (known.phase, known.reason) == (status.phase, status.reason)
        self._known[function] = replace(
            status, since=known.since if known is not None and is_same else now
        )

    def drop(self, function: str) -> None:
        """Delete the status of a deleted function."""
        self._known.pop(function, None)

    def known(self) -> Mapping[str, FunctionStatus]:
        """Return all statuses by function id."""
        return dict(self._known)

    def counts(self) -> Mapping[str, int]:
        """Number of functions by phase."""
        phases = [status.phase for status in self._known.values()]
        return {str(phase): phases.count(phase) for phase in Phase}


_PASSES = frozenset({"NamespaceEnding", "NotLeading", "ClusterUnreachable", "Overloaded"})
"""Errors that resolve without intervention; they are no failures."""


def status_from_error(error: ClusterError) -> FunctionStatus:
    """Convert a cluster error to the status of the function."""
    kind = type(error).__name__
    reason = "Refused" if isinstance(error, Invalid | ManifestWarned) else kind
    unsaid = (
        [problem for problem in error.problems if problem.message not in str(error)]
        if isinstance(error, Invalid)
        else []
    )
    message = "".join((str(error), *(f"\n  {problem}" for problem in unsaid)))
    return FunctionStatus(
        phase=Phase.PENDING if kind in _PASSES else Phase.FAILED, reason=reason, message=message
    )
