"""Routes by which activators claim and acknowledge due calls. They require the platform token."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Annotated, Any

import anyio.to_thread
from fastapi import Depends, Query
from pydantic import Field

from pilotlight.controller.api.internal.activator_sync import MAX_WAIT_S
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import Context, Ctx, require_platform_token
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.scheduling import dispatch_queue
from pilotlight.protocol import DUE_PATH, MAX_WITHOUT

router = APIRouter(dependencies=[Depends(require_platform_token)], include_in_schema=False)


class DueCalls(Body):
    """Calls in journal format, claimed for the requesting activator, and ids of calls in its
    journal that it must cancel."""

    calls: list[dict[str, Any]]
    cancel: list[str] = Field(default_factory=list)


class TakeRequest(Body):
    """Acknowledges that these calls (the `dispatch_queue` id of each) are in this activator's
    journal."""

    activator: str = Field(max_length=64)
    ids: list[str] = Field(max_length=10_000)


class Taken(Body):
    """The calls that this activator owns and must run. It must delete the others: they belong to
    another activator."""

    yours: list[str]


class Inheritance(Body):
    """Calls from the journal of an activator that no longer exists."""

    activator: str = Field(max_length=64)
    calls: list[dict[str, Any]] = Field(max_length=10_000)


class Inherited(Body):
    """The number of calls that were not known yet."""

    accepted: int


@router.get(DUE_PATH)
async def ask(
    context: Ctx,
    activator: Annotated[str, Query(max_length=64)],
    wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0,
    without: Annotated[list[str] | None, Query(max_length=MAX_WITHOUT)] = None,
) -> DueCalls:
    """Claim due calls for this activator, waiting up to `wait_s` seconds for the first one.
    `without`: tenants for which the activator has no capacity."""
    claim = partial(_claim, context, activator, without or [])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s) as timer:
            while True:
                change = context.notifier.next_change()
                found = await anyio.to_thread.run_sync(claim)
                is_some = found.calls or found.cancel
                if is_some or context.notifier.closed or wait_s == 0:
                    timer.reschedule(None)
                    return found
                await change.wait()
    return await anyio.to_thread.run_sync(claim)


@router.post(DUE_PATH)
def take(context: Ctx, body: TakeRequest) -> Taken:
    """Acknowledge calls that are in an activator's journal."""
    with context.store.write() as write:
        return Taken(
            yours=dispatch_queue.acknowledge(write, activator=body.activator, ids=body.ids)
        )


@router.put(DUE_PATH)
def inherit(context: Ctx, body: Inheritance) -> Inherited:
    """Take over calls that an activator could not finish, so that others run them."""
    with context.store.write() as write:
        return Inherited(
            accepted=sum(
                dispatch_queue.take_over(write, call, activator=body.activator)
                for call in body.calls
            )
        )


def _claim(context: Context, activator: str, without: list[str]) -> DueCalls:
    now = context.clock()
    with context.store.read() as sql:  # a read takes no lock, and usually nothing is due
        is_due = dispatch_queue.has_claimable(sql, activator=activator, now=now, without=without)
        if not is_due and not dispatch_queue.has_cancelled(sql, activator=activator, now=now):
            return DueCalls(calls=[])
    with context.store.write() as write:
        return DueCalls(
            calls=dispatch_queue.claim(write, activator=activator, without=without),
            cancel=dispatch_queue.cancelled(write, activator=activator),
        )
