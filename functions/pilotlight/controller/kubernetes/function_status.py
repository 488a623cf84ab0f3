"""How far each function is in the cluster: what the deployer waits for and is told."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pilotlight.kubernetes.errors import ClusterError, Invalid, ManifestWarned


class Phase(enum.StrEnum):
    """READY: as wanted, and Knative says it can be called. PENDING: on its way. FAILED: it will not
    be, until somebody acts."""

    READY = "ready"
    PENDING = "pending"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionStatus:
    """One function in the cluster.

    Attributes:
        reason: one word: Knative's (`RevisionMissing`, `ImagePullBackOff`, …), the API server's, or
        ours; "" when READY. message: what happened, to what, and what to do. generation: of the
        traffic document that it is about. revision: the newest revision that it is about. since:
        wall clock, seconds since the epoch, of the last change of phase or reason.
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
    """The status of every function, by its id. Written by the reconciler, in the event loop; read
    by requests, from threads too.

    No lock: a dictionary of frozen records, replaced one at a time.
    """

    def __init__(self) -> None:
        self._known: dict[str, FunctionStatus] = {}
        self.is_kept = False
        """Whether a reconciler runs in this process: without one nothing is known of any
        function."""

    def __repr__(self) -> str:
        phases = [status.phase for status in self._known.values()]
        return (
            f"<FunctionStatuses {', '.join(f'{phases.count(phase)} {phase}' for phase in Phase)}>"
        )

    def get(self, function: str) -> FunctionStatus | None:
        """What is known; None where there is no cluster."""
        return self._known.get(
            function,
            FunctionStatus(phase=Phase.PENDING, reason="NotSeen") if self.is_kept else None,
        )

    def set(self, function: str, status: FunctionStatus, *, now: float) -> None:
        """A function's newest status; `since` stays while phase and reason do."""
        known = self._known.get(function)
        is_same = known is not None and (known.phase, known.reason) == (status.phase, status.reason)
        self._known[function] = replace(
            status, since=known.since if known is not None and is_same else now
        )

    def drop(self, function: str) -> None:
        """The function is gone."""
        self._known.pop(function, None)

    def known(self) -> Mapping[str, FunctionStatus]:
        """All of them, by id."""
        return dict(self._known)

    def counts(self) -> Mapping[str, int]:
        """Functions by phase."""
        phases = [status.phase for status in self._known.values()]
        return {str(phase): phases.count(phase) for phase in Phase}


_PASSES = frozenset({"NamespaceEnding", "NotLeading", "ClusterUnreachable", "Overloaded"})
"""What passes by itself is no failure."""


def status_from_error(error: ClusterError) -> FunctionStatus:
    """What a refusal of the cluster means for a function."""
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
