"""Alerts on their way: delivered at least once under one id, tried again for three days, and by one
deliverer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pilotlight.controller.billing import budget_alerts, ledger
from pilotlight.controller.billing.budget_alerts import BudgetAlert
from pilotlight.controller.billing.budget_definition import parse_definition
from pilotlight.controller.billing.budgets import changes, records, spending
from pilotlight.controller.billing.budgets.records import Budget
from pilotlight.controller.database import audit_trail
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.database.delivery_retry import (
    CLAIM_S,
    GIVE_UP_AFTER_S,
    LONGEST_DELAY_S,
    retry_in_s,
)
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import tenants
from pilotlight.controller.server.metrics import Metrics
from pilotlight.controller.webhooks.delivery_worker import DeliveryWorker
from pilotlight.controller.webhooks.webhook_sender import WebhookSender
from pilotlight.core.crypto import PlatformKey
from tests.fakes.hooks import OK, Receiver
from tests.functions.controller.parts import ManualClock, usage

PATIENCE_S = 30.0
ALERT = BudgetAlert(
    id="al-1",
    budget="b-1",
    tenant="t-1",
    period="2027-01",
    percent=50,
    spent="5",
    at=0.0,
    delivered_at=None,
    next_attempt_at=0.0,
    attempts=1,
    error=None,
)


class Post:
    """A tenant with budgets, and what delivers their alerts. Owner: the test's loop."""

    def __init__(self, store: Store, clock: ManualClock, key: PlatformKey) -> None:
        self.notifier = ChangeNotifier()
        self.store = Store(str(store.engine.url), clock=clock, on_fed=self.notifier.ring)
        self.clock, self.key, self.metrics = clock, key, Metrics()
        with self.store.write() as write:
            self.tenant = tenants.create(write, name="acme", uid_base=None, actor="platform").id

    def budget(self, url: str | None, **terms: Any) -> tuple[Budget, str]:
        wanted = parse_definition(
            amount="10",
            currency="USD",
            currencies={"USD"},
            webhook=url,
            **{"alerts": [50], **terms},
        )
        with self.store.write() as write:
            placed = changes.put(write, key=self.key, tenant=self.tenant, terms=wanted, actor="k-1")
        return placed.budget, placed.secret or ""

    def spend(self, cost: str = "5.000000000000", record: str = "req-1/1") -> None:
        with self.store.write() as write:
            added = ledger.add(
                write, [usage(record, tenant=self.tenant, cost=cost, started_at=self.clock.now)]
            )
            spending.after_usage(write, new=added.spent, batch=added.batch)

    def alerts(self) -> list[BudgetAlert]:
        with self.store.read() as sql:
            return budget_alerts.listing(
                sql, budgets=[b.id for b in records.listing(sql, [self.tenant])]
            )

    def outcomes(self) -> dict[str, float]:
        value = self.metrics.registry.get_sample_value
        return {
            end: value("pilotlight_controller_alerts_total", {"outcome": end}) or 0.0
            for end in ("delivered", "retried", "given-up")
        }

    @contextlib.asynccontextmanager
    async def deliverer(self, *, attempt_s: float = 10.0) -> AsyncIterator[DeliveryWorker]:
        async with WebhookSender(policy="any", attempt_s=attempt_s) as sender:
            yield DeliveryWorker(
                store=self.store,
                key=self.key,
                notifier=self.notifier,
                sender=sender,
                metrics=self.metrics,
                clock=self.clock,
                chance=lambda: 0.5,
            )

    async def run_once(self) -> int:
        async with self.deliverer() as deliverer:
            return await deliverer.run_once()


@pytest.fixture(name="post")
async def _post(store: Store, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Post]:
    post = Post(store, clock, PlatformKey.load_or_create(tmp_path / "platform.key"))
    yield post
    post.store.close()


async def test_an_alert_is_posted_signed_as_soon_as_its_record_is_in_the_ledger(
    post: Post, receiver: Receiver
) -> None:
    budget, secret = post.budget(receiver.url, app="search")
    async with post.deliverer() as deliverer:
        running = asyncio.create_task(deliverer.run())
        await asyncio.sleep(0)
        await asyncio.to_thread(post.spend)
        async with asyncio.timeout(PATIENCE_S):
            await receiver.arrived.wait()
            post.notifier.close()
            await running
    got = receiver.received[0]
    assert got.is_signed_with(secret)
    assert json.loads(got.body) == {
        "type": "budget.reached",
        "timestamp": "2027-01-15T08:00:00Z",
        "data": {
            "budget": budget.id,
            "tenant": "acme",
            "environment": "",
            "app": "search",
            "function": "",
            "customer": "",
            "period": {
                "name": "2027-01",
                "kind": "month",
                "begins_at": 1798761600.0,
                "ends_at": 1801440000.0,
            },
            "percent": 50,
            "spent": "5.000000000000",
            "amount": "10",
            "currency": "USD",
            "stops_calls": False,
        },
    }
    (alert,) = post.alerts()
    assert (alert.id, alert.delivered_at, alert.next_attempt_at, alert.attempts) == (
        got.headers["webhook-id"],
        post.clock.now,
        None,
        1,
    )
    assert post.outcomes() == {"delivered": 1, "retried": 0, "given-up": 0}


