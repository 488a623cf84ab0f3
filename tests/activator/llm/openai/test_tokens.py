"""Tokens of language models through the whole edge: counted, reserved, settled, billed, and refused
by the bound that they broke."""

from __future__ import annotations

import asyncio
import re
from decimal import Decimal

import openai
import pytest

from activator.balancing.throttler import Throttler
from pilotlight.protocol import UsageRecord
from pilotlight.spec.engines import TokenLimits
from pilotlight.spec.identifiers import FunctionAddress, TenantId
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.pricing import Rates
from tests.activator.conftest import KEY
from tests.activator.llm.openai.conftest import Shop, chat, llm
from tests.activator.test_gateway import until
from tests.fakes.reference_prices import price_usage
from tests.fakes.routes import TENANT, route_of


async def record_of(shop: Shop) -> UsageRecord:
    """The only call there was."""
    records = await shop.edge.settle()
    [record] = [one for one in records.values() if one.kind == "CALL"]
    assert Decimal(record.cost) == price_usage(record, Rates(version="test"))
    return record


def tokens_left(shop: Shop) -> float:
    """In the bucket of the test's key, as its callers read it."""
    edge = shop.edge
    caller = edge.table.authenticate(f"Bearer {KEY}".encode(), 0.0)
    check = edge.entrance.entry(caller, throttler_of(shop).target).quota_check
    assert check is not None
    left = re.search(rb'"key-tokens";r=(\d+)', check.head())
    assert left is not None, check.head()
    return float(left[1])


def throttler_of(shop: Shop) -> Throttler:
    address = FunctionAddress(
        tenant=TenantId(TENANT), environment="main", app="shop", function="assistant"
    )
    return shop.edge.scaler.throttler_of(shop.edge.table.target(address))


def limit(shop: Shop, tokens_per_min: int) -> None:
    shop.edge.add_key(KEY, quotas={"tokens_per_min": tokens_per_min})


# -- what is counted -------------------------------------------------------------------------------
@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_record_says_what_the_engine_counted(shop: Shop, is_stream: bool) -> None:
    answer = await shop.post(chat("count these words please", max_tokens=5, stream=is_stream))
    assert answer.status_code == 200
    record = await record_of(shop)
    assert (record.tokens_in, record.tokens_out, record.finish) == (
        shop.engine.counts.prompt_tokens,
        5,
        "length",
    )
    assert (record.first_token_ms > 0) == is_stream


async def test_tokens_of_the_prompt_that_were_there_already_are_told_apart(shop: Shop) -> None:
    for _ in range(2):
        await shop.post(chat("the same long beginning " * 10, max_tokens=1))
    first, second = sorted((await shop.edge.settle()).values(), key=lambda one: one.started_at)
    assert (first.tokens_cached, second.tokens_cached > 0) == (0, True)
    assert first.tokens_in == second.tokens_in


async def test_what_the_engine_refuses_takes_no_tokens_and_its_word_is_passed_on(
    shop: Shop,
) -> None:
    limit(shop, 6000)
    answer = await shop.post(chat("word " * 600, max_tokens=5))
    assert answer.status_code == 400
    assert "maximum context length is 512" in answer.json()["error"]["message"]
    record = await record_of(shop)
    assert (record.status, record.tokens_in, record.tokens_out, record.finish) == (400, 0, 0, "")
    assert tokens_left(shop) == 6000


@pytest.mark.parametrize("fault", ["!crash", "!oom"])
async def test_an_engine_that_dies_in_a_stream_is_paid_for_what_it_delivered(
    shop: Shop, fault: str
) -> None:
    limit(shop, 60_000)
    answer = await shop.post(chat(fault, max_tokens=50, stream=True))
    assert '"finish_reason":"error"' in answer.text.replace(" ", "")
    record = await record_of(shop)
    assert (record.tokens_out, record.finish, record.outcome) == (3, "error", "error")
    assert record.tokens_in > 0
    assert tokens_left(shop) == pytest.approx(60_000 - record.tokens_in - 3, abs=500)
    assert shop.edge.quotas.held(f"key:k-{KEY}") == 0


async def test_a_caller_that_leaves_in_the_middle_pays_prompt_and_what_was_delivered(
    shop: Shop,
) -> None:
    shop.edge.fleet.engine_options = {"token_s": 0.02}
    stream = await shop.client.chat.completions.create(**chat(max_tokens=400), stream=True)
    pieces = stream.__aiter__()
    for _ in range(4):
        await pieces.__anext__()
    await stream.close()
    await shop.engine.wait_idle()
    await until(lambda: throttler_of(shop).in_flight == 0)
    record = await record_of(shop)
    assert (record.outcome, record.finish) == ("cancelled", "cancelled")
    assert record.tokens_in == shop.engine.counts.prompt_tokens
    assert 3 <= record.tokens_out <= shop.engine.counts.generation_tokens < 400


