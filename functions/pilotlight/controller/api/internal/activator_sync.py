"""Routes for the platform's own processes: the feed, usage and calls. They require the platform
token."""

from __future__ import annotations

import asyncio
from operator import itemgetter
from typing import Annotated, Any

import anyio.to_thread
import sqlalchemy as sa
from fastapi import Depends, Query, Request, Response

from pilotlight.controller.api.schemas import Accepted, CallsRequest, FeedAnswer, UsageAccepted
from pilotlight.controller.billing import ledger, usage_ingestion
from pilotlight.controller.billing.usage_aggregation import AT
from pilotlight.controller.context import Context, Ctx, require_disk_space, require_platform_token
from pilotlight.controller.database import feed, tables
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry.launch_spec import seal_page
from pilotlight.controller.release import traffic
from pilotlight.controller.scheduling import submitted_calls
from pilotlight.controller.weights import storage_usage
from pilotlight.errors import InvalidInput
from pilotlight.protocol import CALLS_PATH, CONTENT_JSON, FEED_PATH, USAGE_PATH, CallRecord
from pilotlight.spec.pricing import NOT_RUN
from pilotlight.spec.record_json import from_json

MAX_WAIT_S = 60.0
MAX_PAGE = 5000
DEFAULT_PAGE = 1000

router = APIRouter(dependencies=[Depends(require_platform_token)], include_in_schema=False)


@router.get(FEED_PATH, response_model=FeedAnswer)
async def follow(
    context: Ctx,
    after: Annotated[int, Query(ge=0)] = 0,
    wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE,
) -> Response:
    """Return changes after a position, waiting up to `wait_s` seconds for the first one."""
    page = await _next_page(context, after=after, wait_s=wait_s, limit=limit)
    context.metrics.feed_changes.inc(len(page.changes))
    return Response(page.to_bytes(), media_type=CONTENT_JSON)


async def _next_page(context: Context, *, after: int, wait_s: float, limit: int) -> feed.Page:
    def read() -> feed.Page:
        with context.store.read() as sql:
            page = feed.read(sql, after=after, limit=limit)
        return page if context.grants is None else seal_page(page, context.grants)

    try:
        async with asyncio.timeout(wait_s) as timer:
            while True:
                change = context.notifier.next_change()
                page = await anyio.to_thread.run_sync(read)
                if page.changes or page.reset or context.notifier.closed or wait_s == 0:
                    timer.reschedule(None)
                    return page
                with context.metrics.feed_followers.track_inprogress():
                    await change.wait()
    except TimeoutError:
        return await anyio.to_thread.run_sync(read)


@router.post(USAGE_PATH)
async def usage(context: Ctx, request: Request) -> UsageAccepted:
    """Store usage records in the ledger, exactly once by id. The response is sent after they are
    durable, and reports the affected budgets."""
    return await anyio.to_thread.run_sync(_ingest_usage, context, await request.body())


def _ingest_usage(context: Context, body: bytes) -> UsageAccepted:
    """Without a model of each record: at thousands a second there is no time for that."""
    records = ledger.decode_records(body)
    with context.store.write() as write:
        added, spent = usage_ingestion.ingest_values(write, records)
        traffic.record_served(
            write,
            {
                (function_id, revision)
                for function_id, revision, kind, outcome in map(_served, records)
                if kind in _RAN and outcome not in NOT_RUN
            },
        )
    context.metrics.usage_records.inc(added.new)
    context.metrics.usage_conflicts.inc(len(added.conflicts))
    for place, picos in added.spent.items():
        context.metrics.record_spend(place.tenant, place.currency, picos)
    return UsageAccepted(
        accepted=len(records), budgets={key: state.to_json() for key, state in spent.items()}
    )


_RAN = ("CALL", "START")
"""Kinds of records that say that a revision had an instance."""
_served = itemgetter(*(AT[name] for name in ("function_id", "revision", "kind", "outcome")))


@router.post(CALLS_PATH, dependencies=[Depends(require_disk_space)])
def put_calls(context: Ctx, body: CallsRequest) -> Accepted:
    """Store the newest state of each call. A dead letter includes its `payload` from the journal.

    Refused while the disk is below its free-space floor: activators keep results in their journals
    and send them again."""
    payloads = [item.pop("payload", None) for item in body.calls]
    records = [_record(CallRecord, item, f"calls[{i}]") for i, item in enumerate(body.calls)]
    dead_letters = {
        record.id: payload
        for record, payload in zip(records, payloads, strict=True)
        if isinstance(payload, dict)
    }
    with context.store.write() as write:

        def most_bytes(tenant: str) -> int | None:
            exists = (
                write.sql.execute(
                    sa.select(tables.tenants.c.id).where(tables.tenants.c.id == tenant)
                ).first()
                is not None
            )
            return (
                storage_usage.plan_of(write.sql, context.config.plans, tenant=tenant).result_bytes
                if exists
                else None
            )

        submitted_calls.put(write, records, payloads=dead_letters, max_bytes=most_bytes)
    return Accepted(accepted=len(records))


def _record(kind: type[Any], item: dict[str, Any], where: str) -> Any:
    try:
        return from_json(kind, item, where)
    except TypeError as e:
        raise InvalidInput(f"{where}: {e}", parameter=where) from e
