"""What a judgement is made from, and what it is."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pilotlight.controller.rollouts.sequential_tests import Sample
from pilotlight.spec.observations import Observation


class RolloutState(enum.StrEnum):
    """Of a rollout. RUNNING and PAUSED go on; the others are its end."""

    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    ROLLED_BACK = "rolled_back"
    HALTED = "halted"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"


ACTIVE = (RolloutState.RUNNING.value, RolloutState.PAUSED.value)


class Verdict(enum.StrEnum):
    """HALT: both versions are bad, traffic stays with stable and somebody is told. DONE: the
    candidate is the new stable."""

    ADVANCE = "advance"
    HOLD = "hold"
    ROLLBACK = "rollback"
    HALT = "halt"
    DONE = "done"


class GateOutcome(enum.StrEnum):
    """Of a gate. NO_DATA and UNCLEAR hold: neither is ever a pass."""

    PASS = "pass"
    FAIL = "fail"
    UNCLEAR = "unclear"
    NO_DATA = "no_data"


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionEvidence:
    """What was seen of one revision.

    Attributes:
        step: since the step began.
        recent: in the last five minutes, and since this rollout began.
        hour: in the last hour, and since this rollout began.
        feedback: metric → what callers said of its calls since the step began.
        price: of a second of one whole instance, in money; 0 = not known.
    """

    step: Observation
    recent: Observation
    hour: Observation
    feedback: Mapping[str, Sample] = field(default_factory=dict)
    price: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatus:
    """Where a rollout is.

    Attributes:
        step: index into the plan's steps.
        step_began_at: seconds since the epoch, by the controller's clock.
        is_told: that this step does not get on was told.
    """

    step: int
    step_began_at: float
    is_paused: bool = False
    is_told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """What one gate found. Numbers in the metric's unit; None = there is none.

    Attributes:
        limit: what the candidate may be at most (at least, where more is better).
        samples: calls, or words of feedback, that the candidate's number rests on.
    """

    metric: str
    kind: str
    outcome: GateOutcome
    candidate: float | None
    stable: float | None
    limit: float | None
    samples: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be done, and why.

    Attributes:
        cause: a word for programs: `gate`, `crash_loop`, `schema`, `burn_rate`, `both_bad`,
        `no_traffic`, `metrics_missing`, `samples`,
            `unclear`, `time`, `paused`, `passed`.
        weight: percent of the traffic that the candidate shall have; None: as it is.
        tell: somebody should know, though nothing is changed.
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
        """In words, as it is stored."""
        return "tell" if self.tell else "none" if self.weight is None else f"weight {self.weight}"

    @property
    def signature(self) -> str:
        """Equal for decisions that say the same with other numbers: what is stored is what is
        new."""
        return " ".join(
            [
                self.verdict,
                self.cause,
                self.action,
                *(f"{gate.metric}={gate.outcome}" for gate in self.gates),
            ]
        )