async def test_each_threshold_is_one_message_and_the_last_one_of_a_hard_budget_says_that_calls_stop(
    post: Post, receiver: Receiver
) -> None:
    post.budget(receiver.url, alerts=[50, 80, 100])
    post.budget(receiver.url, alerts=[100], app="search", hard=False)
    post.spend("12.000000000000")
    assert await post.run_once() == 4
    said = [json.loads(got.body)["data"] for got in receiver.received]
    assert sorted((d["app"], d["percent"], d["stops_calls"]) for d in said) == [
        ("", 50, False),
        ("", 80, False),
        ("", 100, True),
        ("search", 100, False),
    ]
    assert await post.run_once() == 0
    assert len({got.headers["webhook-id"] for got in receiver.received}) == 4


async def test_a_failed_attempt_is_made_again_later_under_the_same_id(
    post: Post, receiver: Receiver
) -> None:
    receiver.reply = lambda n: OK if n == 3 else b"HTTP/1.1 500 Oh\r\n\r\n"
    post.budget(receiver.url)
    post.spend()
    assert await post.run_once() == 1
    (alert,) = post.alerts()
    assert (alert.delivered_at, alert.error) == (None, "500: expected a status of 200 to 299")
    assert alert.next_attempt_at == post.clock.now + 5
    assert await post.run_once() == 0
    post.clock.now += 5
    assert await post.run_once() == 1
    post.clock.now += 20
    assert await post.run_once() == 1
    assert len({got.headers["webhook-id"] for got in receiver.received}) == 1
    assert len({got.headers["webhook-signature"] for got in receiver.received}) == 3
    (alert,) = post.alerts()
    assert (alert.delivered_at, alert.next_attempt_at, alert.attempts, alert.error) == (
        post.clock.now,
        None,
        3,
        None,
    )
    assert post.outcomes() == {"delivered": 1, "retried": 2, "given-up": 0}


async def test_a_receiver_that_wants_no_more_gets_no_more(post: Post, receiver: Receiver) -> None:
    receiver.reply = lambda _: b"HTTP/1.1 410 Gone\r\n\r\n"
    budget, _ = post.budget(receiver.url, alerts=[50, 80])
    post.spend()
    assert await post.run_once() == 1
    with post.store.read() as sql:
        now = records.get(sql, tenant=post.tenant, budget_id=budget.id)
        noted = audit_trail.entries(
            sql,
            audit_trail.AuditQuery(tenant=post.tenant, action="budget.webhook_dropped"),
            limit=10,
        )
    assert (now.terms.webhook, now.sealed_secret) == (None, None)
    assert [entry["subject"] for entry in noted] == [budget.id]
    post.spend("4.000000000000", "req-2/1")
    assert await post.run_once() == 0
    assert [(a.percent, a.next_attempt_at) for a in post.alerts()] == [(80, None), (50, None)]
    assert post.outcomes() == {"delivered": 0, "retried": 0, "given-up": 1}


async def test_another_webhook_that_came_in_between_is_kept(post: Post, receiver: Receiver) -> None:
    def gone(_: int) -> bytes:
        post.budget("http://127.0.0.1:9/other")
        return b"HTTP/1.1 410 Gone\r\n\r\n"

    receiver.reply = gone
    budget, _ = post.budget(receiver.url)
    post.spend()
    await post.run_once()
    with post.store.read() as sql:
        assert (
            records.get(sql, tenant=post.tenant, budget_id=budget.id).terms.webhook
            == "http://127.0.0.1:9/other"
        )


async def test_a_slow_receiver_does_not_hold_up_others(post: Post, receiver: Receiver) -> None:
    async with Receiver(reply=lambda _: None).serve() as slow:
        post.budget(slow.url, app="a")
        post.budget(slow.url, app="search")
        post.budget(receiver.url)
        post.spend()
        running = asyncio.create_task(post.run_once())
        async with asyncio.timeout(PATIENCE_S):
            await slow.arrived.wait()
            await receiver.arrived.wait()
            assert not running.done()
            slow.released.set()
            assert await running == 2
    assert sorted(alert.error is None for alert in post.alerts()) == [False, True]


