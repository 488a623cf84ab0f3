"""The OpenAI-compatible API, asked by OpenAI's own client."""

from __future__ import annotations

import json

from tests.activator.openai.conftest import Shop, chat, events_of


async def test_a_chat_is_answered_and_says_which_model_it_was(shop: Shop) -> None:
    answer = await shop.client.chat.completions.create(**chat(max_tokens=4))

    assert answer.model == "shop/assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


async def test_a_stream_comes_in_pieces_without_the_usage_that_nobody_asked_for(shop: Shop) -> None:
    whole = await shop.client.chat.completions.create(**chat(max_tokens=4))
    stream = await shop.client.chat.completions.create(**chat(max_tokens=4), stream=True)
    pieces = [piece async for piece in stream]

    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert [piece.usage for piece in pieces] == [None] * 5
    assert pieces[-1].choices[0].finish_reason == "length"


async def test_a_stream_ends_with_why_it_did_and_what_it_cost(shop: Shop) -> None:
    answer = await shop.post(chat(max_tokens=3, stream=True))
    *_, done, end = events_of(answer.text)

    assert done == "data: [DONE]"
    name, _, data = end.partition("\n")
    told = json.loads(data.removeprefix("data: "))
    assert name == "event: end"
    assert (told["finish_reason"], told["tokens_out"], told["start"]) == ("length", 3, "COLD")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert '"usage"' not in answer.text
