"""The states of a process's CUDA side, the four actions between them, and the rollback after every
failure: tables, no I/O.

    running --lock--> locked --checkpoint--> checkpointed  (CRIU dump, CRIU restore)  checkpointed
    --restore--> locked --unlock--> running

`failed` is terminal. The names are the driver's own (CUDA driver API, "CUDA Checkpointing").

Invariants: the driver is never called with an action that is not in TRANSITIONS for the state;
every pair of a failed step and a state that the driver may report has exactly one rollback in
ROLLBACK, which ends in `running` or in a kill."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class CudaState(enum.StrEnum):
    """The driver's state of a process."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


class Action(enum.StrEnum):
    """An action of the driver."""

    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    UNLOCK = "unlock"


class Step(enum.StrEnum):
    """A step that can fail: the four actions, and the steps between them."""

    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RELEASE = "release"
    """The process is checkpointed, and must not have a device open."""
    DUMP = "dump"
    """CRIU's dump."""
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
    """A rollback.

    Attributes:
        name: its name in errors and logs.
        actions: the actions that lead to `running`; empty if the process is running.
        kill: the process is lost: no action leads to `running`.
    """

    name: str
    actions: tuple[Action, ...] = ()
    kill: bool = False

    def __post_init__(self) -> None:
        if self.kill and self.actions:
            raise ValueError(f"rollback {self.name} both acts and kills")


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
    # Until the dump has succeeded, roll the process back from any state. An action that timed out
    # may have been carried out, and the tree has processes ahead of and behind the failed one, so
    # the state decides, not the step.
    **{(step, state): edge for step in _ON_THE_WAY_OUT for state, edge in _HOME.items()},
    # After the images were read there is no state to roll back to: a process with a partially
    # restored device is useless. Another restore is possible.
    **{(step, state): KILL for step in _ON_THE_WAY_BACK for state in CudaState},
}


def after(state: CudaState, action: Action) -> CudaState:
    """The state that `action` leads to. Raises ValueError if it is not allowed in `state`."""
    try:
        return TRANSITIONS[state, action]
    except KeyError:
        raise ValueError(f"a process that is {state} cannot be asked to {action}") from None


def rollback_path(step: Step, state: CudaState | None) -> Rollback:
    """The rollback after `step` failed and the driver reports `state`; None: unknown, and the
    process is lost."""
    return KILL if state is None else ROLLBACK[step, state]
