"""Uploads never go faster than they may."""

from __future__ import annotations

import pytest

from tests.fakes.clock import ManualClock
from weight_cache.peers.bandwidth_limit import BandwidthLimiter


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def paced(clock: ManualClock, bytes_per_s: int) -> BandwidthLimiter:
    async def sleep(seconds: float) -> None:
        clock.advance(seconds)

    return BandwidthLimiter(bytes_per_s, clock=clock, sleep=sleep)


async def test_a_long_upload_takes_its_time(clock: ManualClock) -> None:
    pace = paced(clock, 100)
    for _ in range(50):
        await pace.take(10)
    assert clock.now == pytest.approx(1000 + 5, abs=0.11)


async def test_a_silence_does_not_save_up_for_a_flood(clock: ManualClock) -> None:
    pace = paced(clock, 100)
    await pace.take(10)
    clock.advance(3600)
    before = clock.now
    for _ in range(10):
        await pace.take(10)
    assert clock.now - before == pytest.approx(0.9)


async def test_no_bound_is_no_wait(clock: ManualClock) -> None:
    await paced(clock, 0).take(10**12)
    assert clock.now == 1000
