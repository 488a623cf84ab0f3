"""The OpenAI-compatible API, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from pilotlight.spec.engines import Task, TokenLimits
from pilotlight.spec.traffic import Arm, ExperimentTraffic
from tests.activator.conftest import KEY, PATIENCE_S
from tests.activator.llm.openai.conftest import Shop, chat, events_of, llm
from tests.activator.test_gateway import until
from tests.fakes.routes import TENANT, route_of, split_route

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
DOCUMENT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}


def end_in(text: str) -> dict[str, Any]:
    """What the end event says."""
    name, _, data = events_of(text)[-1].partition("\n")
    assert name == "event: end"
    told: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return told


async def test_a_chat_is_answered_and_says_which_model_it_was(shop: Shop) -> None:
    answer = await shop.client.chat.completions.create(**chat(max_tokens=4))

    assert answer.model == "shop/assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


async def test_an_answer_carries_what_every_answer_does(shop: Shop) -> None:
    answer = await shop.post(chat(max_tokens=1))

    assert answer.headers["pilotlight-start"] == "COLD"
    assert answer.headers["pilotlight-revision"] == "v1-abcdef"
    assert answer.headers["pilotlight-cost"]
    assert answer.headers["x-request-id"] in answer.json()["id"]


async def test_a_stream_comes_in_pieces_without_the_usage_that_nobody_asked_for(shop: Shop) -> None:
    whole = await shop.client.chat.completions.create(**chat(max_tokens=4))
    stream = await shop.client.chat.completions.create(**chat(max_tokens=4), stream=True)
    pieces = [piece async for piece in stream]

    assert (
        "".join(piece.choices[0].delta.content or "" for piece in pieces)
        == whole.choices[0].message.content
    )
    assert [piece.usage for piece in pieces] == [None] * 5
    assert pieces[-1].choices[0].finish_reason == "length"


async def test_a_stream_says_its_usage_to_who_asks(shop: Shop) -> None:
    stream = await shop.client.chat.completions.create(
        **chat(max_tokens=4), stream=True, stream_options={"include_usage": True}
    )
    *pieces, last = [piece async for piece in stream]

    assert [piece.usage for piece in pieces] == [None] * 5
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 4


async def test_a_stream_ends_with_why_it_did_and_what_it_cost(shop: Shop) -> None:
    answer = await shop.post(chat(max_tokens=3, stream=True))

    told = end_in(answer.text)
    assert events_of(answer.text)[-2] == "data: [DONE]"
    assert (told["finish_reason"], told["tokens_out"], told["start"]) == ("length", 3, "COLD")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert '"usage"' not in answer.text


async def test_an_answer_stops_where_the_model_does(shop: Shop) -> None:
    whole = await shop.client.chat.completions.create(**chat("!stop", max_tokens=9))
    streamed = await shop.post(chat("!stop", max_tokens=9, stream=True))

    assert whole.choices[0].finish_reason == "stop"
    assert (end_in(streamed.text)["finish_reason"], end_in(streamed.text)["tokens_out"]) == (
        "stop",
        3,
    )


async def test_the_synchronous_client_gets_the_same(shop: Shop) -> None:
    def ask() -> tuple[str | None, str, list[str]]:
        with openai.OpenAI(
            api_key=KEY, base_url=f"{shop.edge.url}/v1", max_retries=0, timeout=PATIENCE_S
        ) as client:
            whole = client.chat.completions.create(**chat(max_tokens=3))
            streamed = client.chat.completions.create(**chat(max_tokens=3), stream=True)
            words = "".join(piece.choices[0].delta.content or "" for piece in streamed)
            return (
                whole.choices[0].message.content,
                words,
                [model.id for model in client.models.list()],
            )

    whole, streamed, models = await asyncio.to_thread(ask)

    assert whole == streamed
    assert models == ["shop/assistant", "shop/assistant:pirate"]


async def test_texts_are_completed(shop: Shop) -> None:
    whole = await shop.client.completions.create(
        model="shop/assistant", prompt="once upon", max_tokens=4
    )
    stream = await shop.client.completions.create(
        model="shop/assistant", prompt="once upon", max_tokens=4, stream=True
    )
    tokens = await shop.client.completions.create(model="shop/assistant", prompt=[1001, 1002])

    assert "".join([piece.choices[0].text async for piece in stream]) == whole.choices[0].text
    assert tokens.usage is not None
    assert (tokens.usage.prompt_tokens, tokens.usage.completion_tokens) == (2, 16)


async def test_texts_are_embedded_by_a_model_that_does(shop: Shop) -> None:
    shop.edge.add(route_of(llm("embedder", task=Task.EMBED)))
    answer = await shop.client.embeddings.create(
        model="shop/embedder", input=["a text", "another"], encoding_format="float"
    )

    assert [len(one.embedding) for one in answer.data] == [8, 8]
    assert answer.model == "shop/embedder"
    (record,) = (await shop.edge.settle()).values()
    assert (record.tokens_in, record.tokens_out) == (answer.usage.prompt_tokens, 0)


async def test_a_long_answer_is_passed_on_as_it_comes_and_counted_all_the_same(shop: Shop) -> None:
    shop.edge.add(route_of(llm("embedder", task=Task.EMBED)))
    texts = [f"text {n}" for n in range(1500)]
    answer = await shop.client.embeddings.create(
        model="shop/embedder", input=texts, encoding_format="float"
    )

    assert len(answer.data) == 1500
    (record,) = (await shop.edge.settle()).values()
    assert (record.tokens_in, record.status) == (answer.usage.prompt_tokens, 200)


async def test_tools_and_documents_are_the_engines_to_understand(shop: Shop) -> None:
    called = await shop.client.chat.completions.create(
        **chat(tools=[TOOL], tool_choice="required", max_tokens=4)
    )
    document = await shop.client.chat.completions.create(
        **chat(response_format=DOCUMENT, max_tokens=4)
    )

    assert called.choices[0].finish_reason == "tool_calls"
    assert called.choices[0].message.tool_calls is not None
    assert called.choices[0].message.tool_calls[0].function.name == "weather"
    assert json.loads(document.choices[0].message.content or "") == {"answer": "ba"}


async def test_several_choices_are_counted_together(shop: Shop) -> None:
    answer = await shop.client.chat.completions.create(**chat(n=3, max_tokens=2))

    assert len(answer.choices) == 3
    (record,) = (await shop.edge.settle()).values()
    assert (record.tokens_out, record.finish) == (6, "length")


async def test_the_record_says_what_an_answer_took(shop: Shop) -> None:
    await shop.post(chat(max_tokens=3, stream=True))
    await shop.client.chat.completions.create(**chat(max_tokens=5))

    streamed, whole = sorted(
        (await shop.edge.settle()).values(), key=lambda record: record.tokens_out
    )
    assert (streamed.tokens_out, streamed.finish, streamed.first_token_ms > 0) == (
        3,
        "length",
        True,
    )
    assert (whole.tokens_out, whole.finish, whole.status, whole.outcome) == (5, "length", 200, "ok")
    assert streamed.tokens_in == whole.tokens_in > 0


async def test_a_caller_that_stops_reading_at_the_end_was_served_well(shop: Shop) -> None:
    """OpenAI's clients close the connection at `[DONE]`, before the end event."""
    stream = await shop.client.chat.completions.create(**chat(max_tokens=3), stream=True)
    assert len([piece async for piece in stream]) == 4

    (record,) = (await shop.edge.settle()).values()
    assert (record.status, record.outcome, record.finish) == (200, "ok", "length")


