"""Reading an engine's answers as they go by, in the words of vLLM 0.32."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from activator.llm.openai.parser import (
    BodyParser,
    StreamParser,
    as_error,
    read_whole,
    renamed,
    tokens_of,
)
from activator.llm.openai.request import OpenAIRequest
from activator.llm.openai.responses import as_chunk
from activator.llm.request_size import CHAT
from activator.quotas.token_reservation import TokenReservation
from activator.worker_client.connection import WorkerConnectionLost
from pilotlight.spec.engines import MAX_TOKENS
from tests.activator.llm.openai.conftest import chat

DONE = b"data: [DONE]\n\n"


def use() -> TokenReservation:
    return TokenReservation(estimated_in=10, max_out=10, began_ns=0)


def piece(
    text: str = " ho",
    *,
    spoken: int | None = 1,
    choice: int = 0,
    finish: str | None = None,
    **delta: Any,
) -> bytes:
    """One event of a chat, its members in vLLM's order."""
    body: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "assistant",
        "choices": [
            {
                "index": choice,
                "delta": {"content": text, **delta},
                "logprobs": None,
                "finish_reason": finish,
                "token_ids": None,
            }
        ],
    }
    if spoken is not None:
        body["usage"] = {
            "prompt_tokens": 5,
            "total_tokens": 5 + spoken,
            "completion_tokens": spoken,
            "completion_tokens_details": None,
        }
    return (
        b"data: " + json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
    )


def last(spoken: int, *, cached: int = 0) -> bytes:
    usage = {
        "prompt_tokens": 5,
        "total_tokens": 5 + spoken,
        "completion_tokens": spoken,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "assistant",
        "choices": [],
        "usage": usage,
    }
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def without_usage(event: bytes) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return {key: value for key, value in body.items() if key != "usage"}


def reading(counts: TokenReservation, **more: Any) -> StreamParser:
    return StreamParser(counts, OpenAIRequest(CHAT, chat(stream=True, **more)))


def test_usage_is_read_and_taken_out_again() -> None:
    counts = use()
    reader = reading(counts)
    given = [piece(spoken=n) for n in (1, 2, 3)]

    out = [reader.feed(event, 1000 * n) for n, event in enumerate(given, 1)]

    assert [json.loads(event.removeprefix(b"data: ")) for event in out] == [
        without_usage(event) for event in given
    ]
    assert reader.feed(last(3, cached=4) + DONE, 9000) == b""
    assert (counts.tokens_in, counts.tokens_out, counts.tokens_cached) == (5, 3, 4)
    assert (counts.first_token_ns, counts.last_ns, reader.is_done) == (1000, 3000, True)


def test_usage_is_left_where_it_was_asked_for() -> None:
    at_end = reading(use(), stream_options={"include_usage": True})
    always = reading(use(), stream_options={"include_usage": True, "continuous_usage_stats": True})

    assert b"usage" not in at_end.feed(piece(), 1)
    assert at_end.feed(last(1), 2) == last(1)
    assert always.feed(piece(), 1) == piece()
    assert always.feed(last(1), 2) == last(1)


def test_pieces_are_put_together_wherever_they_were_cut() -> None:
    whole = piece(" né") + piece(" ☃", spoken=2) + last(2) + DONE
    expected = reading(use()).feed(whole, 1)
    for size in (1, 7, 50):
        counts = use()
        reader = reading(counts)
        out = b"".join(reader.feed(whole[at : at + size], at) for at in range(0, len(whole), size))
        assert out == expected
        assert (counts.tokens_out, reader.is_done) == (2, True)


