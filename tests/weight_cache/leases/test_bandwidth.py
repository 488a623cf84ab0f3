"""Speeds: what is seen outweighs what was guessed, by its bytes; predictions add the hops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_cache.leases import bandwidth
from weight_cache.leases.bandwidth import HALF_BYTES, TierBandwidths, TransferRate
from weight_cache.types import Tier

GIB = 1024**3


def test_first_guess_is_forgotten_after_one_model() -> None:
    speeds = TierBandwidths(origin="here")
    guess = speeds.bytes_per_s(Tier.ORIGIN)
    speeds.observe(Tier.ORIGIN, GIB, GIB / (guess * 10))
    assert speeds.bytes_per_s(Tier.ORIGIN) == pytest.approx(guess * 10, rel=0.02)


def test_small_files_hardly_count() -> None:
    speeds = TierBandwidths(origin="here")
    speeds.observe(Tier.NVME, GIB, 1.0)
    for _ in range(100):
        speeds.observe(Tier.NVME, 1000, 0.01)
    assert speeds.bytes_per_s(Tier.NVME) > 0.2 * GIB
    assert speeds.predict({Tier.NVME: GIB}) == pytest.approx(2.0, rel=0.1)


def test_half_bytes_halve_the_weight_of_what_was_before() -> None:
    rate = TransferRate(size_bytes=100.0, seconds=1.0).seen(HALF_BYTES, 5.0)
    assert (rate.size_bytes, rate.seconds) == (50.0 + HALF_BYTES, 5.5)


@pytest.mark.parametrize(
    "size, seconds",
    [(0, 1.0), (-5, 1.0), (5, 0.0), (5, -1.0), (5, float("inf")), (5, float("nan"))],
)
def test_what_says_nothing_changes_nothing(size: int, seconds: float) -> None:
    speeds, before = TierBandwidths(origin="here"), TierBandwidths(origin="here")
    speeds.observe(Tier.ORIGIN, size, seconds)
    assert speeds.to_json() == before.to_json()


def test_what_comes_from_the_origin_waits_for_what_is_before_it() -> None:
    speeds = TierBandwidths(origin="here")
    alone = speeds.predict({Tier.ORIGIN: GIB})
    assert speeds.predict({Tier.ORIGIN: GIB}, queued_bytes=GIB) == pytest.approx(2 * alone)
    assert speeds.predict({Tier.NVME: GIB}, queued_bytes=GIB) == speeds.predict({Tier.NVME: GIB})
    assert speeds.predict({Tier.ORIGIN: 0}, queued_bytes=GIB) == 0


def test_byte_of_a_small_model_is_dearer_to_bring_back_than_one_of_a_large_model() -> None:
    speeds = TierBandwidths(origin="here")
    assert speeds.reload_s(GIB) > speeds.predict({Tier.ORIGIN: GIB})
    assert speeds.reload_s(10**6) / 10**6 > 2 * speeds.reload_s(10**9) / 10**9


def test_another_origin_has_its_own_speed(tmp_path: Path) -> None:
    seen = TierBandwidths(origin="s3://a")
    seen.observe(Tier.ORIGIN, GIB, 100.0)
    seen.observe(Tier.NVME, GIB, 100.0)
    bandwidth.save_bandwidths(tmp_path / "speeds", seen)
    again, other = (
        bandwidth.load_bandwidths(tmp_path / "speeds", origin="s3://a"),
        bandwidth.load_bandwidths(tmp_path / "speeds", origin="s3://b"),
    )
    assert again.speeds() == seen.speeds()
    assert other.bytes_per_s(Tier.NVME) == seen.bytes_per_s(Tier.NVME)
    assert other.bytes_per_s(Tier.ORIGIN) == TierBandwidths(origin="s3://b").bytes_per_s(
        Tier.ORIGIN
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        '{"nvme": 5}',
        '{"nvme": [1, 0]}',
        '{"nvme": ["x", 1]}',
        '{"nvme": [1e999, 1]}',
        '{"nvme": [1]}',
    ],
)
def test_broken_record_is_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "speeds").write_text(text)
    assert (
        bandwidth.load_bandwidths(tmp_path / "speeds", origin="o").speeds()
        == TierBandwidths(origin="o").speeds()
    )


def test_nothing_kept_is_no_error(tmp_path: Path) -> None:
    assert (
        bandwidth.load_bandwidths(tmp_path / "none", origin="o").speeds()
        == TierBandwidths(origin="o").speeds()
    )


@given(st.lists(st.tuples(st.integers(1, 10**13), st.floats(1e-6, 1e6)), max_size=30))
def test_any_history_leaves_a_speed_within_what_was_seen(seen: list[tuple[int, float]]) -> None:
    speeds = TierBandwidths(origin="o")
    all_speeds = [speeds.bytes_per_s(Tier.NVME), *(size / seconds for size, seconds in seen)]
    for size, seconds in seen:
        speeds.observe(Tier.NVME, size, seconds)
    assert min(all_speeds) * 0.999 <= speeds.bytes_per_s(Tier.NVME) <= max(all_speeds) * 1.001
    copy = TierBandwidths(origin="o")
    copy.take_over(json.loads(json.dumps(speeds.to_json())))
    assert copy.speeds() == speeds.speeds()


def test_says_its_speeds() -> None:
    assert (
        repr(TierBandwidths(origin="o")) == "<TierBandwidths MB/s origin=500 nvme=2000 dram=10000>"
    )
