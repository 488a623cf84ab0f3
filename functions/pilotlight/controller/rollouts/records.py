"""Records of a rollout: its state, the evidence of its revisions and the decision made from it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from pilotlight.controller.database.tables.releases import ACTIVE_ROLLOUT_STATES
from pilotlight.controller.statistics.sequential_tests import Sample
from pilotlight.core.json_record import JsonRecord
from pilotlight.spec.observations import Observation
from pilotlight.spec.sketches import Sketch


class RolloutState(enum.StrEnum):
    """State of a rollout. RUNNING and PAUSED are active; the others are final."""

    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    ROLLED_BACK = "rolled_back"
    HALTED = "halted"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"


ACTIVE = ACTIVE_ROLLOUT_STATES


class Verdict(enum.StrEnum):
    """Result of a decision. HALT: both revisions are bad; traffic stays with stable and a
    notification is sent. DONE: the candidate is the new stable revision."""

    ADVANCE = "advance"
    HOLD = "hold"
    ROLLBACK = "rollback"
    HALT = "halt"
    DONE = "done"


class GateOutcome(enum.StrEnum):
    """Result of a gate. NO_DATA and UNCLEAR hold the rollout: neither counts as a pass."""

    PASS = "pass"
    FAIL = "fail"
    UNCLEAR = "unclear"
    NO_DATA = "no_data"


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionEvidence:
    """Observations of one revision.

    Attributes:
        step: since the step began.
        recent: in the last five minutes, but not before this rollout began.
        hour: in the last hour, but not before this rollout began.
        feedback: metric → feedback of callers on its calls since the step began.
        price: of one second of one whole instance, in money; 0 = unknown.
        quality: measure → predictions of calls since the rollout began, against feedback.
        predictions: what it predicted since the hour in which the rollout began; None = nothing is
            watched.
    """

    step: Observation
    recent: Observation
    hour: Observation
    feedback: Mapping[str, Sample] = field(default_factory=dict)
    price: float = 0.0
    quality: Mapping[str, Sample] = field(default_factory=dict)
    predictions: Sketch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatus:
    """Current position of a rollout.

    Attributes:
        step: index into the plan's steps.
        step_began_at: seconds since the epoch, by the controller's clock.
        is_told: a notification that this step is stalled was sent.
    """

    step: int
    step_began_at: float
    is_paused: bool = False
    is_told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult(JsonRecord):
    """Result of one gate. Numbers are in the metric's unit; None = not available.

    Attributes:
        limit: maximum for the candidate (minimum, where higher is better).
        samples: number of calls or feedback values behind the candidate's number.
    """

    metric: str
    kind: str
    outcome: GateOutcome
    candidate: float | None
    stable: float | None
    limit: float | None
    samples: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The action to take on a rollout, and the reasons for it.

    Attributes:
        cause: machine-readable reason: `gate`, `crash_loop`, `schema`, `burn_rate`, `both_bad`,
            `no_traffic`, `metrics_missing`, `samples`, `unclear`, `time`, `paused`, `passed`.
        weight: percent of the traffic for the candidate; None = unchanged.
        tell: send a notification although nothing changes.
        reasons: sentences with numbers.
    """

    verdict: Verdict
    cause: str
    reasons: tuple[str, ...]
    weight: int | None = None
    tell: bool = False
    gates: tuple[GateResult, ...] = ()

    @property
    def action(self) -> str:
        """The action as text, as it is stored."""
        return "tell" if self.tell else "none" if self.weight is None else f"weight {self.weight}"

    @property
    def signature(self) -> str:
        """Equal for decisions that differ only in numbers, which are not stored each time."""
        return " ".join(
            [
                self.verdict,
                self.cause,
                self.action,
                *(f"{gate.metric}={gate.outcome}" for gate in self.gates),
            ]
        )
