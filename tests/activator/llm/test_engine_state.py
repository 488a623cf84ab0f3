"""What an engine's words mean: how many calls it takes, and what it did lately."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.llm.engine_state import MAX_MISSED, RECENT_S, EngineTracker, share_after, slots
from tests.activator.llm.samples import histogram, reading


def test_an_engine_takes_all_its_sequences_until_its_memory_says_otherwise() -> None:
    watched = EngineTracker(16)

    assert watched.record(reading(), 0.0).slots == 16
    assert watched.record(reading(running=4, kv_use=0.1), 2.0).slots == 16, (
        "four take a tenth: 36 would fit"
    )


def test_memory_bounds_the_calls() -> None:
    watched = EngineTracker(16)

    assert watched.record(reading(running=4, kv_use=0.45), 0.0).slots == 8, (
        "nine tenths of the memory hold eight of these"
    )
    assert watched.record(reading(), 2.0).slots == 8, (
        "an idle moment says nothing of what sequences take"
    )


def test_memory_that_is_too_full_bounds_at_once() -> None:
    watched = EngineTracker(16)
    for n in range(10):
        watched.record(reading(running=8, kv_use=0.1), 2.0 * n)

    assert watched.record(reading(running=16, kv_use=0.99), 20.0).slots == 14
    assert watched.record(reading(running=1, waiting=9, kv_use=1.0), 22.0).slots == 1, (
        "one call is always taken"
    )


def test_one_look_at_long_sequences_is_believed_by_half_and_at_short_ones_by_less() -> None:
    assert share_after(0.1, reading(running=1, kv_use=0.2)) == pytest.approx(0.15)
    assert share_after(0.2, reading(running=1, kv_use=0.1)) == pytest.approx(0.18)
    assert share_after(None, reading(running=2, kv_use=0.5)) == pytest.approx(0.25)


@given(
    st.lists(
        st.tuples(st.integers(0, 64), st.integers(0, 64), st.one_of(st.none(), st.floats(0, 1.5)))
    ),
    st.integers(1, 256),
)
def test_the_bound_lies_between_one_and_all_sequences(
    seen: list[tuple[int, int, float | None]], most: int
) -> None:
    share: float | None = None
    for running, waiting, kv_use in seen:
        said = reading(running=running, waiting=waiting, kv_use=kv_use)
        share = share_after(share, said)
        assert 1 <= slots(said, share, max_num_seqs=most) <= most


def test_no_answer_is_not_known_and_not_zero() -> None:
    watched = EngineTracker(16)
    watched.record(reading(running=4, kv_use=0.45), 0.0)

    for _ in range(MAX_MISSED - 1):
        assert watched.record_miss() is not None, "one lost look changes nothing"
    assert watched.record_miss() is None
    assert watched.record(reading(running=4, kv_use=0.45), 9.0).slots == 8


def test_rates_and_hits_are_of_the_time_between_two_looks() -> None:
    watched = EngineTracker(16)
    first = watched.record(
        reading(prompt_tokens=100.0, generation_tokens=10.0, prefix_queries=100.0, prefix_hits=0.0),
        10.0,
    )
    second = watched.record(
        reading(
            prompt_tokens=700.0, generation_tokens=50.0, prefix_queries=300.0, prefix_hits=150.0
        ),
        12.0,
    )

    assert (first.prompt_tokens_per_s, first.prefix_hit_rate) == (None, None)
    assert (second.prompt_tokens_per_s, second.generation_tokens_per_s, second.prefix_hit_rate) == (
        300.0,
        20.0,
        0.75,
    )
    idle = watched.record(
        reading(
            prompt_tokens=700.0, generation_tokens=50.0, prefix_queries=300.0, prefix_hits=150.0
        ),
        14.0,
    )
    assert (idle.prompt_tokens_per_s, idle.prefix_hit_rate) == (0.0, None)
    assert idle.peak_prompt_tokens_per_s == pytest.approx(300, rel=0.01), (
        "its best pace is remembered for a while"
    )


def test_an_engine_that_counts_anew_has_no_rate() -> None:
    watched = EngineTracker(16)
    watched.record(reading(prompt_tokens=900.0), 0.0)

    assert watched.record(reading(prompt_tokens=5.0), 2.0).prompt_tokens_per_s is None


def test_first_tokens_are_those_of_the_last_seconds() -> None:
    watched = EngineTracker(16)
    watched.record(reading(first_token_s=histogram(0.2, 0.2)), 0.0)
    assert watched.first_tokens_since(-1.0) is None, (
        "those of the first look may be from before its snapshot was made"
    )

    watched.record(reading(first_token_s=histogram(0.2, 0.2, 0.7)), 2.0)
    watched.record(reading(first_token_s=histogram(0.2, 0.2, 0.7, 0.8, 0.3)), 4.0)

    found = watched.first_tokens_since(0.0)
    assert found is not None
    assert (found.count, found.longer_than(0.5)) == (3, 2)
    found = watched.first_tokens_since(2.0)
    assert found is not None
    assert found.count == 2
    watched.record(reading(first_token_s=histogram(0.2, 0.2, 0.7, 0.8, 0.3)), 4.0 + RECENT_S)
    assert watched.first_tokens_since(0.0) is None
