"""The deliverer: claims due messages, posts them, and records the results.

Each outbox has one deliverer, in the single controller of a database (lock.py). Even two would not
post the same message at the same time: a claim first moves the message's next attempt into the
future, in a transaction. If a deliverer is killed between posting and recording, the message is
posted again with the same webhook-id: delivery is at least once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence

import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.database.store import Store
from pilotlight.controller.server.metrics import Metrics
from pilotlight.controller.webhooks.delivery_queues import (
    BUDGET_ALERTS,
    WEBHOOK_DELIVERIES,
    ClaimedMessage,
    DeliveryQueue,
)
from pilotlight.controller.webhooks.webhook_sender import AttemptResult, WebhookSender
from pilotlight.core.crypto import DecryptionFailed, PlatformKey
from pilotlight.errors import PilotlightError

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Concurrent attempts; a slow receiver delays the others of its round by at most
webhooks.ATTEMPT_S."""
LONGEST_WAIT_S = 60.0
"""Between two checks, because the wall clock may be changed meanwhile."""
PAUSE_AFTER_FAILURE_S = 5.0


async def run_delivery_workers(
    *,
    store: Store,
    key: PlatformKey,
    notifier: ChangeNotifier,
    metrics: Metrics,
    clock: Callable[[], float],
    policy: str,
) -> None:
    """Deliver messages for as long as the controller runs."""
    async with (
        WebhookSender(policy=policy) as sender,
        asyncio.TaskGroup() as group,
    ):
        for outbox in (BUDGET_ALERTS, WEBHOOK_DELIVERIES):
            deliverer = DeliveryWorker(
                store=store,
                key=key,
                notifier=notifier,
                sender=sender,
                metrics=metrics,
                clock=clock,
                outbox=outbox,
            )
            group.create_task(deliverer.run(), name=f"deliverer of {outbox.kind}")


class DeliveryWorker:
    """Delivers the messages of one outbox.

    Owner: the controller's event loop. `chance` is uniform in [0, 1). `failures` counts rounds that
    failed because of the database."""

    def __init__(
        self,
        *,
        store: Store,
        key: PlatformKey,
        notifier: ChangeNotifier,
        sender: WebhookSender,
        metrics: Metrics,
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
        outbox: DeliveryQueue = BUDGET_ALERTS,
    ) -> None:
        self._outbox = outbox
        self._store = store
        self._key = key
        self._notifier = notifier
        self._sender = sender
        self._metrics = metrics
        self._clock = clock
        self._chance = chance
        self._posted = 0
        self.failures = 0

    def __repr__(self) -> str:
        return f"<DeliveryWorker posted={self._posted} failures={self.failures}>"

    async def run(self) -> None:
        """Deliver until cancelled, or until the notifier is closed."""
        while not self._notifier.closed:
            ring = self._notifier.next_change()
            wait_s = PAUSE_AFTER_FAILURE_S
            try:
                while await self.run_once():
                    pass
                wait_s = await anyio.to_thread.run_sync(self._wait_s)
            except* (SQLAlchemyError, PilotlightError) as e:
                self.failures += 1
                # for example a full disk or a lost database: retry in the next round
                log.error("event=deliverer_failed error=%r", e.exceptions)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await ring.wait()

    async def run_once(self) -> int:
        """Make one attempt for each due message, at most AT_ONCE; return how many."""
        batch = await anyio.to_thread.run_sync(self._claim)
        async with asyncio.TaskGroup() as group:
            for claimed in batch:
                group.create_task(
                    self._deliver(claimed), name=f"{self._outbox.kind} {claimed.of.id}"
                )
        return len(batch)

    async def _deliver(self, claimed: ClaimedMessage) -> None:
        outcome = await self._post(claimed)
        self._posted += 1
        kind, one = self._outbox.kind, claimed.of
        log.info(
            "event=%s_posted id=%s attempt=%d status=%s error=%r",
            kind,
            one.id,
            one.attempts,
            outcome.status,
            outcome.error,
        )
        await anyio.to_thread.run_sync(self._record, claimed, outcome)

    async def _post(self, claimed: ClaimedMessage) -> AttemptResult:
        if claimed.message is None or claimed.url is None or claimed.sealed_secret is None:
            return AttemptResult(error="the webhook was deleted", is_gone=True)
        try:
            secret = self._key.webhooks.open(claimed.sealed_secret)
            return await self._sender.post(
                claimed.message, url=claimed.url, secret=secret, now=self._clock()
            )
        except (DecryptionFailed, ValueError) as e:
            # a key file or row that was replaced by hand must not block other messages
            return AttemptResult(error=str(e))

    def _wait_s(self) -> float:
        with self._store.read() as sql:
            at = self._outbox.next_at(sql)
        return LONGEST_WAIT_S if at is None else min(LONGEST_WAIT_S, max(0.0, at - self._clock()))

    def _claim(self) -> Sequence[ClaimedMessage]:
        with self._store.read() as sql:  # reading takes no lock, and usually nothing is due
            at = self._outbox.next_at(sql)
        if at is None or at > self._clock():
            return []
        with self._store.write() as write:
            return self._outbox.claim(write, limit=AT_ONCE)

    def _record(self, claimed: ClaimedMessage, outcome: AttemptResult) -> None:
        chance = self._chance()
        with self._store.write() as write:
            is_retried = self._outbox.settle(write, claimed, outcome, chance=chance)
        end = "delivered" if outcome.error is None else "retried" if is_retried else "given-up"
        self._metrics.alerts.labels(end).inc()
