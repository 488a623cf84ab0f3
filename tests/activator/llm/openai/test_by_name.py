"""Engines by the names of functions: invoked, submitted, and as what answers in another's place."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import openai
import pytest

from pilotlight.protocol import CallRecord
from pilotlight.spec.engines import TokenLimits
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.policies import Fallback, Variant
from snapshotter import errors as agent_errors
from tests.activator.llm.openai.conftest import Shop, chat, events_of, llm
from tests.activator.test_gateway import until
from tests.fakes.routes import route_of, spec_of

CHAT = "/v1/chat/completions"


async def by_name(shop: Shop, verb: str, body: Any, **headers: str) -> httpx.Response:
    return await shop.post(body, path=f"/v1/functions/shop/assistant:{verb}", **headers)


async def test_an_engine_is_invoked_with_a_path_and_a_body(shop: Shop) -> None:
    whole = await by_name(shop, "invoke", {"path": CHAT, "body": chat(max_tokens=2)})
    streamed = await by_name(
        shop, "invoke", {"path": CHAT, "body": chat(max_tokens=2, stream=True, model="pirate")}
    )

    assert whole.json()["usage"]["completion_tokens"] == 2
    assert events_of(streamed.text)[-2] == "data: [DONE]"
    assert sorted(record.tokens_out for record in (await shop.edge.settle()).values()) == [2, 2]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"path": "/sleep", "body": {}},
        {"path": CHAT},
        {"path": CHAT, "body": []},
        {"path": CHAT, "body": {}, "x": 1},
    ],
)
@pytest.mark.parametrize("verb", ["invoke", "submit"])
async def test_anything_else_is_refused_as_a_problem(shop: Shop, verb: str, body: Any) -> None:
    answer = await by_name(shop, verb, body)

    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
    assert shop.edge.fleet.started == []


async def result_of(shop: Shop, call_id: str) -> CallRecord:
    held = shop.edge.calls.pending
    await until(
        lambda: (
            (one := held.get(call_id)) is not None and one.record.state in ("SUCCEEDED", "FAILED")
        )
    )
    found = held.get(call_id)
    assert found is not None
    return found.record


def body_of(record: CallRecord) -> str:
    return base64.b64decode(record.result).decode()


async def test_a_chat_is_submitted_and_its_answer_kept(shop: Shop) -> None:
    receipt = (await by_name(shop, "submit", {"path": CHAT, "body": chat(max_tokens=3)})).json()
    record = await result_of(shop, receipt["id"])

    answer = json.loads(body_of(record))
    assert (record.state, answer["usage"]["completion_tokens"], answer["model"]) == (
        "SUCCEEDED",
        3,
        "shop/assistant",
    )
    (usage,) = (await shop.edge.settle()).values()
    assert (usage.tokens_out, usage.finish) == (3, "length")


async def test_a_stream_is_submitted_and_all_its_events_kept(shop: Shop) -> None:
    receipt = (
        await by_name(shop, "submit", {"path": CHAT, "body": chat(max_tokens=3, stream=True)})
    ).json()
    record = await result_of(shop, receipt["id"])

    events = events_of(body_of(record))
    assert (record.state, events[-1]) == ("SUCCEEDED", "data: [DONE]")
    assert "usage" not in body_of(record)
    (usage,) = (await shop.edge.settle()).values()
    assert (usage.tokens_out, usage.finish) == (3, "length")


async def test_an_engine_that_fails_a_submitted_stream_fails_the_call(shop: Shop) -> None:
    receipt = (
        await by_name(shop, "submit", {"path": CHAT, "body": chat("!error", stream=True)})
    ).json()
    record = await result_of(shop, receipt["id"])

    assert (record.state, record.status) == ("FAILED", 500)
    assert "EngineCore" in body_of(record)


async def test_only_what_a_model_runs_for_is_submitted(shop: Shop) -> None:
    answer = await by_name(shop, "submit", {"path": "/tokenize", "body": {"prompt": "x"}})

    assert (answer.status_code, answer.json()["parameter"]) == (400, "path")


@pytest.mark.usefixtures("controller")
async def test_what_a_submitted_call_reserved_of_its_quotas_is_settled_once(shop: Shop) -> None:
    shop.edge.add_key("thrifty", scope="invoke", quotas={"tokens_per_min": 600, "concurrent": 1})
    headers = {"idempotency-key": "same"}
    for _ in range(3):
        sent = {"path": CHAT, "body": chat(max_tokens=100)}
        answer = await shop.post(
            sent, path="/v1/functions/shop/assistant:submit", key="thrifty", **headers
        )
        assert answer.status_code == 202
        await result_of(shop, answer.json()["id"])

    assert shop.edge.quotas.held("key:k-thrifty") == 0
    assert len(await shop.edge.settle()) == 1


async def run_again(shop: Shop, kept: dict[str, Any]) -> CallRecord:
    """What comes of this entry of a journal, as a call that became due."""
    name = f"again-{kept['record']['id']}-{len(kept['body'])}"
    await shop.edge.calls.store({**kept, "due": name, "record": {**kept["record"], "id": name}})
    shop.edge.calls.begin_stored([name], [name])
    return await result_of(shop, name)


async def test_a_submitted_call_outlives_its_activator(shop: Shop) -> None:
    shop.edge.fleet.gate.clear()
    receipt = (
        await by_name(
            shop, "submit", {"path": CHAT, "body": chat(max_tokens=2, model="pirate", stream=True)}
        )
    ).json()
    kept = shop.edge.books.journal.payload(receipt["id"])
    shop.edge.fleet.gate.set()
    await result_of(shop, receipt["id"])
    record = await run_again(shop, kept)

    events = events_of(body_of(record))
    assert (record.state, "usage" in body_of(record)) == ("SUCCEEDED", False)
    assert json.loads(events[0].removeprefix("data: "))["object"] == "chat.completion.chunk"
    assert [body["model"] for body in shop.served.bodies] == ["pirate"] * 2


async def test_a_schedule_calls_an_engine_with_a_path_and_a_body(shop: Shop) -> None:
    shop.edge.fleet.gate.clear()
    receipt = (await by_name(shop, "submit", {"path": CHAT, "body": chat(max_tokens=1)})).json()
    kept = {
        **shop.edge.books.journal.payload(receipt["id"]),
        "body": base64.b64encode(b'{"path": "/v1/completions"}').decode(),
    }
    kept = {
        key: value
        for key, value in kept.items()
        if key not in ("path", "adapter", "model", "shows_usage")
    }
    shop.edge.fleet.gate.set()
    await result_of(shop, receipt["id"])
    record = await run_again(shop, kept)
    assert (record.state, record.status) == ("FAILED", 400)
    assert "is a language model: write" in body_of(record)

    body = {"path": "/v1/completions", "body": {"prompt": "x", "model": "pirate", "max_tokens": 1}}
    record = await run_again(
        shop, {**kept, "body": base64.b64encode(json.dumps(body).encode()).decode()}
    )
    assert (record.state, "text" in json.loads(body_of(record))["choices"][0]) == (
        "SUCCEEDED",
        True,
    )
    assert shop.served.bodies[-1]["model"] == "pirate"


# -- in another's place ----------------------------------------------------------------------------
def busy_until(shop: Shop, **more: Any) -> None:
    variants = (Variant(function="small", priorities=tuple(Priority)),)
    shop.edge.add(route_of(llm("small", engine={"max_model_len": 400})))
    shop.edge.add(
        route_of(
            llm(
                variants=variants,
                scaling=Scaling(max_instances=1, max_inputs=1),
                engine={"max_num_seqs": 1},
                **more,
            )
        )
    )


async def test_a_variant_gets_its_own_models_name(shop: Shop) -> None:
    busy_until(shop)
    await shop.post(chat(max_tokens=1, model="shop/small"))
    await shop.post(chat(max_tokens=1))
    engine = shop.engine
    small = next(one for one in shop.edge.fleet.engines.values() if one.engine.model == "small")
    hanging = asyncio.create_task(shop.post(chat("!hang", stream=True)))
    await engine.wait_running(1)
    answer = await shop.post(chat(max_tokens=2))
    hanging.cancel()

    assert answer.headers["pilotlight-degraded"] == "variant=small"
    assert answer.json()["model"] == "shop/assistant"
    assert small.bodies[-1]["model"] == "small"
    await asyncio.gather(hanging, return_exceptions=True)


async def test_a_fallback_answers_streams_too(shop: Shop) -> None:
    shop.edge.add(route_of(llm("small")))
    shop.edge.add(route_of(llm(fallback=(Fallback(kind="function", function="small"),))))
    shop.edge.fleet.broken["assistant"] = agent_errors.StartFailed("no memory")
    stream = await shop.client.chat.completions.create(**chat(max_tokens=2), stream=True)

    assert len([piece async for piece in stream]) == 3
    (record,) = (await shop.edge.settle()).values()
    assert (record.function, record.tokens_out, record.degraded) == ("small", 2, "function=small")


async def test_an_ordinary_function_is_no_fallback_of_an_engine(shop: Shop) -> None:
    shop.edge.add(route_of(spec_of("plain", methods=llm().methods)))
    shop.edge.add(route_of(llm(fallback=(Fallback(kind="function", function="plain"),))))
    shop.edge.fleet.broken["assistant"] = agent_errors.StartFailed("no memory")

    with pytest.raises(openai.InternalServerError) as failed:
        await shop.client.chat.completions.create(**chat())
    assert (failed.value.status_code, failed.value.code) == (502, "start-failed")
    assert shop.edge.fleet.workers == {}


async def test_a_declared_answer_is_one_piece_of_a_stream(shop: Shop) -> None:
    said = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "none",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "later"},
                "finish_reason": "stop",
            }
        ],
    }
    shop.edge.add(route_of(llm(fallback=(Fallback(kind="static", body=said),))))
    shop.edge.fleet.broken["assistant"] = agent_errors.StartFailed("no memory")

    whole = await shop.client.chat.completions.create(**chat())
    stream = await shop.client.chat.completions.create(**chat(), stream=True)
    assert whole.choices[0].message.content == "later"
    assert [piece.choices[0].delta.content async for piece in stream] == ["later"]
    assert await shop.edge.settle() == {}


@pytest.mark.usefixtures("controller")
async def test_a_repeat_is_known_by_what_its_caller_wrote(shop: Shop) -> None:
    """Not by what became of it: how an answer is bounded changes with the load, and with a
    deploy."""
    body = {"path": CHAT, "body": chat(model="assistant")}
    first = await by_name(shop, "submit", body, **{"idempotency-key": "same"})
    shop.edge.add(route_of(llm(limits=TokenLimits(default_output_tokens=7))))
    again = await by_name(shop, "submit", body, **{"idempotency-key": "same"})
    other = await by_name(
        shop,
        "submit",
        {"path": CHAT, "body": chat("other", model="assistant")},
        **{"idempotency-key": "same"},
    )

    assert (first.status_code, again.status_code, other.status_code) == (202, 202, 409)
    assert again.json()["id"] == first.json()["id"]
