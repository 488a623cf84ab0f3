"""Bounds on strangers and on waiting."""

from __future__ import annotations

import pytest

from activator.admission import MAX_ADDRESSES, ProcessQueue, StrangerLimit, TokenBucket
from pilotlight import errors


def test_a_bucket_lets_a_burst_through_then_its_rate() -> None:
    bucket = TokenBucket(rate_per_s=2.0, burst=3.0, now=0.0)

    assert [bucket.take(0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert bucket.take(0.5) == 0.0
    assert bucket.take(100.0) == 0.0


def test_an_address_that_keeps_guessing_is_told_when_to_come_back() -> None:
    limit = StrangerLimit(rate_per_s=1.0)
    limit.check("10.0.0.1", now=0.0)
    limit.check("10.0.0.1", now=0.0)

    with pytest.raises(errors.TooManyRequests) as refused:
        limit.check("10.0.0.1", now=0.0)
    limit.check("10.0.0.2", now=0.0)

    assert refused.value.retry_after_s == pytest.approx(1.0)


def test_an_address_that_used_up_its_attempts_is_refused_before_any_look_up() -> None:
    limit = StrangerLimit(rate_per_s=1.0)
    limit.guard("10.0.0.1", now=0.0)
    limit.check("10.0.0.1", now=0.0)
    limit.check("10.0.0.1", now=0.0)

    with pytest.raises(errors.TooManyRequests):
        limit.guard("10.0.0.1", now=0.5)
    limit.guard("10.0.0.1", now=1.0)
    limit.guard("10.0.0.2", now=0.0)


def test_addresses_remembered_are_bounded() -> None:
    limit = StrangerLimit(rate_per_s=1.0)
    for n in range(MAX_ADDRESSES + 50):
        limit.check(str(n), now=0.0)

    assert repr(limit) == f"<StrangerLimit {MAX_ADDRESSES} addresses, 1/s each>"


def test_the_process_holds_no_more_waiting_calls_than_its_bound() -> None:
    queue = ProcessQueue(limit=2)
    queue.enter()
    queue.enter()

    with pytest.raises(errors.TooManyRequests, match="max_queued"):
        queue.enter()
    queue.leave()
    queue.enter()

    assert repr(queue) == "<ProcessQueue 2/2 waiting>"
