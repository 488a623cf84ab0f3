"""Deletes tenants, step by step, with all state in the database: a controller that is killed at any
point goes on where it was.

    access → functions → calls → instances → storage → objects → rest → deleted

A step that needs a node agent or the blob store and gets no answer is repeated; the others do not
need them. Rows may still come when a deletion is done: an activator that was away delivers the ends
of calls. For `LATE_S` after it such rows are deleted, too."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from pilotlight.controller.context import Context
from pilotlight.controller.database import feed, tables
from pilotlight.controller.database.pieces import Keys, Pieces
from pilotlight.controller.database.store import Write
from pilotlight.controller.database.transactions import in_read, in_write
from pilotlight.controller.registry import snapshot_gc
from pilotlight.controller.tenant_deletion import progress
from pilotlight.controller.tenant_deletion.progress import DONE, Deletion
from pilotlight.controller.tenant_deletion.storage import TenantStorage, Waiting
from pilotlight.controller.tenant_deletion.tenant_tables import (
    DELETED,
    Step,
    TenantRows,
    of_step,
)
from pilotlight.core.object_store.errors import ObjectStoreError
from pilotlight.errors import PilotlightError
from snapshotter.errors import SnapshotterError
from snapshotter.types import InstanceState

log = logging.getLogger(__name__)

IDLE_S: Final = 60.0
"""Interval of looking for tenants to delete; a request to delete one is noticed at once."""
RETRY_S: Final = 1.0
"""Interval of repeating a step that waits."""
SETTLE_S: Final = 3.0
"""Least time from the request to the end: requests that had begun before it have ended, and
activators have delivered the ends of calls."""
LATE_S: Final = 8 * 86_400.0
"""For so long after the end rows that come are deleted: longer than a call waits in a journal."""
FUNCTIONS_AT_ONCE: Final = 50
_PUBLISHED: Final = (feed.FUNCTION, feed.SECRET, feed.QUOTA)
"""Kinds of the feed whose keys begin with the tenant's id."""
LOOK_S: Final = 600.0
"""Interval of looking for rows that came late."""
_REPEATED: Final = (
    Waiting,
    SnapshotterError,
    ObjectStoreError,
    PilotlightError,
    SQLAlchemyError,
)
"""What a step may raise. Of the database: a row that a request added refers to a deleted one."""
T = TypeVar("T")


