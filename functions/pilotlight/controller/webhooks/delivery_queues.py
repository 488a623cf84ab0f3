"""The queues of webhook messages: budget alerts, and deliveries to named webhooks. Each provides
due messages and records the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sqlalchemy as sa

from pilotlight.controller.billing import budget_alerts
from pilotlight.controller.billing.budget_alerts import BudgetAlert
from pilotlight.controller.billing.budget_periods import period_named
from pilotlight.controller.billing.budgets import changes, records
from pilotlight.controller.billing.budgets.records import Budget
from pilotlight.controller.database import audit_trail, delivery_retry, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.webhooks import deliveries, endpoints
from pilotlight.controller.webhooks.deliveries import Delivery
from pilotlight.controller.webhooks.webhook_sender import AttemptResult, WebhookMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedMessage:
    """A claimed message. `url` None: the webhook was deleted."""

    of: BudgetAlert | Delivery
    message: WebhookMessage | None
    url: str | None
    sealed_secret: str | None


class Due(Protocol):
    """Returns due messages, at most `limit`."""

    def __call__(self, write: Write, *, limit: int) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryQueue:
    """A queue of pending messages in the database.

    Attributes:
        kind: name of the messages in the log.
        describe: makes the message of a claimed row.
        on_gone: called when the receiver rejects all further messages (410)."""

    kind: str
    table: sa.Table
    due: Due
    describe: Callable[[sa.Connection, Any], ClaimedMessage]
    on_gone: Callable[[Write, ClaimedMessage, AttemptResult], None]

    def next_at(self, sql: sa.Connection) -> float | None:
        """Return when the next attempt is due (seconds since the epoch); None: nothing is
        pending."""
        return delivery_retry.next_at(sql, self.table)

    def claim(self, write: Write, *, limit: int) -> Sequence[ClaimedMessage]:
        """Claim due messages, so that no other worker gets them."""
        claimed = delivery_retry.claim(write, self.table, self.due(write, limit=limit))
        return [self.describe(write.sql, one) for one in claimed]

    def settle(
        self, write: Write, claimed: ClaimedMessage, outcome: AttemptResult, *, chance: float
    ) -> bool:
        """Record the result of an attempt; return whether there will be another."""
        wait_s = delivery_retry.retry_in_s(
            claimed.of, now=write.now, chance=chance, asked_s=outcome.retry_after_s
        )
        if outcome.is_gone:
            wait_s = None
        delivery_retry.record_attempt(
            write, self.table, claimed.of, error=outcome.error, retry_in_s=wait_s
        )
        if outcome.is_gone:
            self.on_gone(write, claimed, outcome)
        return outcome.error is not None and wait_s is not None


def _drop_webhook(write: Write, claimed: ClaimedMessage, outcome: AttemptResult) -> None:
    """Remove a receiver that rejects further alerts from its budget."""
    alert = claimed.of
    assert isinstance(alert, BudgetAlert)
    if claimed.url is not None:
        changes.drop_webhook(
            write,
            tenant=alert.tenant,
            budget_id=alert.budget,
            url=claimed.url,
            actor=audit_trail.PLATFORM,
            why=outcome.error or "",
        )


def alert_message(alert: BudgetAlert, budget: Budget, tenant_name: str) -> WebhookMessage:
    """Return the message of an alert."""
    return WebhookMessage(
        id=alert.id, type="budget.reached", at=alert.at, data=alert_data(alert, budget, tenant_name)
    )


def alert_data(alert: BudgetAlert, budget: Budget, tenant_name: str) -> dict[str, Any]:
    """Return the `data` of a message: money as text, times as seconds since the epoch."""
    terms, period = budget.terms, period_named(alert.period)
    return {
        "budget": budget.id,
        "tenant": tenant_name,
        "environment": terms.environment,
        "app": terms.app,
        "function": terms.function,
        "customer": terms.customer,
        "period": {
            "name": period.name,
            "kind": terms.period,
            "begins_at": period.begins_at,
            "ends_at": period.ends_at,
        },
        "percent": alert.percent,
        "spent": alert.spent,
        "amount": terms.amount,
        "currency": terms.currency,
        "stops_calls": terms.hard and alert.percent >= 100,
    }


def _of_alert(sql: sa.Connection, alert: BudgetAlert) -> ClaimedMessage:
    budget = records.find(sql, tenant=alert.tenant, budget_id=alert.budget)
    if budget is None or budget.terms.webhook is None or budget.sealed_secret is None:
        return ClaimedMessage(of=alert, message=None, url=None, sealed_secret=None)
    name = sql.execute(
        sa.select(tables.tenants.c.name).where(tables.tenants.c.id == alert.tenant)
    ).scalar_one_or_none()
    told_so = alert_message(alert, budget, name or alert.tenant)
    return ClaimedMessage(
        of=alert, message=told_so, url=budget.terms.webhook, sealed_secret=budget.sealed_secret
    )


def _of_delivery(sql: sa.Connection, one: Delivery) -> ClaimedMessage:
    found = endpoints.find(sql, tenant=one.tenant, environment=one.environment, name=one.webhook)
    if found is None:
        return ClaimedMessage(of=one, message=None, url=None, sealed_secret=None)
    return ClaimedMessage(
        of=one, message=one.message(), url=found.url, sealed_secret=found.sealed_secret
    )


BUDGET_ALERTS = DeliveryQueue(
    kind="alert",
    table=tables.budget_alerts,
    due=budget_alerts.due,
    describe=_of_alert,
    on_gone=_drop_webhook,
)
WEBHOOK_DELIVERIES = DeliveryQueue(
    kind="delivery",
    table=tables.deliveries,
    due=deliveries.due,
    describe=_of_delivery,
    on_gone=lambda *_: None,
)
"""A named webhook that responds with 410 is kept: only that delivery is given up."""
