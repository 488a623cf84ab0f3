"""How long prompts are estimated to be, and how that is learned."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.llm.request_size import PromptSize, token_demand_of
from activator.llm.token_estimates import MAX_KNOWN, TokenEstimate, TokenEstimates, learn


def text(text_bytes: int) -> PromptSize:
    return PromptSize(text_bytes, text_bytes, 0)


def test_three_bytes_are_a_token_where_nothing_is_known() -> None:
    assert TokenEstimate().tokens(text(3000)) == 1009


def test_tokens_that_were_given_as_such_are_exact() -> None:
    assert TokenEstimate().tokens(PromptSize(0, 0, 77)) == 77
    assert TokenEstimate().least(PromptSize(0, 0, 77)) == 77


@pytest.mark.parametrize("bytes_per_token, template", [(4.5, 30), (1.0, 0), (2.2, 500), (12.0, 5)])
def test_a_tokenizer_and_its_template_are_learned(bytes_per_token: float, template: int) -> None:
    rng = random.Random(7)
    estimate = TokenEstimate()
    for _ in range(60):
        length = rng.randrange(50, 4000)
        estimate.learn(length, round(length / bytes_per_token + template))
    for length in (100, 1000, 10_000):
        assert estimate.tokens(text(length)) == pytest.approx(
            length / bytes_per_token + template, rel=0.1, abs=12
        )


def test_prompts_of_one_length_teach_that_length() -> None:
    estimate = TokenEstimate()
    for _ in range(50):
        estimate.learn(1000, 250)
    assert estimate.tokens(text(1000)) == pytest.approx(250, rel=0.1)


def test_a_model_that_changes_is_learned_anew() -> None:
    estimate = TokenEstimate()
    for tokens in (500, 200):
        for _ in range(200):
            estimate.learn(1000, tokens)
    assert estimate.tokens(text(1000)) == pytest.approx(200, rel=0.15)


def test_nothing_is_refused_that_a_language_has() -> None:
    estimate = TokenEstimate()
    assert estimate.least(text(6000)) <= 6000 / 6.0  # English prose has up to 5 bytes to a token
    for _ in range(60):
        estimate.learn(12_000, 1000)  # a tokenizer of its own kind
    assert estimate.least(text(12_000)) <= 1000


def test_an_answer_without_a_bound_is_expected_to_be_as_long_as_they_are() -> None:
    estimate = TokenEstimate()
    assert estimate.answer() == 1024
    for _ in range(200):
        estimate.learn_answer(20)
    assert estimate.answer() == pytest.approx(80, rel=0.1)


def test_only_text_that_was_counted_teaches() -> None:
    estimate = TokenEstimate()
    learn(
        estimate,
        token_demand_of("/v1/completions", {"prompt": [1, 2, 3]}),
        tokens_in=3,
        tokens_out=9,
        is_ended=False,
    )
    assert "0 seen" in repr(estimate)
    learn(
        estimate,
        token_demand_of("/v1/completions", {"prompt": ["abc", "abcdef"]}),
        tokens_in=8,
        tokens_out=9,
        is_ended=True,
    )
    assert "1 seen" in repr(estimate)


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**8)), max_size=30))
def test_whatever_an_engine_counts_an_estimate_stays_sane(seen: list[tuple[int, int]]) -> None:
    estimate = TokenEstimate()
    for text_bytes, tokens in seen:
        estimate.learn(text_bytes, tokens)
    assert 0 <= estimate.least(text(10_000)) <= estimate.tokens(text(10_000)) <= 10_000 * 2 + 4097


def test_revisions_are_told_apart_and_the_oldest_are_forgotten() -> None:
    estimates = TokenEstimates()
    first = estimates.of("a")
    assert estimates.of("a") is first
    for n in range(MAX_KNOWN):
        estimates.of(str(n))
    assert estimates.of("a") is not first
