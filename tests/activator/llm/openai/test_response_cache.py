"""Language models with a response cache: text at temperature 0, and embeddings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from pilotlight.spec.engines import Task
from pilotlight.spec.policies import ResponseCacheSpec
from tests.activator.conftest import Edge
from tests.activator.llm.openai.conftest import Shop, chat, llm
from tests.fakes.routes import route_of

CACHE = ResponseCacheSpec(ttl_s=60)


@pytest.fixture(name="shop")
async def _shop(edge: Edge) -> AsyncIterator[Shop]:
    shop = Shop(edge)
    edge.add(route_of(llm(cache=CACHE, lora=("pirate",))))
    edge.add(route_of(llm("embedder", cache=CACHE, task=Task.EMBED)))
    yield shop
    await shop.aclose()


async def test_text_at_temperature_0_is_answered_from_memory(shop: Shop) -> None:
    asked = chat(max_tokens=4, temperature=0)
    first, second = await shop.post(asked), await shop.post({**asked, "temperature": 0.0})
    third = await shop.post(asked)
    assert [one.headers["pilotlight-cache"] for one in (first, second, third)] == [
        "miss",
        "miss",  # 0.0 is another number
        "hit",
    ]
    assert third.json() == first.json()
    assert third.headers["pilotlight-start"] == "CACHED"
    records = list((await shop.edge.settle()).values())
    hit = next(one for one in records if one.start_kind == "CACHED")
    assert (hit.tokens_in, hit.tokens_out, hit.finish) == (0, 0, "")
    assert all(one.tokens_out == 4 for one in records if one is not hit)


@pytest.mark.parametrize(
    "more", [{}, {"temperature": 0.7}, {"temperature": 0, "stream": True}, {"temperature": None}]
)
async def test_other_text_is_generated(shop: Shop, more: dict[str, Any]) -> None:
    asked = chat(max_tokens=2, **more)
    for _ in range(2):
        answer = await shop.post(asked)
        assert (answer.status_code, answer.headers["pilotlight-cache"]) == (200, "bypass")


async def test_embeddings_are_answered_from_memory(shop: Shop) -> None:
    asked = {"model": "shop/embedder", "input": "a cat"}
    found = [await shop.post(asked, path="/v1/embeddings") for _ in range(2)]
    assert [one.headers["pilotlight-cache"] for one in found] == ["miss", "hit"]
    assert found[0].json()["data"] == found[1].json()["data"]


async def test_an_adapter_has_answers_of_its_own(shop: Shop) -> None:
    asked = chat(max_tokens=2, temperature=0)
    await shop.post(asked)
    answer = await shop.post({**asked, "model": "shop/assistant:pirate"})
    assert answer.headers["pilotlight-cache"] == "miss"


async def test_a_hit_uses_no_tokens_of_the_quota(shop: Shop) -> None:
    shop.edge.add_key("small", quotas={"tokens_per_min": 100})
    asked = chat(max_tokens=60, temperature=0)
    assert (await shop.post(asked)).status_code == 200
    for _ in range(5):
        answer = await shop.post(asked, key="small")
        assert (answer.status_code, answer.headers["pilotlight-cache"]) == (200, "hit")