class TenantDeleter:
    """Deletes tenants. Owner: the task of `run`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store
        self._pieces = Pieces(context.store)
        self._looked_at = time.monotonic()
        storage = TenantStorage(context, self._pieces)
        self._steps: Mapping[str, Callable[[Deletion], Awaitable[None]]] = {
            Step.ACCESS: self._end_access,
            Step.FUNCTIONS: self._delete_functions,
            Step.CALLS: partial(self._delete_step, Step.CALLS),
            Step.INSTANCES: self._wait_for_instances,
            Step.STORAGE: storage.delete,
            Step.OBJECTS: storage.wait_for_objects,
            Step.REST: self._finish,
        }

    def __repr__(self) -> str:
        return f"<TenantDeleter of {self._context.store!r}>"

    async def run(self) -> None:
        """Delete tenants until the notifier is closed."""
        notifier = self._context.notifier
        while not notifier.closed:
            ring = notifier.next_change()
            wait_s: float = RETRY_S
            try:
                wait_s = await self.round()
            except (SQLAlchemyError, PilotlightError) as e:
                # a full disk, a lost database: the next round retries
                log.error("event=tenants_not_deleted error=%r", e)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await (asyncio.sleep(wait_s) if wait_s < IDLE_S else ring.wait())

    async def round(self) -> float:
        """Take each deletion as far as possible; return the seconds to the next round. Raises
        SQLAlchemyError, PilotlightError."""
        if time.monotonic() >= self._looked_at + LOOK_S:
            self._looked_at = time.monotonic()
            await self.restart_late()
        found = await in_read(self._store, progress.running)
        waiting = [one for one in found if not await self.advance(one)]
        return RETRY_S if waiting else IDLE_S

    async def advance(self, found: Deletion) -> bool:
        """Take a deletion as far as possible; return whether it is done."""
        while found.state != DONE:
            try:
                await self._steps[found.state](found)
            except _REPEATED as e:
                if (reason := _reason(e)) != found.waiting_for:
                    log.info(
                        "event=tenant_deletion_waits tenant=%s step=%s error=%r",
                        found.tenant,
                        found.state,
                        e,
                    )
                    await in_write(self._store, partial(progress.wait, found=found, reason=reason))
                return False
            await in_write(self._store, partial(progress.complete, found=found))
            log.info("event=tenant_deletion tenant=%s completed=%s", found.tenant, found.state)
            now = await in_read(self._store, partial(progress.find, tenant=found.tenant))
            assert now is not None
            found = now
        return True

    # -- steps -------------------------------------------------------------------------------------
    async def _end_access(self, found: Deletion) -> None:
        """Remove from the feed what activators know of it, and delete its keys and settings."""
        published = await in_read(self._store, partial(_published, tenant=found.tenant))
        for begin in range(0, len(published), FUNCTIONS_AT_ONCE):
            part = published[begin : begin + FUNCTIONS_AT_ONCE]
            await in_write(self._store, partial(_withdraw, keys=part))
        kinds = {tables.api_keys.name: feed.KEY, tables.budgets.name: feed.BUDGET}
        for rows in of_step(Step.ACCESS):
            kind = kinds.get(rows.name)
            await self._delete(rows, found.tenant, kind)

    async def _delete_functions(self, found: Deletion) -> None:
        """Delete snapshots while the functions are known; what a node without an answer keeps is
        found by the periodic sweep."""
        functions = await in_read(self._store, partial(_functions, tenant=found.tenant))
        for begin in range(0, len(functions), FUNCTIONS_AT_ONCE):
            part = functions[begin : begin + FUNCTIONS_AT_ONCE]
            if await snapshot_gc.delete_snapshots(self._context.agent, part) is None:
                break
        await self._delete_step(Step.FUNCTIONS, found)

    async def _delete_step(self, step: Step, found: Deletion) -> None:
        for rows in of_step(step):
            await self._delete(rows, found.tenant)

    async def _delete(self, rows: TenantRows, tenant: str, kind: str | None = None) -> None:
        """Delete rows of the tenant. `kind`: of the feed, whose keys are theirs."""

        def change(write: Write, keys: Keys) -> None:
            for (key,) in keys if kind is not None else ():
                feed.append(write, str(kind), key, None)
            progress.delete_rows(rows, tenant, write, keys)

        await self._pieces.apply(rows.table, rows.where(tenant), change)

    async def _wait_for_instances(self, found: Deletion) -> None:
        """Wait until its instances have ended: they use its images and volumes."""
        there = await self._context.agent.instances({"tenant": found.tenant})
        live = [one for one in there if one.state is not InstanceState.STOPPED]
        if live:
            raise Waiting(f"{len(live)} instances are ending")

    async def _finish(self, found: Deletion) -> None:
        left_s = found.began_at + SETTLE_S - self._context.clock()
        if left_s > 0:
            raise Waiting("requests that had begun before are ending")
        came = await self._late_rows(found.tenant)
        if came is not None:
            log.info("event=tenant_rows_came tenant=%s table=%s", found.tenant, came.name)
        else:
            with contextlib.suppress(IntegrityError):  # an app that was deployed meanwhile
                await self._delete_step(Step.REST, found)
                return
        await in_write(self._store, partial(progress.restart, found=found))
        raise Waiting("rows came meanwhile: the steps begin again")

    # -- late rows ---------------------------------------------------------------------------------
    async def restart_late(self) -> None:
        """Begin again with the deletions that were done and have rows now. Raises
        SQLAlchemyError."""
        since = self._context.clock() - LATE_S
        for found in await in_read(self._store, partial(progress.done_since, at=since)):
            if (rows := await self._late_rows(found.tenant)) is not None:
                log.info("event=tenant_rows_came tenant=%s table=%s", found.tenant, rows.name)
                await in_write(self._store, partial(progress.restart, found=found))

    async def _late_rows(self, tenant: str) -> TenantRows | None:
        for rows in DELETED:
            if not rows.is_looked_for or rows.step is Step.REST:
                continue
            if await self._pieces.keys(rows.table, rows.where(tenant), limit=1):
                return rows
        return None


def _reason(error: Exception) -> str:
    """Why a step is repeated; an error of the database would quote rows."""
    if isinstance(error, SQLAlchemyError):
        return f"the database refused a change ({type(error).__name__})"
    return str(error)[: progress.MAX_REASON] or type(error).__name__


def _published(sql: sa.Connection, *, tenant: str) -> list[tuple[str, str]]:
    table = tables.feed
    query = sa.select(table.c.kind, table.c.key).where(
        table.c.kind.in_(_PUBLISHED),
        table.c.key.startswith(f"{tenant}/", autoescape=True),
        table.c.value.is_not(None),
    )
    return [(row.kind, row.key) for row in sql.execute(query)]


def _withdraw(write: Write, keys: list[tuple[str, str]]) -> None:
    for kind, key in keys:
        feed.append(write, kind, key, None)


def _functions(sql: sa.Connection, *, tenant: str) -> list[str]:
    table = tables.functions
    query = sa.select(table.c.id).where(table.c.tenant == tenant).order_by(table.c.id)
    return list(sql.execute(query).scalars())
