"""What a guard reads of a request: everything but images and sounds."""

from __future__ import annotations

from typing import Any

import pytest

from activator.guards.texts import SEPARATOR, answer_texts, request_text
from pilotlight.errors import TooLarge

MEDIUM = "data:image/png;base64,iVBORw0KGgo="


def texts_of(content: Any) -> list[str]:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    return request_text(body).split(SEPARATOR)


@pytest.mark.parametrize("member", ["image_url", "video_url", "audio_url"])
def test_an_image_or_a_sound_is_no_text(member: str) -> None:
    parts = [{"type": "text", "text": "what is it?"}, {"type": member, member: {"url": MEDIUM}}]
    assert "what is it?" in texts_of(parts)
    assert MEDIUM not in texts_of(parts)
    assert MEDIUM not in texts_of([{"type": member, member: MEDIUM}])


def test_a_text_that_begins_like_an_image_is_read() -> None:
    said = f"{MEDIUM} my address is ada@example.com"
    assert said in texts_of(said)
    assert said in texts_of([{"type": "text", "text": said}])
    assert said in request_text({"prompt": [said, "b"]}).split(SEPARATOR)


def test_an_address_of_an_image_is_read() -> None:
    assert "https://a.example/x?q=1" in texts_of(
        [{"image_url": {"url": "https://a.example/x?q=1"}}]
    )


@pytest.mark.parametrize("name", ["url", "image_url"])
def test_what_begins_like_an_image_is_read_outside_of_messages(name: str) -> None:
    said = f"{MEDIUM} 4111 1111 1111 1111"
    schema = {"type": "object", "properties": {"a": {name: said}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = {"messages": [{"role": "user", "content": "hi", name: said}], "tools": tools}
    assert request_text(body).split(SEPARATOR).count(said) == 2


def test_parts_are_read_as_servers_join_them_also_those_that_are_strings() -> None:
    for parts in ([{"type": "text", "text": "Project"}, "Falcon"], ["Project", "Falcon"]):
        assert {"ProjectFalcon", "Project\nFalcon"} < set(texts_of(parts))


def test_arguments_of_tools_are_read_as_servers_decode_them() -> None:
    calls = [{"function": {"name": "pay", "arguments": r'{"n": "\u0034111 1111"}'}}]
    texts = request_text({"messages": [{"role": "assistant", "tool_calls": calls}]})
    assert {r'{"n": "\u0034111 1111"}', "4111 1111"} < set(texts.split(SEPARATOR))
    calls[0]["function"] = {"name": "pay", "arguments": '"\\u0034'}
    assert '"\\u0034' in request_text({"messages": [{"role": "assistant", "tool_calls": calls}]})
    many = [{"arguments": '["\\n"' + ",1" * 5_000 + "]"}] * 5
    with pytest.raises(TooLarge, match="more than 20000 JSON values"):
        request_text({"messages": [{"role": "assistant", "tool_calls": many}]})


def test_a_large_number_is_read_with_a_fraction_too() -> None:
    assert "4111111111111111.0" in request_text({"documents": [{"n": 4111111111111111.0}]})
    assert "4111111111111111.0" in request_text({"documents": [[4111111111111111.0, 0.5]]})


@pytest.mark.parametrize(
    "logprobs",
    [
        {"content": [{"token": "4111", "bytes": [52]}, {"token": " 1111"}, {"token": None}]},
        {"tokens": ["4111", " 1111"], "top_logprobs": [{"4111": -1.0}]},
    ],
)
def test_tokens_of_logprobs_are_a_text(logprobs: Any) -> None:
    choice = {"index": 3, "message": {"content": ""}, "logprobs": logprobs}
    assert dict(answer_texts({"choices": [choice]})) == {("choices", 3, "logprobs"): "4111 1111"}