async def test_an_adapter_is_a_model_too(shop: Shop) -> None:
    plain = await shop.client.chat.completions.create(**chat(max_tokens=8))
    for model in ("shop/assistant:pirate", "assistant:pirate", "pirate"):
        adapted = await shop.client.chat.completions.create(
            **{**chat(max_tokens=8), "model": model}
        )
        assert adapted.model == model
        assert adapted.choices[0].message.content != plain.choices[0].message.content


async def test_a_bare_name_will_do_while_only_one_has_it(shop: Shop) -> None:
    answer = await shop.client.chat.completions.create(
        **{**chat(max_tokens=1), "model": "assistant"}
    )
    assert answer.model == "assistant"

    shop.edge.add(route_of(llm(), app="other"))
    with pytest.raises(
        openai.BadRequestError, match="use one of other/assistant, shop/assistant"
    ) as several:
        await shop.client.chat.completions.create(**{**chat(), "model": "assistant"})
    assert several.value.param == "model"


async def test_a_revision_is_asked_for_by_tag_by_name_or_by_header(shop: Shop) -> None:
    shop.edge.add(split_route(llm(), {"v1-aaa": 100}, named=("v2-bbb",), tags={"beta": "v2-bbb"}))

    for asked, revision in (("", "v1-aaa"), ("@beta", "v2-bbb"), ("@v2-bbb", "v2-bbb")):
        answer = await shop.post({**chat(max_tokens=1), "model": f"shop/assistant{asked}"})
        assert (answer.status_code, answer.headers["pilotlight-revision"]) == (200, revision)
    answer = await shop.post(chat(max_tokens=1), **{"pilotlight-tag": "beta"})
    assert answer.headers["pilotlight-revision"] == "v2-bbb"
    assert [one["id"] for one in (await shop.get("/v1/models")).json()["data"]] == [
        "shop/assistant",
        "shop/assistant@beta",
    ]


