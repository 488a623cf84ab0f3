"""Choosing by beginnings pays, in the simulation whose callers are the same for every way to
choose."""

from __future__ import annotations

import pytest

from benchmarks.affinity_sim import LOADS, Outcome, compare
from benchmarks.harness import percentile


def outcomes(load: str, calls: int = 1000) -> dict[str, Outcome]:
    return compare(LOADS[load], calls=calls, seeds=[7])


@pytest.mark.parametrize("load", ["40 system prompts", "chats of 2-8 turns"])
def test_more_of_the_prompts_is_in_memory_than_by_load_or_by_chance(load: str) -> None:
    found = outcomes(load)

    assert found["ours"].hit_rate > 1.05 * found["least loaded"].hit_rate
    assert found["ours"].hit_rate > 1.05 * found["random"].hit_rate
    assert percentile(found["ours"].first_token_ms, 99) < percentile(
        found["least loaded"].first_token_ms, 99
    )


def test_a_prompt_that_everybody_shares_drowns_nobody() -> None:
    found = outcomes("one system prompt")

    assert found["ours"].busiest[0] < 1.35
    assert percentile(found["ours"].first_token_ms, 99) < percentile(
        found["beginning, no bound"].first_token_ms, 99
    )


def test_the_same_seed_is_the_same_run() -> None:
    first, second = (outcomes("nothing in common", 300)["ours"] for _ in range(2))

    assert first.first_token_ms == second.first_token_ms
