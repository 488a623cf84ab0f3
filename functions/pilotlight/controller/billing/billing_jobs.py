"""Billing jobs: at the start, and periodically while the controller runs."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.billing import invoices, price_lists, storage_charges
from pilotlight.controller.billing.credits import grants
from pilotlight.controller.database import audit_trail
from pilotlight.controller.database.store import Store
from pilotlight.controller.database.transactions import in_write
from pilotlight.controller.server.node_backend import NodeBackend
from pilotlight.controller.settings import ControllerConfig
from pilotlight.errors import PilotlightError
from snapshotter.errors import SnapshotterError
from snapshotter.types import SnapshotInfo

log = logging.getLogger(__name__)

ROUND_S = 300.0
"""Seconds between rounds: storage is sampled several times an hour, and invoices are not urgent."""
ISSUE_BATCH = 20
"""Invoices per transaction: each takes a few milliseconds, during which usage waits for the write
lock."""


def initialise_billing(store: Store, config: ControllerConfig) -> None:
    """Record the price lists in force. Raises SettingsInvalid."""
    with store.write() as write:
        for version in price_lists.record_price_lists(write, config.prices.lists()):
            log.info("event=prices_in_force version=%s", version)


async def run_billing_jobs(*, store: Store, agent: NodeBackend, config: ControllerConfig) -> None:
    """Issue due invoices, write off expired credit and charge storage, until cancelled."""
    while True:
        try:
            await anyio.to_thread.run_sync(
                partial(issue_due_invoices, store, after_days=config.settings.invoice_after_days)
            )
            await anyio.to_thread.run_sync(settle_expired_credit, store)
            await charge_storage(store, agent, config)
        except (PilotlightError, SQLAlchemyError) as e:
            # for example a full disk or a lost database: retry in the next round
            log.error("event=bookkeeping_failed error=%r", e)
        await asyncio.sleep(ROUND_S)


def issue_due_invoices(store: Store, *, after_days: int) -> int:
    """Issue the invoices of months that ended at least `after_days` ago; return how many."""
    issued, batch = 0, ISSUE_BATCH
    while batch == ISSUE_BATCH:
        with store.write() as write:
            found = invoices.due(
                write.sql,
                now=write.now,
                after_days=after_days,
                limit=ISSUE_BATCH,
            )
            for tenant, month, currency in found:
                made = invoices.issue(
                    write, tenant=tenant, month=month, currency=currency, actor=audit_trail.PLATFORM
                )
                log.info(
                    "event=invoice_issued invoice=%s tenant=%s month=%s", made["id"], tenant, month
                )
        batch = len(found)
        issued += batch
    return issued


def settle_expired_credit(store: Store) -> int:
    """Write off what is unused of expired credit; return the number of grants."""
    settled, batch = 0, grants.SETTLED_AT_ONCE
    while batch == grants.SETTLED_AT_ONCE:
        with store.write() as write:
            batch = grants.settle_expired(write)
        settled += batch
    return settled


async def charge_storage(store: Store, agent: NodeBackend, config: ControllerConfig) -> int:
    """Charge this hour's storage if it has a price; return the number of new records."""
    if not storage_charges.is_priced(config):
        return 0
    found: list[SnapshotInfo] | None
    try:
        found = await agent.snapshots()
    except SnapshotterError as e:
        log.info("event=snapshots_not_seen error=%r", e)
        found = None
    charge = partial(storage_charges.charge_storage, config=config, snapshots=found)
    return await in_write(store, charge)
