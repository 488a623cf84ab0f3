"""What is refused of a body before anything is started, and what an engine gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from activator.llm.openai.errors import ModelNotFound
from activator.llm.openai.request import OpenAIRequest, parsed
from activator.llm.request_size import CHAT, COMPLETIONS, EMBEDDINGS
from pilotlight import errors
from pilotlight.spec.engines import Task
from tests.activator.llm.openai.conftest import chat, llm
from tests.fakes.routes import spec_of, target_of

SCHEMA = {"type": "object", "properties": {"answer": {"type": "string"}}}


def wants(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"temperature": NaN}', b"[" * 3000]
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(errors.InvalidInput, match="body"):
        parsed(body)


@pytest.mark.parametrize(
    "more,parameter",
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"content": "hello"}]}, "messages"),
        ({"model": 7}, "model"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"seed": 1.5}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stop": 7}, "stop"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": wants(None)}, "response_format"),
        ({"response_format": wants({"type": "objekt"})}, "response_format"),
        ({"response_format": wants({"type": "object", "properties": []})}, "response_format"),
        (
            {"response_format": wants({"$schema": "http://127.0.0.1:1/x", "type": 7})},
            "response_format",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_a_chat_that_no_engine_takes_is_refused_by_name(
    more: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(errors.InvalidInput, match=f"^{parameter}: ") as refused:
        OpenAIRequest(CHAT, {**chat(), **more})

    assert refused.value.detail["parameter"] == parameter


@pytest.mark.parametrize("path,name", [(COMPLETIONS, "prompt"), (EMBEDDINGS, "input")])
@pytest.mark.parametrize("given", [None, [], 7, {}, [[]], ["a", 1], [1.5], [True, "x"], [None]])
def test_a_text_that_is_none_is_refused_by_name(path: str, name: str, given: Any) -> None:
    with pytest.raises(errors.InvalidInput, match=f"^{name}: "):
        OpenAIRequest(path, {"model": "m", name: given})


@pytest.mark.parametrize("given", ["a", "", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_texts_and_token_ids_are_taken(given: Any) -> None:
    assert OpenAIRequest(COMPLETIONS, {"model": "m", "prompt": given}).body["prompt"] == given
    assert OpenAIRequest(EMBEDDINGS, {"model": "m", "input": given}).body["input"] == given


@pytest.mark.parametrize(
    "schema",
    [
        SCHEMA,
        {},
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]},
    ],
)
def test_a_schema_is_taken(schema: dict[str, Any]) -> None:
    assert OpenAIRequest(CHAT, chat(response_format=wants(schema))).body[
        "response_format"
    ] == wants(schema)


def test_null_stands_for_a_default() -> None:
    asked = OpenAIRequest(
        CHAT,
        chat(
            stream=None,
            temperature=None,
            stop=None,
            stream_options=None,
            response_format=None,
            model=None,
            tools=None,
        ),
    )

    assert (asked.is_stream, asked.model) == (False, "")


def test_what_is_not_known_here_reaches_the_engine_as_it_came() -> None:
    body = chat(
        top_k=7,
        guided_choice=["a"],
        seed=1,
        logprobs=True,
        stop=["x"],
        n=2,
        tool_choice="auto",
        ünï="☃",
    )

    sent = json.loads(OpenAIRequest(CHAT, dict(body)).written_for(target_of(llm())))

    assert sent == {**body, "model": "assistant"}


def test_a_stream_is_asked_for_its_usage_whatever_its_caller_said() -> None:
    asked = OpenAIRequest(CHAT, chat(stream=True, stream_options={"include_usage": False, "x": 1}))
    sent = json.loads(asked.written_for(target_of(llm())))

    assert sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": True, "x": 1}
    assert (asked.shows_usage, asked.shows_each_usage) == (False, False)


def test_half_a_surrogate_pair_is_no_character() -> None:
    asked = OpenAIRequest(CHAT, chat("\ud800"))

    with pytest.raises(errors.InvalidInput, match="surrogate"):
        asked.written_for(target_of(llm()))


def test_another_function_in_its_place_gets_its_own_name() -> None:
    asked = OpenAIRequest(CHAT, chat())

    assert json.loads(asked.written_for(target_of(llm("small"))))["model"] == "small"
    asked.adapter = "pirate"
    assert (
        json.loads(asked.written_for(target_of(llm("small", lora=("pirate",)))))["model"]
        == "pirate"
    )


def test_what_cannot_answer_it_is_no_stand_in() -> None:
    asked = OpenAIRequest(CHAT, chat())
    asked.adapter = "pirate"

    with pytest.raises(ModelNotFound, match="not a language model"):
        asked.written_for(target_of(spec_of()))
    with pytest.raises(ModelNotFound, match="'pirate'; its adapters are poet"):
        asked.written_for(target_of(llm("small", lora=("poet",))))
    with pytest.raises(errors.InvalidInput, match="embeds text: call it at /v1/embeddings"):
        OpenAIRequest(CHAT, chat()).written_for(target_of(llm("small", task=Task.EMBED)))
