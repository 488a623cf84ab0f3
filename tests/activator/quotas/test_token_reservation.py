"""What a call of a language model used: counted from its pieces and the engine's own words."""

from __future__ import annotations

from activator.fairness.queue_priority import DEFAULT_RANK
from activator.quotas.token_reservation import TokenReservation

MS = 1_000_000


def use(estimated_in: int = 100, max_out: int = 50) -> TokenReservation:
    return TokenReservation(estimated_in=estimated_in, max_out=max_out, began_ns=10 * MS)


def test_the_engines_own_count_is_what_counts() -> None:
    one = use()
    one.on_piece(30 * MS)
    one.on_piece(40 * MS)
    one.on_usage(87, 9, 64)
    one.on_finish("stop")
    one.close(status=200, outcome="ok")
    assert (one.tokens_in, one.tokens_out, one.tokens_cached, one.finish) == (87, 9, 64, "stop")
    assert one.used == 96
    assert one.reserved == 150


def test_where_the_engine_does_not_say_what_was_delivered_counts() -> None:
    one = use()
    one.on_usage(87, 1)
    one.on_piece(30 * MS)
    one.on_piece(41 * MS, 3)
    one.close(status=502, outcome="error")
    assert (one.tokens_in, one.tokens_out, one.finish) == (87, 5, "error")


def test_an_attempt_that_broke_before_its_first_token_took_none() -> None:
    one = use()
    one.on_usage(87, 0)
    one.close(status=502, outcome="error")
    assert (one.tokens_in, one.tokens_out, one.used) == (0, 0, 0)


def test_what_the_engine_refused_took_no_tokens_and_did_not_end() -> None:
    one = use()
    one.close(status=400, outcome="error")
    assert (one.used, one.finish) == (0, "")


def test_a_caller_that_leaves_before_the_first_token_pays_its_prompt_as_estimated() -> None:
    one = use()
    one.close(status=499, outcome="cancelled")
    assert (one.tokens_in, one.tokens_out, one.finish) == (100, 0, "cancelled")


def test_a_caller_that_leaves_later_pays_prompt_and_what_was_delivered() -> None:
    one = use()
    one.on_piece(30 * MS)
    one.on_usage(87, 4)
    one.close(status=499, outcome="cancelled")
    assert (one.tokens_in, one.tokens_out, one.finish) == (87, 4, "cancelled")


def test_who_leaves_after_the_last_token_does_not_change_how_it_ended() -> None:
    one = use()
    one.on_usage(87, 4)
    one.on_finish("length")
    one.close(status=499, outcome="cancelled")
    assert one.finish == "length"


def test_choices_of_a_stream_are_added_up() -> None:
    one = use()
    one.on_usage(10, 1, choice=0)
    one.on_usage(10, 2, choice=0)
    one.on_usage(10, 3, choice=2)
    one.on_usage(10, 1, choice=1)
    assert (one.tokens_in, one.tokens_out) == (10, 6)
    one.on_usage(10, 7)
    assert one.tokens_out == 7


def test_the_first_token_is_timed_from_the_request_and_gaps_from_piece_to_piece() -> None:
    one = use()
    assert one.first_token_ms == 0
    for at in (25, 26, 36, 46):
        one.on_piece(at * MS)
    assert one.first_token_ms == 15
    assert sum(one.gaps.values()) == 3
    assert one.gaps[0] == 1  # one of a millisecond


def test_a_further_attempt_counts_from_nothing_and_what_was_used_stays_used() -> None:
    one = use()
    one.on_piece(30 * MS)
    one.on_usage(87, 4)
    one.close(status=502, outcome="error")
    one.begin("f-2@v1")
    assert (one.tokens_in, one.tokens_out, one.finish, one.first_token_ms, one.revision) == (
        0,
        0,
        "",
        0,
        "f-2@v1",
    )
    one.on_usage(87, 10)
    one.close(status=200, outcome="ok")
    assert one.used == 91 + 97


def test_engines_words_are_translated() -> None:
    for said, meant in {
        "abort": "cancelled",
        "function_call": "tool_calls",
        "length": "length",
        "whatever": "stop",
    }.items():
        one = use()
        one.on_finish(said)
        assert one.finish == meant


def test_it_waits_with_the_weight_of_what_it_reserved() -> None:
    assert use().rank(DEFAULT_RANK).cost == 150
    assert use(estimated_in=0, max_out=0).rank(DEFAULT_RANK).cost == 1
