"""Bounds on strangers and on waiting."""

from __future__ import annotations

import pytest

from activator.balancing.global_queue import GlobalQueue
from activator.fairness.queue_priority import DEFAULT_RANK, QueueBound, QueuePriority
from activator.quotas.unauthenticated_limit import (
    MAX_ADDRESSES,
    TokenBucket,
    UnauthenticatedRateLimiter,
)
from pilotlight import errors
from pilotlight.spec.identifiers import Priority


def test_a_bucket_lets_a_burst_through_then_its_rate() -> None:
    bucket = TokenBucket(rate_per_s=2.0, burst=3.0, now=0.0)

    assert [bucket.take(0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert bucket.take(0.5) == 0.0
    assert bucket.take(100.0) == 0.0


def test_an_address_that_keeps_guessing_is_told_when_to_come_back() -> None:
    limit = UnauthenticatedRateLimiter(rate_per_s=1.0)
    limit.check("10.0.0.1", now=0.0)
    limit.check("10.0.0.1", now=0.0)

    with pytest.raises(errors.TooManyRequests) as refused:
        limit.check("10.0.0.1", now=0.0)
    limit.check("10.0.0.2", now=0.0)

    assert refused.value.retry_after_s == pytest.approx(1.0)


def test_an_address_that_used_up_its_attempts_is_refused_until_it_has_one_again() -> None:
    limit = UnauthenticatedRateLimiter(rate_per_s=1.0)
    limit.guard("10.0.0.1", now=0.0)
    limit.check("10.0.0.1", now=0.0)
    limit.check("10.0.0.1", now=0.0)

    with pytest.raises(errors.TooManyRequests):
        limit.guard("10.0.0.1", now=0.5)
    limit.guard("10.0.0.1", now=1.0)
    limit.guard("10.0.0.2", now=0.0)


def test_addresses_remembered_are_bounded() -> None:
    limit = UnauthenticatedRateLimiter(rate_per_s=1.0)
    for n in range(MAX_ADDRESSES + 50):
        limit.check(str(n), now=0.0)

    assert repr(limit) == f"<UnauthenticatedRateLimiter {MAX_ADDRESSES} addresses, 1/s each>"


class Held:
    """A call that waits (`admission.Waiting`), and how it was answered."""

    def __init__(self, rank: QueuePriority = DEFAULT_RANK, *bounds: QueueBound) -> None:
        self.rank = rank
        self.bounds = bounds
        self.patience_s = 2.0
        self.answer: errors.TooManyRequests | None = None

    def shed(self, error: errors.TooManyRequests) -> None:
        """See admission.Waiting."""
        assert self.answer is None
        self.answer = error


def rank_of(tenant: str, priority: Priority = Priority.STANDARD) -> QueuePriority:
    return QueuePriority(priority=priority, tenant=tenant, weight=1)


def test_the_process_holds_no_more_waiting_calls_than_its_bound() -> None:
    queue, first = GlobalQueue(limit=2), Held()
    queue.enter(first)
    queue.enter(Held())

    with pytest.raises(errors.Shed, match="max_queued") as e:
        queue.enter(Held())
    assert (e.value.retry_after_s, e.value.detail) == (2.0, {"priority": "standard", "tenant": ""})
    queue.leave(first)
    queue.leave(first)
    queue.enter(Held())

    assert repr(queue) == "<GlobalQueue 2/2 waiting>"


def test_a_call_of_a_tenant_within_its_share_takes_the_place_of_one_over_it() -> None:
    queue = GlobalQueue(limit=4)
    flood = [Held(rank_of("flood")) for _ in range(4)]
    for held in flood:
        queue.enter(held)

    queue.enter(Held(rank_of("small")))

    assert [held.answer is None for held in flood] == [True, True, True, False]
    answer = flood[3].answer
    assert isinstance(answer, errors.Shed)
    assert (answer.status, answer.retry_after_s, answer.detail) == (
        429,
        2.0,
        {"priority": "standard", "tenant": "flood"},
    )
    assert queue.waiting == 4


def test_a_tenants_quota_of_waiting_calls_is_its_own_affair() -> None:
    queue, bound = GlobalQueue(limit=10), QueueBound("tenant", "t-1", 1)
    batch = Held(rank_of("t-1", Priority.BATCH), bound)
    queue.enter(batch)
    queue.enter(Held(rank_of("t-2")))
    queue.enter(Held(rank_of("t-1"), bound))
    assert isinstance(batch.answer, errors.Shed), "a higher one of the same tenant has its place"

    with pytest.raises(errors.OverQuota) as e:
        queue.enter(Held(rank_of("t-1"), bound))
    assert e.value.detail == {"quota": "queued", "of": "tenant", "limit": 1}
    with pytest.raises(errors.OverQuota):
        queue.enter(Held(rank_of("t-3"), QueueBound("key", "k-1", 0)))
    assert queue.waiting == 2


def test_nobody_goes_for_a_call_that_another_bound_turns_away() -> None:
    queue = GlobalQueue(limit=1)
    batch = Held(rank_of("a", Priority.BATCH))
    queue.enter(batch)

    with pytest.raises(errors.OverQuota):
        queue.enter(Held(rank_of("b", Priority.REALTIME), QueueBound("function", "f-1", 0)))
    assert batch.answer is None


def test_a_call_that_stands_for_two_bounds_goes_once() -> None:
    queue, bound = GlobalQueue(limit=1), QueueBound("tenant", "a", 1)
    batch = Held(rank_of("a", Priority.BATCH), bound)
    queue.enter(batch)
    queue.enter(Held(rank_of("a", Priority.REALTIME), bound))

    assert isinstance(batch.answer, errors.Shed)
    assert queue.waiting == 1