async def test_a_caller_that_leaves_before_the_first_token_pays_its_prompt(shop: Shop) -> None:
    asking = asyncio.create_task(shop.post(chat("!hang", max_tokens=400, stream=True)))
    await until(lambda: bool(shop.edge.fleet.engines) and shop.engine.running == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await shop.engine.wait_idle()
    await until(lambda: throttler_of(shop).in_flight == 0)
    record = await record_of(shop)
    assert (record.outcome, record.finish, record.tokens_out) == ("cancelled", "cancelled", 0)
    assert record.tokens_in > 0


# -- what may be asked for -------------------------------------------------------------------------
async def test_over_the_quota_of_tokens_is_429_with_the_time_to_come_back_and_what_is_left(
    shop: Shop,
) -> None:
    limit(shop, 100)
    answer = await shop.post(chat("hi", max_tokens=60))
    assert answer.status_code == 200
    assert '"key-tokens";q=100;w=60;qu="tokens"' in answer.headers["ratelimit-policy"]
    assert '"key-tokens";r=' in answer.headers["ratelimit"]

    with pytest.raises(openai.RateLimitError) as caught:
        await shop.client.chat.completions.create(**chat("hi", max_tokens=85))
    refused = caught.value
    assert refused.code == "over-quota"
    assert "tokens_per_min = 100 of this key" in refused.message
    assert 1 <= int(refused.response.headers["retry-after"]) <= 60
    assert '"key-tokens";r=' in refused.response.headers["ratelimit"]


async def test_what_could_never_run_is_400_and_names_the_bound(shop: Shop) -> None:
    limit(shop, 100)
    with pytest.raises(openai.BadRequestError, match="tokens_per_min = 100 of this key") as caught:
        await shop.client.chat.completions.create(**chat("hi", max_tokens=101))
    assert caught.value.param == "max_tokens"
    assert not shop.edge.fleet.started


@pytest.mark.parametrize(
    "max_tokens, text", [(0, "max_tokens = 0: must be at least 1"), (10**12, "max_model_len")]
)
async def test_a_length_that_makes_no_sense_is_refused_before_anything_is_started(
    shop: Shop, max_tokens: int, text: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=text):
        await shop.client.chat.completions.create(**chat(max_tokens=max_tokens))
    assert not shop.edge.fleet.started


async def test_a_prompt_that_cannot_fit_is_refused_before_anything_is_started(shop: Shop) -> None:
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        await shop.client.chat.completions.create(**chat("word " * 3000))
    assert not shop.edge.fleet.started


async def test_one_tenants_streams_are_bounded(shop: Shop) -> None:
    shop.edge.add(route_of(llm(limits=TokenLimits(max_streams_per_tenant=1))))
    asking = asyncio.create_task(shop.post(chat("!hang", stream=True)))
    await until(lambda: bool(shop.edge.fleet.engines) and shop.engine.running == 1)
    with pytest.raises(openai.RateLimitError, match="max_streams_per_tenant"):
        await shop.client.chat.completions.create(**chat())
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(
        lambda: shop.edge.quotas.held(f"streams:{TENANT}/main/shop/assistant@{TENANT}") == 0
    )
    await shop.client.chat.completions.create(**chat(max_tokens=2))


async def test_under_pressure_answers_are_short_and_say_so(shop: Shop) -> None:
    limits = TokenLimits(pressured_output_tokens=2, pressured_above=1)
    shop.edge.add(
        route_of(
            llm(
                limits=limits,
                engine={"max_num_seqs": 1},
                scaling=Scaling(max_inputs=1, max_instances=1),
            )
        )
    )
    first = asyncio.create_task(shop.post(chat("!hang", stream=True)))
    await until(lambda: bool(shop.edge.fleet.engines) and shop.engine.running == 1)
    waiting = asyncio.create_task(shop.post(chat(max_tokens=50)))
    throttler = throttler_of(shop)
    await until(lambda: throttler.waiting == 1)
    cut = asyncio.create_task(shop.post(chat(max_tokens=50)))
    await until(lambda: throttler.waiting == 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)

    assert "pilotlight-degraded" not in (await waiting).headers
    answer = await cut
    assert answer.headers["pilotlight-degraded"] == "output<=2"
    assert answer.json()["usage"]["completion_tokens"] == 2
    records = await shop.edge.settle()
    assert sorted(one.degraded for one in records.values()) == ["", "", "output<=2"]


# -- budgets ---------------------------------------------------------------------------------------
async def test_a_budget_refuses_tokens_that_it_cannot_pay_before_anything_is_started(
    shop: Shop,
) -> None:
    budget = {
        "id": "b-1",
        "tenant": TENANT,
        "environment": "",
        "app": "",
        "function": "",
        "period": "day",
        "amount": "0.0000001",
        "currency": "USD",
        "hard": True,
    }
    shop.edge.tell("budget", "b-1", budget)
    answer = await shop.post(chat(max_tokens=400))
    assert answer.status_code == 402
    assert answer.json()["error"]["type"] == "insufficient_quota"
    assert not shop.edge.fleet.started