async def test_a_chat_is_in_its_experiment_as_every_call_is(shop: Shop) -> None:
    arms = (
        Arm(name="old", revision="v1-aaa", share=0.0001),
        Arm(name="new", revision="v2-bbb", share=99.9999),
    )
    experiment = ExperimentTraffic(id="e-1", salt="s", arms=arms, unit="tenant", percent=100.0)
    shop.edge.add(split_route(llm(), {"v1-aaa": 100}, named=("v2-bbb",), experiment=experiment))
    answer = await shop.post(chat(max_tokens=1))

    assert (answer.headers["pilotlight-arm"], answer.headers["pilotlight-revision"]) == (
        "new",
        "v2-bbb",
    )
    (record,) = (await shop.edge.settle()).values()
    assert (record.experiment, record.arm, record.tokens_out) == ("e-1", "new", 1)


async def test_models_are_listed_and_described(shop: Shop) -> None:
    shop.edge.add(route_of(llm("small", engine={"max_model_len": 64})))
    shop.edge.add(route_of(llm("staged"), environment="staging"))

    listed = [model async for model in shop.client.models.list()]
    assert [model.id for model in listed] == [
        "shop/assistant",
        "shop/assistant:pirate",
        "shop/small",
    ]
    assert {model.object for model in listed} == {"model"}
    assert (
        await shop.client.models.retrieve("shop/assistant:pirate")
    ).id == "shop/assistant:pirate"
    assert (await shop.client.models.retrieve("small")).id == "shop/small"
    assert (await shop.get("/v1/models/shop/small")).json()["max_model_len"] == 64
    with pytest.raises(openai.NotFoundError):
        await shop.client.models.retrieve("nothing")
    assert shop.edge.fleet.started == []


async def test_a_key_sees_what_it_reaches(shop: Shop) -> None:
    shop.edge.add(route_of(llm("small"), app="lab"))
    shop.edge.add_key("narrow", scope="invoke", app="lab", function="small")
    narrow = shop.openai(key="narrow")

    assert [model.id async for model in narrow.models.list()] == ["lab/small"]
    with pytest.raises(openai.PermissionDeniedError):
        await narrow.chat.completions.create(**chat())


async def test_another_tenants_model_does_not_exist_unless_it_is_shared(shop: Shop) -> None:
    shop.edge.add_tenant("acme")
    shop.edge.add_tenant("globex", tenant="t-2")
    shop.edge.add_key("theirs", tenant="t-2")
    theirs = shop.openai(key="theirs", path="/t/acme/v1")

    assert [model.id async for model in theirs.models.list()] == []
    for client in (theirs, shop.openai(key="theirs")):
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(**chat())
        assert unknown.value.code == "model_not_found"

    shop.edge.add(route_of(llm(access=("globex",))))
    assert [model.id async for model in theirs.models.list()] == ["shop/assistant"]
    answer = await theirs.chat.completions.create(**chat(max_tokens=2))
    assert answer.usage is not None
    (record,) = (await shop.edge.settle()).values()
    assert (record.tenant, record.caller, record.tokens_out) == (TENANT, "t-2", 2)


