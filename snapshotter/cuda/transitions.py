"""The states of a process's CUDA side, the four actions between them, and the way back from every
failure: tables, no I/O.

    running --lock--> locked --checkpoint--> checkpointed  (CRIU dump, CRIU restore)  checkpointed
    --restore--> locked --unlock--> running

`failed` is terminal: nothing leads out of it. The names are the driver's own (CUDA driver API,
"CUDA Checkpointing").

Invariants: an action that is not in TRANSITIONS for a state is never asked of the driver; every
pair of a failed step and a state that the driver may report then has exactly one edge in ROLLBACK,
and an edge ends in `running` or in a kill."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class CudaState(enum.StrEnum):
    """What the driver says about a process."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


class Action(enum.StrEnum):
    """What can be asked of the driver."""

    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    UNLOCK = "unlock"


class Step(enum.StrEnum):
    """Where a journey can fail: the four actions, and what happens between them."""

    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RELEASE = "release"
    """The process is checkpointed, and must hold no device any more."""
    DUMP = "dump"
    """CRIU's part."""
    RESTORE = "restore"
    UNLOCK = "unlock"


TRANSITIONS: Mapping[tuple[CudaState, Action], CudaState] = {
    (CudaState.RUNNING, Action.LOCK): CudaState.LOCKED,
    (CudaState.LOCKED, Action.CHECKPOINT): CudaState.CHECKPOINTED,
    (CudaState.CHECKPOINTED, Action.RESTORE): CudaState.LOCKED,
    (CudaState.LOCKED, Action.UNLOCK): CudaState.RUNNING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """A way back.

    Attributes:
        name: how errors and logs call it.
        actions: what leads to `running`; empty when the process is there already.
        kill: the process is lost: no action leads anywhere.
    """

    name: str
    actions: tuple[Action, ...] = ()
    kill: bool = False

    def __post_init__(self) -> None:
        if self.kill and self.actions:
            raise ValueError(f"edge {self.name} both acts and kills")


STAY = Rollback(name="stay")
UNLOCK = Rollback(name="unlock", actions=(Action.UNLOCK,))
RESTORE_UNLOCK = Rollback(name="restore+unlock", actions=(Action.RESTORE, Action.UNLOCK))
KILL = Rollback(name="kill", kill=True)

_HOME: Mapping[CudaState, Rollback] = {
    CudaState.RUNNING: STAY,
    CudaState.LOCKED: UNLOCK,
    CudaState.CHECKPOINTED: RESTORE_UNLOCK,
    CudaState.FAILED: KILL,
}
_ON_THE_WAY_OUT = (Step.LOCK, Step.CHECKPOINT, Step.RELEASE, Step.DUMP)
_ON_THE_WAY_BACK = (Step.RESTORE, Step.UNLOCK)

ROLLBACK: Mapping[tuple[Step, CudaState], Rollback] = {
    # Until the dump has succeeded, the process is worth keeping: home from wherever it stands. An
    # action that overran may have been done after all, and a tree has processes ahead of and behind
    # the one that failed, so that the state decides, not the step.
    **{(step, state): edge for step in _ON_THE_WAY_OUT for state, edge in _HOME.items()},
    # After the images were read there is nothing to go back to: half of a device is no process.
    # Another restore is.
    **{(step, state): KILL for step in _ON_THE_WAY_BACK for state in CudaState},
}


def after(state: CudaState, action: Action) -> CudaState:
    """The state that `action` leads to; ValueError when there is no such edge."""
    try:
        return TRANSITIONS[state, action]
    except KeyError:
        raise ValueError(f"a process that is {state} cannot be asked to {action}") from None


def rollback_path(step: Step, state: CudaState | None) -> Rollback:
    """The edge taken when `step` failed and the driver then reports `state`; None: it did not say,
    and the process is lost."""
    return KILL if state is None else ROLLBACK[step, state]
