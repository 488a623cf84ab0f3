"""When starts are kept from a node: an agent that is away for long, or fails what is no revision's
fault."""

from __future__ import annotations

import pytest

from activator.resilience.breaker import BreakerTerms
from activator.resilience.node_breaker import AWAY_S, PROBE_S, NodeBreaker
from pilotlight import errors
from snapshotter import errors as agent_errors
from tests.fakes.clock import ManualClock


@pytest.fixture(name="clock")
def _clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture(name="guard")
def _guard(clock: ManualClock) -> NodeBreaker:
    return NodeBreaker(BreakerTerms(min_calls=4), clock=clock)


def start(guard: NodeBreaker, error: BaseException | None = None) -> None:
    guard.check()
    if error is None:
        guard.started()
    else:
        guard.failed(error)


AWAY = agent_errors.AgentUnavailable("no agent on its socket")


def test_an_agent_that_restarts_is_waited_for(guard: NodeBreaker, clock: ManualClock) -> None:
    for _ in range(50):
        start(guard, AWAY)
        clock.now += AWAY_S / 60
    start(guard)
    start(guard)


def test_one_that_stays_away_is_asked_by_a_probe_now_and_then(
    guard: NodeBreaker, clock: ManualClock
) -> None:
    start(guard, AWAY)
    clock.now += AWAY_S
    start(guard, AWAY)
    with pytest.raises(errors.CircuitOpen, match="has not answered for 10 s"):
        guard.check()
    clock.now += PROBE_S
    start(guard)
    start(guard)


def test_an_agent_that_fails_starts_is_left_alone(guard: NodeBreaker) -> None:
    for _ in range(4):
        start(guard, agent_errors.SnapshotterError("the fork server is broken"))
    with pytest.raises(errors.CircuitOpen, match="failed 100% of recent starts"):
        guard.check()


@pytest.mark.parametrize(
    "error",
    [
        agent_errors.StartFailed("import error"),
        agent_errors.StartTimeout("too slow"),
        agent_errors.NoCapacity("full"),
        agent_errors.BundleUnavailable("gone"),
        agent_errors.ImageBuildFailed("pip"),
    ],
)
def test_what_is_the_revisions_own_or_want_of_room_says_nothing_against_the_node(
    guard: NodeBreaker, error: BaseException
) -> None:
    for _ in range(50):
        start(guard, error)
    guard.check()


def test_a_start_that_was_given_up_leaves_the_probes_place(
    guard: NodeBreaker, clock: ManualClock
) -> None:
    for _ in range(4):
        start(guard, agent_errors.SnapshotterError("broken"))
    clock.now += 60
    start(guard, GeneratorExit())
    start(guard)
    assert repr(guard) == "<NodeBreaker <Breaker closed <Window 0 of 0 failed>>>"