async def test_a_public_model_needs_no_key(shop: Shop) -> None:
    shop.edge.add_tenant("acme")
    shop.edge.add(route_of(llm("open", access=("*",))))

    answer = await shop.post(
        {**chat(max_tokens=1), "model": "shop/open"}, path="/t/acme/v1/chat/completions", key=None
    )
    assert answer.status_code == 200
    hidden = await shop.post(chat(), path="/t/acme/v1/chat/completions", key=None)
    assert (hidden.status_code, hidden.json()["error"]["code"]) == (401, "unauthenticated")


async def test_what_one_tenant_asked_is_not_told_by_the_clock_to_another(shop: Shop) -> None:
    """The engine's memory of prompts is told apart by `cache_salt`, which callers of a shared
    function do not choose."""
    shop.edge.add_tenant("acme")
    shop.edge.add_tenant("globex", tenant="t-2")
    shop.edge.add_key("theirs", tenant="t-2")
    shop.edge.add(route_of(llm(access=("globex",))))
    await shop.post(chat(max_tokens=1, cache_salt="mine"))
    await shop.post(
        chat(max_tokens=1, cache_salt="mine"), path="/t/acme/v1/chat/completions", key="theirs"
    )

    own, foreign = (body["cache_salt"] for body in shop.served.bodies)
    assert own == "mine"
    assert len(foreign) == 32


async def test_tokens_are_priced(shop: Shop) -> None:
    shop.edge.add_tenant("acme", prices="tokens")
    shop.edge.add(route_of(llm()))
    answer = await shop.post(chat(max_tokens=5, stream=True))

    told = end_in(answer.text)
    assert float(told["cost"]) == pytest.approx(told["tokens_in"] * 0.001 + 0.05, abs=0.001)


async def test_quotas_of_tokens_are_told_and_kept(shop: Shop) -> None:
    shop.edge.add_key("thrifty", quotas={"tokens_per_min": 60})
    client = shop.openai(key="thrifty")
    await client.chat.completions.create(**chat(max_tokens=30))
    with pytest.raises(openai.RateLimitError) as refused:
        await client.chat.completions.create(**chat(max_tokens=40))

    assert refused.value.code == "over-quota"
    assert int(refused.value.response.headers["retry-after"]) > 0


async def test_answers_are_cut_under_pressure_and_say_so(shop: Shop) -> None:
    shop.edge.add(
        route_of(llm(limits=TokenLimits(pressured_output_tokens=2), engine={"max_num_seqs": 1}))
    )
    shop.edge.fleet.gate.clear()
    first = asyncio.create_task(shop.post(chat(max_tokens=3)))
    await until(lambda: _waiting(shop) == 1)
    second = asyncio.create_task(shop.post(chat(max_tokens=9)))
    await until(lambda: _waiting(shop) == 2)
    shop.edge.fleet.gate.set()

    assert (await first).json()["usage"]["completion_tokens"] == 3
    assert (await second).json()["usage"]["completion_tokens"] == 2
    assert (await second).headers["pilotlight-degraded"] == "output<=2"


def _waiting(shop: Shop) -> int:
    return sum(scaled.throttler.waiting for scaled in shop.edge.scaler.revisions.values())


async def test_a_trace_that_was_asked_for_is_kept_and_passed_on(shop: Shop) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    await shop.post(chat(max_tokens=1), traceparent=parent)

    (trace,) = shop.edge.traces
    assert "4bf92f3577b34da6a3ce929d0e0e4736" in json.dumps(trace)


async def test_hundreds_of_streams_wait_for_their_turn(shop: Shop) -> None:
    """They hold a place in the queue and no connection to an engine; all of them are served."""
    limits = httpx.Limits(max_connections=1000)
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
        asking = [
            client.post(
                f"{shop.edge.url}/v1/chat/completions",
                json=chat(max_tokens=1, stream=True),
                headers={"authorization": f"Bearer {KEY}"},
            )
            for _ in range(100)
        ]
        answers = await asyncio.gather(*asking)

    assert {answer.status_code for answer in answers} == {200}
    assert {end_in(answer.text)["finish_reason"] for answer in answers} == {"length"}
