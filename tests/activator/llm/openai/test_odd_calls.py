"""Calls that are well formed and odd: none may cost a slot, hide what it took, or reach into an
engine's inside."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from activator.calls.attempt import Attempt
from activator.calls.caller import Caller
from activator.http.sse import HOLD_BYTES
from activator.llm.openai.call import EngineCall
from activator.llm.openai.parser import BodyParser, StreamParser
from activator.llm.openai.request import OpenAIRequest, parsed
from activator.llm.request_size import CHAT, COMPLETIONS, EMBEDDINGS, token_demand_of
from activator.quotas.token_reservation import TokenReservation
from pilotlight import errors
from pilotlight.spec.engines import Task
from pilotlight.spec.function import Clocks
from tests.activator.llm.openai.conftest import Shop, chat, llm
from tests.fakes.routes import route_of, target_of

BASE = "/fn/shop/assistant"


def in_flight(shop: Shop) -> int:
    return sum(throttler.in_flight for throttler in shop.edge.scaler.throttlers())


def use() -> TokenReservation:
    return TokenReservation(estimated_in=10, max_out=10, began_ns=0)


async def test_a_name_that_cannot_be_written_costs_no_slot(shop: Shop) -> None:
    answer = await shop.post(
        chat(model="assistant@\ud83d", max_tokens=1), path=f"{BASE}/v1/chat/completions"
    )

    assert answer.status_code in (200, 400, 404)
    assert in_flight(shop) == 0


@pytest.mark.parametrize("depth", [300, 900, 950, 970, 990, 2000])
async def test_what_is_nested_deeply_is_refused_or_passed_on(shop: Shop, depth: int) -> None:
    deep = json.dumps(chat(max_tokens=1, metadata="@")).replace('"@"', "[" * depth + "]" * depth)
    tools = json.dumps(
        chat(
            max_tokens=1, tools=[{"type": "function", "function": {"name": "x", "parameters": "@"}}]
        )
    )

    for body in (deep, tools.replace('"@"', '{"a":' * depth + "1" + "}" * depth)):
        answer = await shop.post(body.encode())
        assert answer.status_code in (200, 400), answer.text
        assert answer.json().get("choices") or answer.json()["error"]["code"] == "invalid-input"
    assert in_flight(shop) == 0


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
async def test_a_number_beyond_all_numbers_is_none(shop: Shop, number: str) -> None:
    answer = await shop.post(json.dumps(chat(temperature="@")).replace('"@"', number).encode())

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid-input"
    assert shop.edge.fleet.started == []


@pytest.mark.parametrize("piece_bytes", [1, 1000, 200_000])
def test_what_stands_behind_the_usage_does_not_hide_it(piece_bytes: int) -> None:
    """vLLM writes `prompt_logprobs` and `prompt_token_ids` of a chat behind the usage."""
    document = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "assistant",
        "choices": [{"index": 0, "message": {"content": "x" * 100}, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 7,
            "total_tokens": 12,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "prompt_logprobs": [{"1": {"logprob": -1.0}}] * (10 if piece_bytes == 1 else 20_000),
    }
    body = json.dumps(document, separators=(",", ":")).encode()
    counts = use()
    reader = BodyParser(counts, OpenAIRequest(CHAT, chat()), "")

    for at in range(0, len(body), piece_bytes):
        reader.feed(body[at : at + piece_bytes], 0)
    reader.end(200)

    assert (counts.tokens_in, counts.tokens_out, counts.tokens_cached, counts.finish) == (
        7,
        5,
        2,
        "length",
    )


def test_an_event_that_is_passed_on_in_parts_is_passed_on_as_it_is() -> None:
    first, end = b'data: {"a":1}\n\n', b'"}\n\n'
    long = b'data: {"choices":[{"index":0,"text":"' + b"x" * (2 * HOLD_BYTES)
    reader = StreamParser(
        use(), OpenAIRequest(COMPLETIONS, {"model": "m", "prompt": "x", "stream": True})
    )

    out = b"".join(
        (
            reader.feed(first + first + long, 0),
            reader.feed(b"y" * 10, 0),
            reader.feed(end + first, 0),
        )
    )

    assert out == first + first + long + b"y" * 10 + end + first


def test_an_answer_that_says_no_usage_is_taken_as_long_as_it_was_estimated() -> None:
    counts = use()
    counts.begin("f@1")
    counts.on_piece(1, 1)
    counts.close(status=200, outcome="ok")

    assert (counts.tokens_in, counts.tokens_out) == (10, 1)


@pytest.mark.parametrize(
    "name,value",
    [
        ("priority", -100),
        ("kv_transfer_params", {"remote_host": "x"}),
        ("ec_transfer_params", {"x": 1}),
        ("vllm_xargs", {"x": 1}),
        ("prompt_embeds", "AAAA"),
    ],
)
async def test_who_is_not_the_owner_does_not_reach_into_an_engine(
    shop: Shop, name: str, value: Any
) -> None:
    shop.edge.add_tenant("acme")
    shop.edge.add_tenant("globex", tenant="t-2")
    shop.edge.add_key("theirs", tenant="t-2")
    shop.edge.add(route_of(llm("open", access=("*",))))

    answer = await shop.post(
        chat(model="shop/open", max_tokens=1, **{name: value}),
        path="/t/acme/v1/chat/completions",
        key="theirs",
    )
    unset: dict[str, Any] = {name: None}
    none = await shop.post(
        chat(model="shop/open", max_tokens=1, **unset),
        path="/t/acme/v1/chat/completions",
        key="theirs",
    )

    assert (answer.status_code, none.status_code) == (400, 200), answer.text
    assert answer.json()["error"]["param"] == name


def test_another_tenants_texts_are_salted_for_embeddings_too() -> None:
    asked = OpenAIRequest(EMBEDDINGS, {"model": "m", "input": "x", "cache_salt": "mine"})
    asked.salt = "theirs"

    body = json.loads(asked.written_for(target_of(llm(task=Task.EMBED))))

    assert body["cache_salt"] == "theirs"


def test_a_list_of_prompts_has_an_end() -> None:
    assert token_demand_of(COMPLETIONS, {"prompt": ["x"] * 2048}).answers == 2048
    with pytest.raises(errors.InvalidInput, match="prompt"):
        token_demand_of(COMPLETIONS, {"prompt": ["x"] * (2048 + 1)})
    with pytest.raises(errors.InvalidInput, match="prompt"):
        token_demand_of(COMPLETIONS, {"prompt": ["x"] * 100, "n": 100})
    with pytest.raises(errors.InvalidInput, match="input"):
        token_demand_of(EMBEDDINGS, {"input": [[1]] * (2048 + 1)})


def test_parsed_refuses_what_is_no_json() -> None:
    with pytest.raises(errors.InvalidInput):
        parsed(b'{"a": NaN}')


@pytest.mark.parametrize("ago_s, is_generating", [(0.0, True), (400.0, False), (None, False)])
def test_an_engine_that_writes_when_its_calls_time_is_over_is_not_stuck(
    ago_s: float | None, is_generating: bool
) -> None:
    counts = TokenReservation(estimated_in=10, max_out=10, began_ns=0)
    if ago_s is not None:
        counts.on_piece(time.monotonic_ns() - int(ago_s * 1e9))
    target = target_of(llm(clocks=Clocks(execution_s=6000)))
    call = EngineCall(
        OpenAIRequest(CHAT, chat()),
        tokens=counts,
        id="req-1",
        target=target,
        method="",
        caller=Caller(key_id="k"),
    )

    attempt = Attempt(call, None)  # type: ignore[arg-type]  # it needs no slot to say so
    assert attempt._is_generating is is_generating
