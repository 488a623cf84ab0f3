"""Named webhooks: who is told what, signed and again until it is taken; calls that end, and
receivers that are down."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pilotlight.controller.database.delivery_retry import GIVE_UP_AFTER_S
from pilotlight.controller.settings import ControllerSettings
from pilotlight.controller.webhooks import deliveries
from pilotlight.controller.webhooks.delivery_queues import WEBHOOK_DELIVERIES
from pilotlight.controller.webhooks.delivery_worker import DeliveryWorker
from pilotlight.controller.webhooks.webhook_sender import WebhookSender
from pilotlight.protocol import CALLS_PATH, CallRecord
from tests.fakes.hooks import Receiver
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused


@pytest.fixture(autouse=True)
def _anywhere(controller: Controller) -> None:
    """Messages may go to this machine."""
    object.__setattr__(controller.context.config, "settings", ControllerSettings(webhooks="any"))


async def put(controller: Controller, url: str, *events: str, name: str = "ops") -> str:
    answer = await controller.http.put(
        f"/v1/webhooks/{name}", json={"url": url, "events": list(events)}
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["secret"])


async def finish(controller: Controller, **changes: Any) -> None:
    values: dict[str, Any] = {
        "id": "req-1",
        "tenant": await controller.tenant(),
        "environment": "main",
        "app": "search",
        "function": "embed",
        "method": "",
        "state": "SUCCEEDED",
        "sequence": 3,
        "submitted_at": controller.clock.now,
        "expires_at": controller.clock.now + 600,
        "status": 200,
    }
    record = CallRecord(**{**values, **changes})
    answer = await controller.internal(CALLS_PATH, {"calls": [record.to_json()]})
    assert answer.status_code == 200, answer.text


async def deliver(controller: Controller) -> int:
    """One round of the deliverer."""
    context = controller.context
    async with WebhookSender(policy="any") as sender:
        return await DeliveryWorker(
            store=context.store,
            key=context.key,
            notifier=context.notifier,
            sender=sender,
            metrics=context.metrics,
            clock=context.clock,
            chance=lambda: 0.5,
            outbox=WEBHOOK_DELIVERIES,
        ).run_once()


async def listed(controller: Controller, **params: Any) -> list[dict[str, Any]]:
    return list(
        (await controller.http.get("/v1/webhooks/ops/deliveries", params=params)).json()[
            "deliveries"
        ]
    )


async def test_a_call_that_ends_is_told_to_the_webhook_that_it_named_signed_and_once(
    controller: Controller, receiver: Receiver
) -> None:
    secret = await put(controller, receiver.url)
    await finish(controller, state="RUNNING", sequence=2, webhook="ops")
    await finish(controller, webhook="ops")
    await finish(controller, webhook="ops")  # activators repeat themselves
    assert (await deliver(controller), await deliver(controller)) == (1, 0)
    (got,) = receiver.received
    assert got.is_signed_with(secret)
    told = json.loads(got.body)
    assert told["type"] == "call.finished"
    assert {key: told["data"][key] for key in ("id", "state", "url")} == {
        "id": "req-1",
        "state": "SUCCEEDED",
        "url": "/v1/calls/req-1",
    }
    assert "result" not in told["data"]


async def test_events_go_to_whoever_asks_for_them(
    controller: Controller, receiver: Receiver
) -> None:
    for name, events in (
        ("all", ["*"]),
        ("slo", ["slo.*"]),
        ("calls", ["call.finished"]),
        ("named", []),
    ):
        await put(controller, receiver.url, *events, name=name)
    await finish(controller)
    tenant = await controller.tenant()
    with controller.context.store.write() as write:
        assert (
            deliveries.enqueue(
                write, tenant=tenant, environment="main", event="slo.alert", body={"sli": "warm"}
            )
            == 2
        )
        assert (
            deliveries.enqueue(
                write, tenant=tenant, environment="staging", event="slo.alert", body={}
            )
            == 0
        )
        assert (
            deliveries.enqueue(
                write, tenant="t-other", environment="main", event="slo.alert", body={}
            )
            == 0
        )
    assert await deliver(controller) == 4
    assert (
        sorted(json.loads(got.body)["type"] for got in receiver.received)
        == ["call.finished"] * 2 + ["slo.alert"] * 2
    )


async def test_what_a_receiver_that_is_down_is_not_told_it_is_told_later_with_growing_pauses(
    controller: Controller, receiver: Receiver
) -> None:
    await put(controller, "http://127.0.0.1:9/nobody", "*")
    await finish(controller)
    assert await deliver(controller) == 1
    (waiting,) = await listed(controller)
    assert waiting["attempts"] == 1
    assert waiting["next_attempt_at"] == controller.clock.now + 5
    assert waiting["error"]
    controller.clock.now += 5
    await deliver(controller)
    assert (await listed(controller))[0]["next_attempt_at"] == controller.clock.now + 20
    await put(controller, receiver.url, "*")
    controller.clock.now += 20
    await deliver(controller)
    (done,) = await listed(controller)
    assert (done["attempts"], done["delivered_at"], done["error"]) == (
        3,
        controller.clock.now,
        None,
    )
    assert receiver.received[0].headers["webhook-id"] == done["id"]


async def test_what_nobody_took_for_days_is_given_up_and_listed_as_failed(
    controller: Controller,
) -> None:
    await put(controller, "http://127.0.0.1:9/nobody", "*")
    await finish(controller)
    controller.clock.now += GIVE_UP_AFTER_S + 1
    await deliver(controller)
    (failed,) = await listed(controller, failed=True)
    assert (failed["next_attempt_at"], failed["delivered_at"]) == (None, None)
    with controller.context.store.write() as write:
        assert deliveries.purge(write, now=controller.clock.now) == 0
        assert deliveries.purge(write, now=controller.clock.now + deliveries.KEPT_S) == 1


async def test_a_call_that_names_a_webhook_that_is_not_there_says_so_in_its_list(
    controller: Controller,
) -> None:
    await finish(controller, webhook="ops")
    await deliver(controller)
    assert (await listed(controller))[0]["error"] == "the webhook was deleted"
    assert (await controller.http.get("/v1/webhooks/none/deliveries")).status_code == 404


async def test_the_secret_is_shown_once_and_a_change_keeps_it(
    controller: Controller, receiver: Receiver
) -> None:
    secret = await put(controller, receiver.url)
    changed = await controller.http.put(
        "/v1/webhooks/ops", json={"url": receiver.url, "events": ["*"]}
    )
    assert changed.json()["secret"] is None
    assert secret not in (await controller.http.get("/v1/webhooks")).text
    renewed = await controller.http.put(
        "/v1/webhooks/ops", json={"url": receiver.url, "new_secret": True}
    )
    assert renewed.json()["secret"] not in (None, secret)


async def test_trying_it_out_says_what_became_of_it(
    controller: Controller, receiver: Receiver
) -> None:
    secret = await put(controller, receiver.url)
    tested = (await controller.http.post("/v1/webhooks/ops:test")).json()
    assert (tested["status"], tested["error"], receiver.received[0].is_signed_with(secret)) == (
        204,
        None,
        True,
    )
    assert json.loads(receiver.received[0].body)["type"] == "webhook.test"


async def test_what_is_no_webhook_is_refused(controller: Controller) -> None:
    assert "events" in refused(
        await controller.http.put(
            "/v1/webhooks/ops", json={"url": "http://x.test/", "events": ["nope"]}
        ),
        400,
    )
    assert "webhook" in refused(
        await controller.http.put("/v1/webhooks/ops", json={"url": "ftp://x.test/"}), 400
    )
    assert (
        await controller.http.put("/v1/webhooks/-bad", json={"url": "http://x.test/"})
    ).status_code == 400
    assert (await controller.http.delete("/v1/webhooks/none")).status_code == 404


async def test_who_may_and_what_others_see(controller: Controller, receiver: Receiver) -> None:
    await put(controller, receiver.url + "path-that-opens-it")
    async with controller.client(await controller.new_key(scope="deploy")) as http:
        assert (await http.put("/v1/webhooks/more", json={"url": receiver.url})).status_code == 403
        assert "path-that-opens-it" not in (await http.get("/v1/webhooks")).text
    async with controller.client(
        await controller.new_key(scope="deploy", app="search", environment="main")
    ) as http:
        assert (await http.get("/v1/webhooks")).status_code == 403
    async with controller.client(await controller.other_tenant()) as http:
        assert (await http.get("/v1/webhooks")).json() == {"webhooks": []}
        assert (await http.post("/v1/webhooks/ops:test")).status_code == 404


async def test_an_environment_that_goes_takes_its_webhooks_along(
    controller: Controller, receiver: Receiver
) -> None:
    await controller.http.post("/v1/environments", json={"name": "staging"})
    async with controller.client(controller.key, environment="staging") as http:
        assert (await http.put("/v1/webhooks/ops", json={"url": receiver.url})).status_code == 200
    assert (await controller.http.delete("/v1/environments/staging")).status_code == 204
