"""One leader among many. Time is the test's; the Lease is one document with a resourceVersion."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import AlreadyExists, ClusterUnreachable, Conflict, NotFound
from pilotlight.kubernetes.kinds import LEASE, Kind
from pilotlight.kubernetes.leader_election import LeaderElection, LeaseLock, LeaseTerms
from tests.fakes.clock import ManualClock
from tests.fakes.kubernetes.server import ApiServer
from tests.hypothesis_profiles import examples

TERMS = LeaseTerms(lease_s=15, renew_s=10, retry_s=2)


class Leases:
    """An API server that holds one Lease. `away`: for whom it does not answer; `lossy`: it does
    what is asked, and the answer is lost."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.away = False
        self.lossy = False
        self.calls = 0
        self._version = 0

    async def get(
        self, kind: Kind, name: str, namespace: str | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any] | None:
        self._answer()
        return self.lease

    async def create(
        self, manifest: dict[str, Any], *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        self._answer()
        if self.lease is not None:
            raise AlreadyExists("there", status=409)
        return self._store(manifest)

    async def replace(
        self, manifest: dict[str, Any], *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        self._answer()
        if self.lease is None:
            raise NotFound("gone", status=404)
        if manifest["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise Conflict("changed", status=409)
        return self._store(manifest)

    def _answer(self) -> None:
        self.calls += 1
        if self.away:
            raise ClusterUnreachable("away")

    def _store(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        self.lease = {
            **manifest,
            "metadata": {**manifest["metadata"], "resourceVersion": str(self._version)},
        }
        if self.lossy:
            raise ClusterUnreachable("the answer was lost")
        return self.lease

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        spec: dict[str, Any] = self.lease["spec"]
        return spec


class Candidate:
    """An election by hand."""

    def __init__(
        self,
        server: Any,
        identity: str,
        clock: ManualClock,
        *,
        wall_s: float = 1_000_000.0,
        member: str = "",
    ) -> None:
        self.election = LeaderElection(
            server,
            LeaseLock(name="autoscaler", namespace="pilotlight", identity=identity, member=member),
            terms=TERMS,
            clock=clock,
            wall=lambda: wall_s,
            chance=lambda: 0.5,
        )

    def terms(self) -> tuple[int, bool]:
        """How often it became leader, and whether it is."""
        return self.election.transitions, self.election.is_leader


async def test_the_first_one_leads_and_the_second_waits() -> None:
    leases, clock = Leases(), ManualClock()
    a, b = Candidate(leases, "a", clock), Candidate(leases, "b", clock)
    for _ in range(20):
        await a.election.step()
        await b.election.step()
        clock.advance(2)
        assert (a.election.is_leader, b.election.is_leader) == (True, False)
    assert (a.terms(), b.terms(), b.election.leader) == ((1, True), (0, False), "a")
    assert leases.spec["holderIdentity"] == "a"
    assert repr(b.election) == "<LeaderElection pilotlight/autoscaler b behind a>"


async def test_a_renewal_is_one_call() -> None:
    leases, clock = Leases(), ManualClock()
    a = Candidate(leases, "a", clock)
    await a.election.step()
    before = leases.calls
    await a.election.step()
    assert leases.calls == before + 1


async def test_a_candidate_does_not_wait_for_the_lease_of_its_earlier_process() -> None:
    leases, clock = Leases(), ManualClock()
    killed = Candidate(leases, "a-1-x", clock, member="a-1-")
    await killed.election.step()
    other = Candidate(leases, "a-11-y", clock, member="a-11-")
    again = Candidate(leases, "a-1-z", clock, member="a-1-")
    await other.election.step()
    await again.election.step()
    assert (other.election.is_leader, again.election.is_leader) == (False, True)
    assert leases.spec["leaseTransitions"] == 1
    # one that had not ended after all stands back with its next renewal
    await killed.election.step()
    assert not killed.election.is_leader
    await again.election.step()
    assert again.election.is_leader


async def test_a_leader_that_fell_silent_is_followed_after_what_it_promised() -> None:
    leases, clock = Leases(), ManualClock()
    a, b = Candidate(leases, "a", clock), Candidate(leases, "b", clock)
    await a.election.step()
    await b.election.step()
    began = clock.now
    while not b.election.is_leader:
        clock.advance(1)
        await b.election.step()
        assert not (a.election.is_leader and b.election.is_leader)
    assert 15 < clock.now - began <= 17
    assert (leases.spec["leaseTransitions"], b.election.transitions) == (1, 1)
    await a.election.step()  # it comes back to life, and finds that it is not in charge
    assert a.terms() == (1, False)


@pytest.mark.parametrize("skew_s", [-86_400.0, -30.0, 30.0, 86_400.0])
async def test_wall_clocks_that_differ_do_not_matter(skew_s: float) -> None:
    leases, clock = Leases(), ManualClock()
    a, b = Candidate(leases, "a", clock), Candidate(leases, "b", clock, wall_s=1_000_000.0 + skew_s)
    await a.election.step()
    for _ in range(30):
        clock.advance(2)
        await a.election.step()
        await b.election.step()
        assert (a.election.is_leader, b.election.is_leader) == (True, False)


async def test_a_candidate_that_just_arrived_waits_the_whole_promise() -> None:
    """It cannot know when the Lease was renewed last: the date in it is by another clock."""
    leases, clock = Leases(), ManualClock()
    a = Candidate(leases, "a", clock)
    await a.election.step()
    clock.advance(14)
    b = Candidate(leases, "b", clock)
    await b.election.step()
    clock.advance(14)
    await b.election.step()
    assert not b.election.is_leader
    clock.advance(2)
    await b.election.step()
    assert b.election.is_leader


async def test_a_leader_without_its_server_steps_down_before_another_may_follow() -> None:
    leases, clock = Leases(), ManualClock()
    a = Candidate(leases, "a", clock)
    await a.election.step()
    leases.away = True
    clock.advance(9.9)
    await a.election.step()
    assert a.election.is_leader
    clock.advance(0.2)
    assert not a.election.is_leader  # nobody had to tell it
    await a.election.step()
    assert a.terms() == (1, False)
    leases.away = False
    await a.election.step()
    assert a.terms() == (2, True)
    assert a.election.transitions == 2


async def test_an_answer_that_was_lost_does_not_cost_the_lease() -> None:
    leases, clock = Leases(), ManualClock()
    a = Candidate(leases, "a", clock)
    await a.election.step()
    leases.lossy = True
    clock.advance(2)
    await a.election.step()
    leases.lossy = False
    clock.advance(2)
    await a.election.step()
    clock.advance(9)
    assert a.election.is_leader


async def test_a_lease_given_back_is_taken_at_once() -> None:
    leases, clock = Leases(), ManualClock()
    a, b = Candidate(leases, "a", clock), Candidate(leases, "b", clock)
    await a.election.step()
    await b.election.step()
    await a.election.release()
    assert a.terms() == (1, False)
    await b.election.step()
    assert b.election.is_leader
    await a.election.release()  # once more: not ours, not touched
    assert leases.spec["holderIdentity"] == "b"


async def test_a_lease_deleted_under_a_leader_does_not_make_two() -> None:
    leases, clock = Leases(), ManualClock()
    a, b = Candidate(leases, "a", clock), Candidate(leases, "b", clock)
    await a.election.step()
    await b.election.step()
    leases.lease = None
    await b.election.step()  # it remembers a's promise
    assert not b.election.is_leader
    await a.election.step()
    assert a.election.is_leader
    leases.lease = None
    leases.away = True
    for _ in range(9):
        clock.advance(2)
        await a.election.step()
    leases.away = False
    await b.election.step()
    assert (a.election.is_leader, b.election.is_leader) == (False, True)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(["step", "lossy", "away"]), st.floats(0.0, 6.0)
        ),
        max_size=40,
    )
)
async def test_never_two_leaders(story: list[tuple[int, str, float]]) -> None:
    leases, clock = Leases(), ManualClock()
    all_ = [Candidate(leases, name, clock) for name in "abc"]
    for who, how, pause_s in story:
        leases.lossy, leases.away = how == "lossy", how == "away"
        await all_[who].election.step()
        clock.advance(pause_s)
        assert sum(one.election.is_leader for one in all_) <= 1


async def test_two_candidates_on_a_server(cluster: Cluster, api_server: ApiServer) -> None:
    terms = LeaseTerms(lease_s=60, renew_s=30, retry_s=0.02)  # nothing of it waits for an end
    async with LeaderElection(
        cluster, LeaseLock(name="reconciler", namespace="default", identity="a"), terms=terms
    ) as a:
        await a.wait_leader()
        async with LeaderElection(
            cluster, LeaseLock(name="reconciler", namespace="default", identity="b"), terms=terms
        ) as b:
            while b.leader != "a":
                await asyncio.sleep(0.005)
            assert not b.is_leader
            await a.aclose()
            await b.wait_leader()
            assert not a.is_leader
    lease = await cluster.get(LEASE, "reconciler", "default")
    assert lease is not None
    assert lease["spec"]["holderIdentity"] == ""  # given back
    assert lease["spec"]["leaseTransitions"] == 1


def test_terms_that_would_make_two_leaders_are_refused() -> None:
    with pytest.raises(ValueError, match="must be greater"):
        LeaseTerms(lease_s=10, renew_s=10, retry_s=2)
