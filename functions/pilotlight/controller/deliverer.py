"""The deliverer: takes alerts whose time has come, posts them, and notes what became of that.

There is one, in the one controller of a database (lock.py). And even two would not post an alert at the same time: whoever takes
it moves its next attempt out of reach first, in a transaction. A deliverer that is killed between the post and the note leaves
the alert to the next attempt, which has the same webhook-id: it is delivered at least once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio.to_thread
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller import alerts, budgets, tables
from pilotlight.controller.alerts import Alert
from pilotlight.controller.bell import Bell
from pilotlight.controller.budgets import Budget
from pilotlight.controller.context import Context
from pilotlight.controller.metrics import Metrics
from pilotlight.controller.periods import named
from pilotlight.controller.store import Store
from pilotlight.controller.webhooks import Message, Outcome, Sender
from pilotlight.errors import PilotlightError
from pilotlight.seal import PlatformKey, SealBroken

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Attempts side by side; a slow receiver holds up the others of its round by webhooks.ATTEMPT_S at most."""
LONGEST_WAIT_S = 60.0
"""Between two looks: the wall clock may be set while we sleep."""
PAUSE_AFTER_FAILURE_S = 5.0
ACTOR = "platform"


async def deliver(context: Context) -> None:
    """Deliver for as long as the controller runs."""
    async with Sender(policy=context.config.settings.webhooks) as sender:
        deliverer = Deliverer(
            store=context.store, key=context.key, bell=context.bell, sender=sender, metrics=context.metrics, clock=context.clock
        )
        await deliverer.run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """An alert that was claimed, with its budget (None: that is gone) and the name of its tenant."""

    alert: Alert
    budget: Budget | None
    tenant_name: str


class Deliverer:
    """Owner: the controller's event loop. `chance` is uniform in [0, 1). `failures` counts rounds that the database spoiled."""

    def __init__(
        self, *, store: Store, key: PlatformKey, bell: Bell, sender: Sender, metrics: Metrics, clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
    ) -> None:  # fmt: skip
        self._store = store
        self._key = key
        self._bell = bell
        self._sender = sender
        self._metrics = metrics
        self._clock = clock
        self._chance = chance
        self._posted = 0
        self.failures = 0

    def __repr__(self) -> str:
        return f"<Deliverer posted={self._posted} failures={self.failures}>"

    async def run(self) -> None:
        """Deliver until cancelled, or until the bell is closed."""
        while not self._bell.closed:
            ring = self._bell.next_ring()
            wait_s = PAUSE_AFTER_FAILURE_S
            try:
                while await self.round():
                    pass
                wait_s = await anyio.to_thread.run_sync(self._wait_s)
            except* (SQLAlchemyError, PilotlightError) as e:
                self.failures += 1
                log.error("event=deliverer_failed error=%r", e.exceptions)  # a full disk, a lost database: the next round tries again
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await ring.wait()

    async def round(self) -> int:
        """One attempt for each alert that is due, at most AT_ONCE; returns how many."""
        errands = await anyio.to_thread.run_sync(self._claim)
        async with asyncio.TaskGroup() as group:
            for errand in errands:
                group.create_task(self._deliver(errand), name=f"alert {errand.alert.id}")
        return len(errands)

    async def _deliver(self, errand: Errand) -> None:
        alert, budget = errand.alert, errand.budget
        if budget is None or budget.terms.webhook is None or budget.sealed_secret is None:
            outcome = Outcome(error="there is no webhook any more", is_gone=True)
        else:
            outcome = await self._post(message(alert, budget, errand.tenant_name), budget.terms.webhook, budget.sealed_secret)
        self._posted += 1
        log.info("event=alert_posted alert=%s attempt=%d status=%s error=%r", alert.id, alert.attempts, outcome.status, outcome.error)
        await anyio.to_thread.run_sync(self._settle, errand, outcome)

    async def _post(self, told: Message, url: str, sealed: str) -> Outcome:
        try:
            return await self._sender.post(told, url=url, secret=self._key.open(sealed), now=self._clock())
        except (SealBroken, ValueError) as e:  # a key file or a row that was replaced by hand holds up nobody else's alerts
            return Outcome(error=str(e))

    def _wait_s(self) -> float:
        with self._store.read() as sql:
            at = alerts.next_at(sql)
        return LONGEST_WAIT_S if at is None else min(LONGEST_WAIT_S, max(0.0, at - self._clock()))

    def _claim(self) -> list[Errand]:
        with self._store.read() as sql:  # a look takes no lock, and mostly nothing is due
            at = alerts.next_at(sql)
        if at is None or at > self._clock():
            return []
        with self._store.write() as write:
            return [_errand(write.sql, alert) for alert in alerts.claim(write, limit=AT_ONCE)]

    def _settle(self, errand: Errand, outcome: Outcome) -> None:
        alert = errand.alert
        asked_s, chance = outcome.retry_after_s, self._chance()
        with self._store.write() as write:
            wait_s = None if outcome.is_gone else alerts.retry_in_s(alert, now=write.now, chance=chance, asked_s=asked_s)
            alerts.settle(write, alert, error=outcome.error, retry_in_s=wait_s)
            if outcome.is_gone and errand.budget is not None and (url := errand.budget.terms.webhook) is not None:
                why = outcome.error or ""
                budgets.drop_webhook(write, tenant=alert.tenant, budget_id=alert.budget, url=url, actor=ACTOR, why=why)
        end = "delivered" if outcome.error is None else "retried" if wait_s is not None else "given-up"
        self._metrics.alerts.labels(end).inc()


def message(alert: Alert, budget: Budget, tenant_name: str) -> Message:
    """What is told of an alert."""
    return Message(id=alert.id, type="budget.reached", at=alert.at, data=told(alert, budget, tenant_name))


def told(alert: Alert, budget: Budget, tenant_name: str) -> dict[str, Any]:
    """The `data` of a message: money as text, times as seconds since the epoch."""
    terms, period = budget.terms, named(alert.period)
    return {
        "budget": budget.id,
        "tenant": tenant_name,
        "environment": terms.environment,
        "app": terms.app,
        "function": terms.function,
        "period": {"name": period.name, "kind": terms.period, "begins_at": period.begins_at, "ends_at": period.ends_at},
        "percent": alert.percent,
        "spent": alert.spent,
        "amount": terms.amount,
        "currency": terms.currency,
        "stops_calls": terms.hard and alert.percent >= 100,
    }


def _errand(sql: sa.Connection, alert: Alert) -> Errand:
    budget = budgets.find(sql, tenant=alert.tenant, budget_id=alert.budget)
    name = sql.execute(sa.select(tables.tenants.c.name).where(tables.tenants.c.id == alert.tenant)).scalar_one_or_none()
    return Errand(alert=alert, budget=budget, tenant_name=name or alert.tenant)
