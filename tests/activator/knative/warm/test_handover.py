"""When own pods take over from promoted ones: the pure decision, and a simulated hand-over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.knative.warm.handover import (
    LONGEST_S,
    BridgeLoad,
    BridgeObservation,
    HandoverStep,
    decide,
)


def seen(**changed: int) -> BridgeObservation:
    """One busy promoted instance, and nothing else."""
    usual = {"promoted": 1, "idle": 0, "own": 0, "own_free": 0, "starting": 0, "needed": 1}
    return BridgeObservation(**{**usual, "room": 9, **changed})


def test_a_short_burst_ends_where_it_began() -> None:
    assert decide(seen(), lasts=False) == HandoverStep()


def test_own_pods_are_requested_for_load_that_lasts_claimed_when_they_are_ready_and_then_promoted_ones_go() -> (
    None
):
    assert decide(seen(), lasts=True) == HandoverStep(asks=1)
    assert decide(seen(own_free=1), lasts=True) == HandoverStep(starts=1)
    assert decide(seen(starting=1), lasts=True) == HandoverStep()
    assert decide(seen(own=1), lasts=True) == HandoverStep(drains=1)


def test_own_pods_that_came_by_themselves_replace_promoted_ones_that_are_not_needed() -> None:
    assert decide(seen(promoted=2, own=1, needed=2), lasts=False) == HandoverStep(drains=1)
    assert decide(seen(promoted=2, own=1, needed=3), lasts=False) == HandoverStep()


def test_without_room_for_both_an_idle_promoted_pod_goes_first() -> None:
    assert decide(seen(own_free=1, room=0), lasts=True) == HandoverStep()
    assert decide(seen(own_free=1, room=0, idle=1), lasts=True) == HandoverStep(drains=1)


def test_load_lasts_when_half_of_the_window_was_busy_or_after_a_minute_with_calls() -> None:
    load = BridgeLoad(since=0.0, window=4)
    for second, share in enumerate((1.0, 0.5, 0.4)):
        load.record(share)
        assert not load.lasts(second)
    load.record(0.1)
    assert load.lasts(4.0)
    for _ in range(4):
        load.record(0.01)
    assert not load.lasts(5.0)
    assert load.lasts(LONGEST_S)
    for _ in range(4):
        load.record(0.0)
    assert not load.lasts(LONGEST_S + 1)
    assert BridgeLoad(since=0.0, window=0).lasts(0.0)


COUNT = st.integers(0, 5)
OBSERVED = st.builds(
    seen,
    promoted=COUNT,
    idle=COUNT,
    own=COUNT,
    own_free=COUNT,
    starting=COUNT,
    needed=COUNT,
    room=COUNT,
).filter(lambda one: one.idle <= one.promoted)


@given(OBSERVED, st.booleans())
def test_no_step_leaves_fewer_instances_than_are_needed(
    observed: BridgeObservation, lasts: bool
) -> None:
    step = decide(observed, lasts=lasts)
    assert 0 <= step.drains <= observed.promoted
    assert 0 <= step.starts <= min(observed.own_free, observed.room)
    assert 0 <= step.asks <= observed.promoted
    serving = observed.promoted + observed.own
    # a promoted instance without a call goes for a ready own pod that waits in its place
    waiting = min(observed.own_free, observed.idle) if lasts and step.drains else 0
    assert serving - step.drains >= min(serving, observed.needed) - waiting


@pytest.mark.parametrize("limit", [2, 9])
def test_a_hand_over_second_by_second_loses_no_capacity(limit: int) -> None:
    """Two busy promoted pods; own pods are ready three seconds after they were requested."""
    promoted, own, free, coming = 2, 0, 0, 0
    story, load = [], BridgeLoad(since=0.0, window=5)
    for second in range(20):
        load.record(1.0)
        idle = second % 2 * promoted
        step = decide(
            seen(
                promoted=promoted,
                idle=idle,
                own=own,
                own_free=free,
                needed=2,
                room=limit - promoted - own,
            ),
            lasts=load.lasts(second),
        )
        story.append(step)
        promoted, own, free = promoted - step.drains, own + step.starts, free - step.starts
        if limit == 2 and step.drains:  # the next calls take the own pods, which are ready
            own, free = own + step.drains, free - step.drains
        assert promoted + own >= 2
        coming = coming + 1 if step.asks else 0
        free += 2 * (coming == 3)
    assert (promoted, own) == (0, 2)
    assert next(n for n, step in enumerate(story) if step.asks) == 4
    assert story[-1] == HandoverStep()
