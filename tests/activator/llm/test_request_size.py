"""What a request in OpenAI's shape asks for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.llm.request_size import CHAT, COMPLETIONS, EMBEDDINGS, token_demand_of, write_cap
from pilotlight import errors
from tests.activator.llm.asking import chat


def test_a_chat_is_one_prompt_of_all_its_texts() -> None:
    asked = token_demand_of(CHAT, chat("hälló", max_tokens=5, n=3))
    assert (asked.text_bytes, len(asked.prompts), asked.max_tokens, asked.answers) == (7, 1, 5, 3)
    assert asked.is_text


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert token_demand_of(CHAT, chat(max_tokens=5, max_completion_tokens=7)).max_tokens == 7


def test_tools_are_part_of_the_prompt_and_pictures_are_no_text() -> None:
    assert token_demand_of(CHAT, chat("hi", tools=[{"type": "function"}])).text_bytes > 20
    parts = [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": "data:…"}},
    ]
    asked = token_demand_of(CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert (asked.text_bytes, asked.is_text) == (11, False)


def test_a_completion_may_have_several_prompts_and_tokens_for_text() -> None:
    assert token_demand_of(COMPLETIONS, {"prompt": ["a", "bb"], "n": 2}).answers == 4
    assert token_demand_of(COMPLETIONS, {"prompt": [1, 2, 3]}).prompts[0].tokens == 3
    assert [
        size.tokens for size in token_demand_of(COMPLETIONS, {"prompt": [[1, 2], [3]]}).prompts
    ] == [
        2,
        1,
    ]
    assert token_demand_of(COMPLETIONS, {"prompt": "a"}).default_tokens == 16


def test_embeddings_have_no_answers() -> None:
    assert token_demand_of(EMBEDDINGS, {"input": ["a", "b"], "max_tokens": 0}).answers == 0


def test_runs_of_white_space_may_be_few_tokens() -> None:
    size = token_demand_of(COMPLETIONS, {"prompt": "a" + " " * 1000}).prompts[0]
    assert size.text_bytes == 1001
    assert size.packed_bytes <= 2


@pytest.mark.parametrize(
    "path, body, key",
    [
        pytest.param(CHAT, chat(max_tokens=0), "max_tokens", id="none"),
        pytest.param(CHAT, chat(max_completion_tokens=-1), "max_completion_tokens", id="negative"),
        pytest.param(CHAT, chat(max_tokens=True), "max_tokens", id="a truth"),
        pytest.param(CHAT, chat(max_tokens="9" * 100), "max_tokens", id="text"),
        pytest.param(CHAT, chat(n=0), "n", id="no answers"),
        pytest.param(CHAT, chat(n=10**9), "n", id="too many answers"),
        pytest.param(COMPLETIONS, {"prompt": "a", "best_of": 1.5}, "best_of", id="half an answer"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(
    path: str, body: dict[str, Any], key: str
) -> None:
    with pytest.raises(errors.InvalidInput, match=rf"{key} = ") as caught:
        token_demand_of(path, body)
    assert caught.value.detail["parameter"] == key
    assert len(str(caught.value)) < 120


def test_who_wants_its_prompt_back_may_ask_for_no_tokens() -> None:
    assert (
        token_demand_of(COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 0}).max_tokens == 0
    )


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["content", "text", "role", "tool_calls"]), inner)
    ),
    max_leaves=8,
)


@given(
    st.sampled_from([CHAT, COMPLETIONS, EMBEDDINGS]),
    st.dictionaries(st.sampled_from(["messages", "prompt", "input", "tools", "n"]), _JSON),
)
def test_whatever_comes_is_read_or_refused(path: str, body: dict[str, Any]) -> None:
    try:
        asked = token_demand_of(path, body)
    except errors.InvalidInput:
        return
    assert asked.prompts
    assert all(size.text_bytes >= size.packed_bytes >= 0 for size in asked.prompts)


def test_a_cap_is_written_where_the_engine_looks_for_it() -> None:
    body = chat(max_tokens=500)
    write_cap(CHAT, body, 64)
    assert (body.get("max_tokens"), body["max_completion_tokens"]) == (None, 64)
    body = {"prompt": "a"}
    write_cap(COMPLETIONS, body, 8)
    assert body == {"prompt": "a", "max_tokens": 8}
    write_cap(COMPLETIONS, body, None)
    write_cap(EMBEDDINGS, body, 3)
    assert body == {"prompt": "a", "max_tokens": 8}
