"""The tables are complete, and every way out of them ends in running or in a kill."""

from __future__ import annotations

import itertools

import pytest

from snapshotter.cuda.transitions import (
    KILL,
    ROLLBACK,
    TRANSITIONS,
    Action,
    CudaState,
    Rollback,
    Step,
    after,
    rollback_path,
)


def test_four_actions_go_round() -> None:
    state = CudaState.RUNNING
    for action in (Action.LOCK, Action.CHECKPOINT, Action.RESTORE, Action.UNLOCK):
        state = after(state, action)
    assert state is CudaState.RUNNING
    assert len(TRANSITIONS) == 4


def test_what_is_not_in_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="a process that is running cannot be asked to checkpoint"):
        after(CudaState.RUNNING, Action.CHECKPOINT)


def test_nothing_leads_out_of_failed() -> None:
    assert all(state is not CudaState.FAILED for state, _ in TRANSITIONS)


def test_every_failure_in_every_state_has_an_edge() -> None:
    assert set(ROLLBACK) == set(itertools.product(Step, CudaState))


@pytest.mark.parametrize("step, state", list(itertools.product(Step, CudaState)))
def test_an_edge_ends_in_running_or_in_a_kill(step: Step, state: CudaState) -> None:
    edge = rollback_path(step, state)
    if edge.kill:
        return
    for action in edge.actions:
        state = after(state, action)
    assert state is CudaState.RUNNING


@pytest.mark.parametrize(
    "step, state, name",
    [
        (Step.LOCK, CudaState.RUNNING, "stay"),
        (Step.LOCK, CudaState.LOCKED, "unlock"),  # it overran, and was done after all
        (Step.CHECKPOINT, CudaState.LOCKED, "unlock"),
        (Step.CHECKPOINT, CudaState.CHECKPOINTED, "restore+unlock"),
        (Step.RELEASE, CudaState.CHECKPOINTED, "restore+unlock"),
        (Step.DUMP, CudaState.CHECKPOINTED, "restore+unlock"),
        (Step.CHECKPOINT, CudaState.FAILED, "kill"),
        (Step.RESTORE, CudaState.CHECKPOINTED, "kill"),
        (Step.UNLOCK, CudaState.LOCKED, "kill"),
    ],
)
def test_edges_by_name(step: Step, state: CudaState, name: str) -> None:
    assert rollback_path(step, state).name == name


def test_a_process_that_does_not_say_where_it_stands_is_lost() -> None:
    assert rollback_path(Step.LOCK, None) is KILL


def test_an_edge_cannot_act_and_kill() -> None:
    with pytest.raises(ValueError, match="both acts and kills"):
        Rollback(name="odd", actions=(Action.UNLOCK,), kill=True)
