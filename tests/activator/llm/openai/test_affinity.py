"""Prompts that begin alike, through the whole edge: they meet on one engine, and the engines' own
words bound what they get."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from activator.llm.engine_scraper import EngineScraper
from activator.llm.engine_throttler import EngineThrottler
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.conftest import PATIENCE_S
from tests.activator.llm.openai.conftest import Shop, chat, llm
from tests.activator.test_gateway import until
from tests.fakes.routes import TENANT, route_of

PATIENT = Scaling(max_instances=2, scaledown_window_s=600)


async def two_engines(shop: Shop) -> EngineThrottler:
    """The throttler of a model with two instances."""
    shop.edge.add(replace(route_of(llm("twins", scaling=PATIENT))))
    throttler = shop.edge.scaler.throttler_of(
        shop.edge.table.targets_of(f"{TENANT}/main/shop/twins")[0]
    )
    assert isinstance(throttler, EngineThrottler)
    throttler.start(2)
    await until(lambda: len(throttler.instances) == 2)
    return throttler


def turns(question: str, count: int) -> dict[str, Any]:
    """A chat after so many turns."""
    messages = [
        {"role": "system", "content": "You know all about gardens."},
        {"role": "user", "content": question},
    ]
    for turn in range(count):
        messages += [
            {"role": "assistant", "content": f"answer {turn}"},
            {"role": "user", "content": f"and {turn}?"},
        ]
    return {**chat(max_tokens=1), "model": "shop/twins", "messages": messages}


async def test_all_turns_of_a_chat_reach_the_engine_that_knows_it(shop: Shop) -> None:
    throttler = await two_engines(shop)
    engines = [shop.edge.fleet.engines[instance_id].engine for instance_id in throttler.instances]
    used: set[int] = set()

    # instances have ids of chance: six chats alone would all go to one engine in 3 of 100 runs
    for n in range(40):
        if n >= 6 and used == {0, 1}:
            break
        before = [len(engine.counts.prompts) for engine in engines]
        for turn in range(3):
            assert (await shop.post(turns(f"question {n}", turn))).status_code == 200
        asked = [
            len(engine.counts.prompts) - then for engine, then in zip(engines, before, strict=True)
        ]
        assert sorted(asked) == [0, 3]
        used.add(asked.index(3))

    assert used == {0, 1}, "and other chats the other one"


async def test_memory_that_the_engine_says_is_full_keeps_calls_in_our_queue(shop: Shop) -> None:
    shop.edge.fleet.engine_options = {"kv_tokens": 40, "prefill_s": 30.0}
    throttler = shop.edge.scaler.throttler_of(
        shop.edge.table.targets_of(f"{TENANT}/main/shop/assistant")[0]
    )
    assert isinstance(throttler, EngineThrottler)
    first = asyncio.create_task(
        shop.post(chat("one two three four five six seven eight nine ten", max_tokens=1))
    )
    await until(lambda: bool(shop.edge.fleet.engines))
    await shop.engine.wait_running(1)

    await EngineScraper(shop.edge.scaler.throttlers, deadline_s=PATIENCE_S).scrape()

    (instance,) = throttler.instances.values()
    assert instance.capacity < 4
    shop.edge.fleet.gate.clear()  # a second instance would take them
    others = [asyncio.create_task(shop.post(chat(str(n), max_tokens=1))) for n in range(4)]
    await until(lambda: throttler.waiting > 0)
    assert shop.engine.waiting == 0, "whoever waits waits here, where the order is fair"
    for call in (first, *others):
        call.cancel()
    await asyncio.gather(first, *others, return_exceptions=True)
    await until(lambda: throttler.in_flight == throttler.waiting == 0)