@pytest.mark.parametrize(
    "text",
    [
        '","usage":{"prompt_tokens":9}}',
        '"choices":[]',
        '"finish_reason":"length"',
        "\\",
        'data: {"error": 1}',
    ],
)
def test_what_a_model_says_is_not_taken_for_what_its_engine_says(text: str) -> None:
    counts = use()
    out = reading(counts).feed(piece(text), 1)

    assert json.loads(out.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == text
    assert (counts.tokens_in, counts.finish) == (5, "")


def test_each_choice_counts_for_itself() -> None:
    counts = use()
    reader = reading(counts, n=2)
    for event in (
        piece(spoken=1),
        piece(choice=1, spoken=1),
        piece(spoken=2),
        piece(choice=1, spoken=2, finish="stop"),
    ):
        reader.feed(event, 1)

    assert counts.tokens_out == 4
    assert counts.finish == "stop"
    reader.feed(last(4), 1)
    assert counts.tokens_out == 4


def test_a_stream_of_very_many_choices_takes_no_more_time_than_another() -> None:
    event = b'data: {"choices":[{"index":%d}],"usage":{"completion_tokens":1}}\n\n'

    def work_s(choices: int) -> float:
        counts = use()
        parser = reading(counts)
        events = [event % (number % choices) for number in range(15_000)]
        began = time.process_time()
        for number, data in enumerate(events):
            parser.feed(data, number)
        assert counts.tokens_out == min(10, choices)
        return time.process_time() - began

    assert work_s(10_000) < 4 * work_s(1)  # a sum over all of them takes ten times as long


def test_a_number_of_thousands_of_digits_is_cut() -> None:
    assert tokens_of(json.loads('{"completion_tokens":%s}' % ("9" * 4000))) == (0, MAX_TOKENS, 0)


def test_an_answer_full_of_the_names_of_its_members_is_read_at_its_end() -> None:
    counts = use()
    body = BodyParser(counts, OpenAIRequest(CHAT, chat()), "")
    noise = b'"usage"' * 9000
    began = time.process_time()
    for _ in range(100):
        body.feed(noise, 1)
    noise_s = time.process_time() - began
    began = time.process_time()
    for _ in range(100):
        body.feed(b"x" * len(noise), 1)
    assert noise_s < 50 * (time.process_time() - began) + 0.1  # 9000 looks take 200 times as long
    body.feed(b',"usage":{"prompt_tokens":5,"completion_tokens":3}}', 1)
    body.end(200)
    assert (counts.tokens_in, counts.tokens_out) == (5, 3)


def test_the_piece_that_only_begins_is_no_token() -> None:
    counts = use()
    reader = reading(counts)
    reader.feed(piece("", spoken=0, role="assistant"), 5)
    assert counts.first_token_ns == 0
    reader.feed(piece(spoken=3), 7)
    assert (counts.first_token_ns, counts.tokens_out) == (7, 3)


def test_an_engine_that_says_no_usage_is_counted_by_its_pieces() -> None:
    counts = use()
    reader = reading(counts)
    reader.feed(piece("", spoken=None, role="assistant"), 1)
    out = reader.feed(piece(spoken=None) + piece(spoken=None, finish="length"), 1)

    assert (counts.tokens_out, counts.finish) == (2, "length")
    assert out == piece(spoken=None) + piece(spoken=None, finish="length")


def test_an_error_in_the_stream_ends_it() -> None:
    reader = reading(use())
    error = {
        "message": "EngineCore encountered an issue.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    out = reader.feed(
        piece()
        + b"data: "
        + json.dumps({"error": error}, separators=(",", ":")).encode()
        + b"\n\n"
        + DONE,
        1,
    )

    assert (out.count(b"\n\n"), reader.error) == (1, error)
    assert reader.collected(200, b"")[0] == 500


def test_an_error_that_cannot_be_read_is_one_all_the_same() -> None:
    reader = reading(use())
    reader.feed(b'data: {"error":oops\n\n', 1)

    assert reader.error is not None


def test_what_does_not_look_as_expected_is_passed_on() -> None:
    events = b'data: {"choices":[],"usage":}\n\n: a comment\n\ndata: 7\n\n'

    assert reading(use()).feed(events, 1) == events


def test_a_stream_that_just_stops_is_not_over() -> None:
    reader = reading(use())
    reader.feed(piece(), 1)

    with pytest.raises(WorkerConnectionLost, match="before its end"):
        reader.collected(200, b"")


def test_a_whole_answer_says_its_usage_at_its_end() -> None:
    counts = use()
    usage = {
        "prompt_tokens": 7,
        "total_tokens": 9,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    body = json.dumps(
        {
            "model": "assistant",
            "choices": [{"text": '"usage":{', "finish_reason": "stop"}],
            "usage": usage,
            "x": None,
        },
        separators=(",", ":"),
    ).encode()
    read_whole(body, counts)

    assert (counts.tokens_in, counts.tokens_out, counts.tokens_cached, counts.finish) == (
        7,
        2,
        3,
        "stop",
    )
    counts = use()
    tail = BodyParser(counts, OpenAIRequest(CHAT, chat()), "assistant")
    for at in range(0, len(body), 10):
        tail.feed(body[at : at + 10], 0)
    tail.end(200)
    assert (counts.tokens_in, counts.tokens_out) == (7, 2)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b'{"usage":{',
        b'{"usage":{"prompt_tokens":"x"}}',
        b'{"usage":{"prompt_tokens":-1}}',
    ],
)
def test_a_whole_answer_that_says_nothing_counts_nothing(body: bytes) -> None:
    counts = use()
    read_whole(body, counts)

    assert (counts.tokens_in, counts.tokens_out) == (0, 0)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 50_000], ids=["lists", "objects"])
def test_an_answer_that_is_nested_without_end_is_no_fault_of_ours(body: bytes) -> None:
    error = json.loads(as_error(body, 400))["error"]
    assert error["message"].startswith("the engine answered 400: ")
    assert as_chunk(body) == body


def test_a_whole_answer_names_the_model_as_its_caller_did() -> None:
    body = b'{"id":"x","model":"assistant","choices":[{"message":{"content":"\\"model\\":\\"assistant\\""}}]}'

    assert renamed(body, served="assistant", model="shop/assistant") == body.replace(
        b'"model":"assistant"', b'"model":"shop/assistant"', 1
    )
