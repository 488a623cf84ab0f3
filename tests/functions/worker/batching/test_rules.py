"""When a batch goes, and why."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.spec.policies import BatchPolicy
from pilotlight.worker.batching.latency_model import LatencyFit
from pilotlight.worker.batching.release_policy import (
    SAFETY,
    SAFETY_S,
    BatchState,
    ReleaseDecision,
    ReleaseReason,
    decide_release,
)

POLICY = BatchPolicy(max_batch_size=8, wait_ms=50)
LINE = LatencyFit(per_item_s=0.001, fixed_s=0.02)
SEEN = BatchState(size=3, oldest_at=10.0, silent_since=10.0, cost=LINE, patience_s=0.01)


@pytest.mark.parametrize(
    "now, seen, reason",
    [
        (10.0, replace(SEEN, size=8), ReleaseReason.FULL),
        (10.0, replace(SEEN, size=20), ReleaseReason.FULL),
        (10.005, SEEN, None),
        (10.01, SEEN, ReleaseReason.ENOUGH),
        (10.01, replace(SEEN, size=1), ReleaseReason.ALONE),
        (10.05, replace(SEEN, silent_since=10.049, held_s=0.05), ReleaseReason.WAITED),
        (10.049, replace(SEEN, silent_since=10.045, held_s=0.049), None),
        (10.9, replace(SEEN, silent_since=10.899, held_s=0.01), None),
        (10.0, replace(SEEN, can_grow=False), ReleaseReason.IDLE),
        (10.0, replace(SEEN, is_draining=True), ReleaseReason.DRAINED),
        (10.0, replace(SEEN, deadline_at=10.02), ReleaseReason.DEADLINE),
        (10.0, replace(SEEN, deadline_at=9.0), ReleaseReason.DEADLINE),
        (10.0, replace(SEEN, deadline_at=10.1), None),
        (10.02, replace(SEEN, cost=None), None),
        (10.05, replace(SEEN, cost=None), ReleaseReason.WAITED),
        (10.0, replace(SEEN, patience_s=0.0), ReleaseReason.ENOUGH),
    ],
)
def test_a_batch_goes_for_a_reason(
    now: float, seen: BatchState, reason: ReleaseReason | None
) -> None:
    assert decide_release(now, seen, POLICY).reason is reason


def test_a_fixed_wait_asks_for_no_patience() -> None:
    fixed = replace(POLICY, adaptive=False)

    assert decide_release(10.03, replace(SEEN, patience_s=0.0), fixed) == ReleaseDecision(
        reason=None, look_again_at=10.05
    )
    assert decide_release(10.05, SEEN, fixed).reason is ReleaseReason.WAITED


def test_without_a_wait_whatever_is_there_goes_at_once() -> None:
    assert decide_release(10.0, SEEN, replace(POLICY, wait_ms=0)).reason is ReleaseReason.WAITED


def test_a_member_with_little_time_makes_it_go_while_it_can_still_be_answered() -> None:
    needed_s = SAFETY * LINE.seconds(3) + SAFETY_S
    seen = replace(SEEN, deadline_at=10.04, patience_s=1.0)

    verdict = decide_release(10.0, seen, POLICY)
    assert verdict.reason is None
    assert verdict.look_again_at == pytest.approx(10.04 - needed_s)
    assert decide_release(verdict.look_again_at, seen, POLICY).reason is ReleaseReason.DEADLINE


ages = st.floats(0, 100)
lines = st.one_of(
    st.none(), st.builds(LatencyFit, per_item_s=st.floats(0, 1), fixed_s=st.floats(0, 1))
)
batches = st.builds(
    BatchState,
    size=st.integers(1, 20),
    oldest_at=ages,
    silent_since=ages,
    held_s=ages,
    deadline_at=st.one_of(st.just(math.inf), ages),
    cost=lines,
    patience_s=st.floats(0, 1),
)


@given(ages, batches, st.floats(0, 60_000), st.booleans())
def test_it_goes_or_says_when_to_look_again_and_never_after_the_configured_wait(
    now: float, seen: BatchState, wait_ms: float, adaptive: bool
) -> None:
    verdict = decide_release(
        now, seen, BatchPolicy(max_batch_size=8, wait_ms=wait_ms, adaptive=adaptive)
    )

    if verdict.reason is None:
        left_s = (
            wait_ms / 1000 - seen.held_s
            if adaptive and seen.cost is not None
            else wait_ms / 1000 - (now - seen.oldest_at)
        )
        assert now < verdict.look_again_at <= now + left_s + 1e-9
        assert seen.size < 8
    elif verdict.reason is ReleaseReason.WAITED:
        assert max(seen.held_s, now - seen.oldest_at) >= wait_ms / 1000 - 0.001
