"""Streams of engines: silence, callers that leave, engines that die, clocks that run out. Each ends
with the truth, and bills it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from activator.settings import ActivatorSettings
from pilotlight.spec.function import Clocks
from snapshotter import errors as agent_errors
from tests.activator.conftest import KEY, PATIENCE_S
from tests.activator.llm.openai.conftest import Shop, chat, events_of, llm
from tests.activator.test_gateway import until
from tests.fakes.routes import route_of


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(
        max_body_bytes=20_000,
        body_timeout_s=PATIENCE_S,
        header_timeout_s=PATIENCE_S,
        unauthenticated_per_s=5.0,
        heartbeat_s=0.02,
    )


async def bring_up(shop: Shop, **options: Any) -> None:
    """An instance whose engine is like this."""
    shop.edge.fleet.engine_options = options
    assert (await shop.post(chat(max_tokens=1))).status_code == 200


def told(events: list[str]) -> dict[str, Any]:
    """What the last event, the end of the stream, says."""
    name, _, data = events[-1].partition("\n")
    assert name == "event: end"
    body: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return body


def error_in(events: list[str]) -> dict[str, Any]:
    """The error before it."""
    assert "data: [DONE]" not in events
    body: dict[str, Any] = json.loads(events[-2].removeprefix("data: "))
    error: dict[str, Any] = body["error"]
    return error


async def last_record(shop: Shop) -> Any:
    records = (await shop.edge.settle()).values()
    return max(records, key=lambda record: record.started_at)


@pytest.mark.parametrize("word", ["!crash", "!oom"])
async def test_an_engine_that_dies_in_the_middle_is_told_and_bills_what_was_delivered(
    shop: Shop, word: str
) -> None:
    await bring_up(shop)
    answer = await shop.post(chat(word, max_tokens=9, stream=True))

    events = events_of(answer.text)
    assert (answer.status_code, error_in(events)["type"], error_in(events)["code"]) == (
        200,
        "server_error",
        "worker-crashed",
    )
    assert (told(events)["finish_reason"], told(events)["tokens_out"]) == ("error", 3)
    record = await last_record(shop)
    assert (record.status, record.outcome, record.finish, record.tokens_out) == (
        502,
        "error",
        "error",
        3,
    )
    assert record.tokens_in > 0


async def test_openais_client_raises_what_breaks_a_stream(shop: Shop) -> None:
    await bring_up(shop)
    stream = await shop.client.chat.completions.create(**chat("!crash", max_tokens=9), stream=True)
    seen: list[object] = []
    with pytest.raises(openai.APIError, match="another one replaces it") as broken:
        await _read_all(stream, seen)

    assert len(seen) == 4
    assert broken.value.code == "worker-crashed"


async def _read_all(stream: AsyncIterator[object], into: list[object]) -> None:
    async for piece in stream:
        into.append(piece)  # noqa: PERF401  # what came before it broke off is what counts


async def test_one_instance_takes_the_place_of_the_one_that_died(shop: Shop) -> None:
    await bring_up(shop)
    await shop.post(chat("!crash", max_tokens=9, stream=True))

    assert (await shop.post(chat(max_tokens=2))).status_code == 200
    assert len(shop.edge.fleet.started) == 2


async def test_the_reason_of_an_instances_end_is_told(shop: Shop) -> None:
    await bring_up(shop, token_s=0.02)
    (first,) = shop.edge.fleet.started
    asking = asyncio.create_task(shop.post(chat(max_tokens=400, stream=True)))
    await shop.engine.wait_running(1)
    await shop.edge.fleet.kill(first, "out_of_memory")

    assert "ran out of memory" in error_in(events_of((await asking).text))["message"]


async def test_an_engine_that_says_it_failed_is_believed(shop: Shop) -> None:
    await bring_up(shop)
    answer = await shop.post(chat("!error", stream=True))

    events = events_of(answer.text)
    assert error_in(events)["message"] == "EngineCore encountered an issue."
    assert told(events)["finish_reason"] == "error"
    record = await last_record(shop)
    assert (record.status, record.finish, record.tokens_out) == (500, "error", 0)


async def test_an_engine_that_fails_a_whole_answer_is_passed_on(shop: Shop) -> None:
    await bring_up(shop)
    with pytest.raises(openai.InternalServerError, match="EngineCore"):
        await shop.client.chat.completions.create(**chat("!error"))

    record = await last_record(shop)
    assert (record.status, record.outcome, record.tokens_in) == (500, "error", 0)


async def test_an_engine_that_dies_before_it_answers_is_a_502_in_their_shape(shop: Shop) -> None:
    await bring_up(shop)
    with pytest.raises(openai.InternalServerError) as died:
        await shop.client.chat.completions.create(**chat("!crash", max_tokens=9))

    assert (died.value.status_code, died.value.code) == (502, "worker-crashed")


@pytest.mark.parametrize("word,tokens", [("!hang", 0), ("!stall", 3)])
async def test_an_engine_that_hangs_is_cut_off_by_the_clock(
    shop: Shop, word: str, tokens: int
) -> None:
    shop.edge.add(route_of(llm(clocks=Clocks(execution_s=1.0))))  # its first tokens are part of it
    await bring_up(shop)
    answer = await shop.post(chat(word, max_tokens=9, stream=True))

    events = events_of(answer.text)
    assert (error_in(events)["code"], told(events)["tokens_out"]) == ("deadline-exceeded", tokens)
    record = await last_record(shop)
    assert (record.status, record.finish, record.tokens_out) == (504, "error", tokens)
    assert ": waiting" in events
    await until(lambda: shop.edge.fleet.stopped)


@pytest.mark.parametrize("word", ["!hang", "!stall"])
async def test_a_caller_that_leaves_frees_its_place_in_the_engine(shop: Shop, word: str) -> None:
    await bring_up(shop)
    engine = shop.engine
    async with shop.edge.client.stream(
        "POST",
        f"{shop.edge.url}/v1/chat/completions",
        json=chat(word, stream=True),
        headers={"authorization": f"Bearer {KEY}"},
    ) as answer:
        await engine.wait_running(1)
        await anext(answer.aiter_bytes())
    async with asyncio.timeout(PATIENCE_S):
        await engine.wait_idle()

    assert (engine.running, engine.held_tokens, engine.counts.finished["abort"]) == (0, 0, 1)
    await until(lambda: _in_flight(shop) == 0)
    record = await last_record(shop)
    assert (record.status, record.outcome, record.finish) == (499, "cancelled", "cancelled")
    assert record.tokens_out == (3 if word == "!stall" else 0)
    assert record.tokens_in > 0


async def test_a_caller_of_a_whole_answer_that_leaves_frees_its_place_too(shop: Shop) -> None:
    await bring_up(shop)
    asking = asyncio.create_task(shop.client.chat.completions.create(**chat("!hang")))
    await shop.engine.wait_running(1)
    asking.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await shop.engine.wait_idle()

    await until(lambda: _in_flight(shop) == 0)
    assert (await last_record(shop)).finish == "cancelled"


def _in_flight(shop: Shop) -> int:
    return sum(scaled.throttler.in_flight for scaled in shop.edge.scaler.revisions.values())


async def test_a_cold_start_is_filled_with_comments_that_clients_drop(shop: Shop) -> None:
    shop.edge.fleet.gate.clear()
    asking = asyncio.create_task(
        shop.client.chat.completions.create(**chat(max_tokens=3), stream=True)
    )
    stream = await asking  # its head is here, and no instance
    assert shop.edge.fleet.infos == {}
    shop.edge.fleet.gate.set()

    assert len([piece async for piece in stream]) == 4


async def test_a_start_that_fails_after_the_head_went_out_is_told_in_the_stream(shop: Shop) -> None:
    shop.edge.fleet.gate.clear()
    shop.edge.fleet.failures = [agent_errors.StartFailed("no such weights")] * 9
    stream = await shop.client.chat.completions.create(**chat(), stream=True)
    shop.edge.fleet.gate.set()

    with pytest.raises(openai.APIError) as failed:
        [piece async for piece in stream]
    assert failed.value.code == "start-failed"
    assert (
        shop.edge.metrics.registry.get_sample_value(
            "pilotlight_requests_refused_total", {"status": "502"}
        )
        == 1
    )


async def test_an_engines_refusal_after_the_head_went_out_is_told_in_the_stream(shop: Shop) -> None:
    shop.edge.fleet.gate.clear()
    stream = await shop.client.chat.completions.create(**chat("a b " * 300), stream=True)
    shop.edge.fleet.gate.set()

    with pytest.raises(openai.APIError, match="maximum context length"):
        [piece async for piece in stream]
    assert (await last_record(shop)).status == 400