async def test_a_webhook_that_was_taken_away_is_not_sent_to(post: Post, receiver: Receiver) -> None:
    post.budget(receiver.url)
    post.spend()
    post.budget(None)
    assert await post.run_once() == 0
    assert (post.alerts()[0].error, receiver.received) == ("the webhook was removed", [])


async def test_a_budget_without_a_webhook_notes_its_alerts_all_the_same(post: Post) -> None:
    post.budget(None)
    post.spend()
    assert await post.run_once() == 0
    assert [(a.percent, a.attempts) for a in post.alerts()] == [(50, 0)]


async def test_who_dies_between_the_post_and_the_note_leaves_the_alert_to_the_next_one(
    post: Post, receiver: Receiver
) -> None:
    receiver.reply = lambda n: None if n == 1 else OK
    post.budget(receiver.url)
    post.spend()
    dying = asyncio.create_task(post.run_once())
    async with asyncio.timeout(PATIENCE_S):
        await receiver.arrived.wait()
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)

    assert await post.run_once() == 0  # it is claimed still
    post.clock.now += CLAIM_S
    assert await post.run_once() == 1
    assert len(receiver.received) == 2
    assert len({got.headers["webhook-id"] for got in receiver.received}) == 1
    assert post.alerts()[0].delivered_at == post.clock.now


async def test_of_two_deliverers_only_one_posts_an_alert(post: Post, receiver: Receiver) -> None:
    for n in range(20):
        post.budget(receiver.url, app="search", function=f"embed{n}" if n else "")
    post.budget(receiver.url, alerts=list(range(1, 11)))
    post.spend("10.000000000000")
    assert sum(await asyncio.gather(*(post.run_once() for _ in range(4)))) == 11
    assert (
        len({got.headers["webhook-id"] for got in receiver.received})
        == len(receiver.received)
        == 11
    )


async def test_a_database_that_is_lost_for_a_while_does_not_end_the_deliverer(
    post: Post, receiver: Receiver, tmp_path: Path
) -> None:
    post.budget(receiver.url)
    post.spend()
    with _broken(post.store):
        async with post.deliverer() as deliverer:
            running = asyncio.create_task(deliverer.run())
            while not deliverer.failures:
                await asyncio.sleep(0.01)
    assert not running.done()
    post.notifier.close()
    async with asyncio.timeout(PATIENCE_S):
        await running


@contextlib.contextmanager
def _broken(store: Store) -> Iterator[None]:
    with store.engine.begin() as sql:
        sql.exec_driver_sql("ALTER TABLE budget_alerts RENAME TO elsewhere")
    yield
    with store.engine.begin() as sql:
        sql.exec_driver_sql("ALTER TABLE elsewhere RENAME TO budget_alerts")


# -- how often -------------------------------------------------------------------------------------
def waits(chance: float, asked_s: float = 0.0) -> list[float]:
    """All waits of an alert that nobody takes."""
    now, attempt, out = 0.0, 1, []
    while (
        wait_s := retry_in_s(
            replace(ALERT, attempts=attempt), now=now, chance=chance, asked_s=asked_s
        )
    ) is not None:
        out.append(wait_s)
        now, attempt = now + wait_s, attempt + 1
    return out


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.999])
def test_it_is_tried_ever_more_rarely_for_three_days(chance: float) -> None:
    found = waits(chance)
    assert found[:3] == [pytest.approx(n * (0.8 + 0.4 * chance)) for n in (5, 20, 80)]
    assert max(found) <= LONGEST_DELAY_S * 1.2
    assert GIVE_UP_AFTER_S - LONGEST_DELAY_S * 1.2 < sum(found) <= GIVE_UP_AFTER_S
    assert len(found) < 30


def test_a_receiver_may_ask_for_more_time_and_not_for_ever() -> None:
    assert retry_in_s(ALERT, now=0, chance=0.5, asked_s=600) == 600
    assert retry_in_s(ALERT, now=0, chance=0.5, asked_s=1e9) == LONGEST_DELAY_S


def test_a_row_that_was_tried_impossibly_often_is_no_reason_to_fail() -> None:
    assert retry_in_s(replace(ALERT, attempts=10**9), now=0, chance=0, asked_s=0) == pytest.approx(
        LONGEST_DELAY_S * 0.8
    )
