"""Lines of a batch that ask a language model: limits and quotas of tokens are those of other
calls."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from pilotlight.controller.scheduling import batch_lines, dispatch_queue
from pilotlight.protocol import CallRecord
from pilotlight.spec.engines import TokenLimits
from tests.activator.conftest import KEY
from tests.activator.llm.openai.conftest import Shop, chat, llm
from tests.activator.test_gateway import until
from tests.fakes.fake_controller import FakeController
from tests.fakes.routes import TENANT, route_of


async def run_line(shop: Shop, call: str, body: dict[str, Any]) -> None:
    """The controller hands out the call of a line."""
    record = replace(record_of(call, body), labels=batch_lines.labels_of("batch_1"))
    await run_due(shop, record, body, priority="batch", retry_until=9e9)


def record_of(call: str, body: dict[str, Any]) -> CallRecord:
    """The record of a call of a model that is due."""
    return CallRecord(
        id=call,
        tenant=TENANT,
        environment="main",
        app="shop",
        function=body["model"].removeprefix("shop/"),
        method="",
        state="QUEUED",
        sequence=1,
        submitted_at=1.0,
        expires_at=9e9,
        labels={},
    )


async def run_due(shop: Shop, record: CallRecord, body: dict[str, Any], **more: Any) -> None:
    """The controller hands out a call. `more`: of its document."""
    wrapped = json.dumps({"path": "/v1/chat/completions", "body": body}).encode()
    document = dispatch_queue.payload(record, body=wrapped, key=f"k-{KEY}")
    await shop.edge.calls.store({**document, "due": record.id, **more})
    shop.edge.calls.begin_stored([record.id], [record.id])


async def ended(controller: FakeController, call: str) -> dict[str, Any]:
    """Its record, and its result as JSON."""
    await until(lambda: controller.calls.get(call, {}).get("state") in ("SUCCEEDED", "FAILED"))
    record = controller.calls[call]
    return {**record, "result": json.loads(base64.b64decode(record["result"]))}


async def test_an_answer_is_limited_as_that_of_another_call(
    shop: Shop, controller: FakeController, shipping: object
) -> None:
    shop.edge.add_key(KEY)
    shop.edge.add(route_of(llm("short", limits=TokenLimits(max_output_tokens=3))))
    text = "one two three four five six"
    await run_line(shop, "req-1", {**chat(text), "model": "shop/short"})
    answered = await ended(controller, "req-1")
    assert answered["result"]["usage"]["completion_tokens"] <= 3
    await run_line(shop, "req-2", {**chat(text, max_tokens=9), "model": "shop/short"})
    refused = await ended(controller, "req-2")
    assert (refused["status"], refused["is_dead"]) == (400, False)
    assert "max_output_tokens" in refused["result"]["detail"]


@pytest.mark.parametrize("attempt", [0, 1])
async def test_a_call_that_is_due_or_sent_again_counts_its_tokens(
    shop: Shop, controller: FakeController, shipping: object, attempt: int
) -> None:
    """Otherwise any number of dead letters would run in one minute."""
    shop.edge.add_key(KEY, quotas={"tokens_per_min": 60})
    body = chat("hello", max_tokens=40)
    await run_due(shop, replace(record_of("req-1", body), attempt=attempt), body)
    assert (await ended(controller, "req-1"))["state"] == "SUCCEEDED"
    assert (await shop.post(chat("hello", max_tokens=50))).status_code == 429


async def test_a_line_waits_until_its_key_has_tokens(
    shop: Shop, controller: FakeController, shipping: object
) -> None:
    shop.edge.add_key(KEY, quotas={"tokens_per_min": 60})
    await run_line(shop, "req-1", chat("hello", max_tokens=40))
    await ended(controller, "req-1")
    assert (await shop.post(chat("hello", max_tokens=50))).status_code == 429
    await run_line(shop, "req-2", chat("hello", max_tokens=50))
    with pytest.raises(TimeoutError):
        await until(
            lambda: controller.calls.get("req-2", {}).get("state") == "FAILED", timeout_s=1.0
        )
    shop.edge.add_key(KEY, quotas={"tokens_per_min": 6000})
    assert (await ended(controller, "req-2"))["state"] == "SUCCEEDED"
