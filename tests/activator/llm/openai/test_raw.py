"""An engine behind `/fn/`: the same API without naming the model, and of its own paths only those
that do no harm."""

from __future__ import annotations

import openai
import pytest

from pilotlight.protocol import WORKER_END, WORKER_STATUS
from tests.activator.llm.openai.conftest import Shop, chat, llm
from tests.fakes.routes import route_of, split_route

BASE = "/fn/shop/assistant"


async def test_the_function_is_the_model(shop: Shop) -> None:
    client = shop.openai(path=f"{BASE}/v1")
    answer = await client.chat.completions.create(**chat(max_tokens=2, model="assistant"))
    without = await shop.post(
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        path=f"{BASE}/v1/chat/completions",
    )

    assert answer.model == "assistant"
    assert (without.status_code, without.json()["model"]) == (200, "assistant")
    records = (await shop.edge.settle()).values()
    assert sorted(record.tokens_out for record in records) == [1, 2]


async def test_an_adapter_is_named(shop: Shop) -> None:
    client = shop.openai(path=f"{BASE}/v1")
    plain = await client.chat.completions.create(**chat(max_tokens=8))
    for model in ("pirate", "assistant:pirate", "shop/assistant:pirate"):
        adapted = await client.chat.completions.create(**chat(max_tokens=8, model=model))
        assert adapted.choices[0].message.content != plain.choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="pirate") as unknown:
        await client.chat.completions.create(**chat(model="gpt-4o"))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="no adapter 'poet'"):
        await client.chat.completions.create(**chat(model="assistant:poet"))


async def test_its_models_are_listed_and_nothing_is_started(shop: Shop) -> None:
    models = [model async for model in shop.openai(path=f"{BASE}/v1").models.list()]

    assert [model.id for model in models] == ["assistant", "pirate"]
    assert shop.edge.fleet.started == []


async def test_a_tag_in_the_path_chooses_the_revision(shop: Shop) -> None:
    shop.edge.add(split_route(llm(), {"v1-aaa": 100}, named=("v2-bbb",), tags={"beta": "v2-bbb"}))
    answer = await shop.post(chat(max_tokens=1), path="/fn/shop/assistant@beta/v1/chat/completions")

    assert answer.headers["pilotlight-revision"] == "v2-bbb"


async def test_its_tokenizer_may_be_asked(shop: Shop) -> None:
    tokens = await shop.post(
        {"model": "shop/assistant", "prompt": "once upon a time"}, path=f"{BASE}/tokenize"
    )
    text = await shop.post({"tokens": tokens.json()["tokens"]}, path=f"{BASE}/detokenize")

    assert text.json()["prompt"] == "once upon a time"
    assert {record.tokens_in for record in (await shop.edge.settle()).values()} == {0}


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics"])
async def test_it_may_be_looked_at(shop: Shop, path: str) -> None:
    answer = await shop.get(f"{BASE}{path}")

    assert answer.status_code == 200
    assert shop.served.paths == [path]


@pytest.mark.parametrize("path", [WORKER_END, WORKER_STATUS])
async def test_what_it_serves_to_the_platform_is_out_of_reach(shop: Shop, path: str) -> None:
    answer = await shop.post({}, path=f"{BASE}{path}")

    assert answer.status_code == 404
    assert not shop.edge.fleet.engines, "nothing was started for it"


async def test_its_metrics_are_its_owners(shop: Shop) -> None:
    shop.edge.add_tenant("acme")
    shop.edge.add(route_of(llm("open", access=("*",))))
    health = await shop.get("/t/acme/fn/shop/open/health", key=None)
    metrics = await shop.get("/t/acme/fn/shop/open/metrics", key=None)

    assert (health.status_code, metrics.status_code) == (200, 404)


@pytest.mark.parametrize(
    "path",
    [
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/collective_rpc",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/docs",
        "/openapi.json",
        "/",
        "",
        "/v1",
        "/health/",
        "//health",
        "/v1/chat/completions/",
        "/v1/../sleep",
        "/server_info",
        "/reset_prefix_cache",
    ],
)
async def test_nothing_else_of_it_exists(shop: Shop, path: str) -> None:
    for answer in (
        await shop.get(f"{BASE}{path}"),
        await shop.post({"model": "assistant"}, path=f"{BASE}{path}"),
    ):
        assert answer.status_code == 404
    assert shop.edge.fleet.started == []


async def test_what_is_read_is_not_written(shop: Shop) -> None:
    assert (await shop.post({}, path=f"{BASE}/metrics")).status_code == 404
    assert (await shop.get(f"{BASE}/tokenize")).status_code == 404


async def test_errors_have_its_shape_there_too(shop: Shop) -> None:
    error = (await shop.post(b"{", path=f"{BASE}/v1/chat/completions")).json()["error"]

    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid-input")
