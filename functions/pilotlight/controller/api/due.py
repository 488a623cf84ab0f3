"""Due calls, for activators: handed out on a claim, and taken. The platform token opens this."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Annotated, Any

import anyio.to_thread
from fastapi import Depends, Query
from pydantic import Field

from pilotlight.controller import due
from pilotlight.controller.api.internal import MAX_WAIT_S
from pilotlight.controller.api.models import Body
from pilotlight.controller.context import Context, Ctx, platform_token
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.protocol import DUE_PATH, MAX_WITHOUT

router = APIRouter(dependencies=[Depends(platform_token)], include_in_schema=False)


class DueCalls(Body):
    """Calls as journals hold them, claimed for who asked."""

    calls: list[dict[str, Any]]


class TakeRequest(Body):
    """These (`due` of each) are in the journal of this activator."""

    activator: str = Field(max_length=64)
    ids: list[str] = Field(max_length=10_000)


class Taken(Body):
    """Those of them that are its own to run; the others are another's, and must be forgotten."""

    yours: list[str]


class Inheritance(Body):
    """Calls as the journal of an activator that is gone holds them."""

    activator: str = Field(max_length=64)
    calls: list[dict[str, Any]] = Field(max_length=10_000)


class Inherited(Body):
    """How many of them were not known yet."""

    accepted: int


@router.get(DUE_PATH)
async def ask(
    context: Ctx,
    activator: Annotated[str, Query(max_length=64)],
    wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0,
    without: Annotated[list[str] | None, Query(max_length=MAX_WITHOUT)] = None,
) -> DueCalls:
    """What this activator shall run, waiting up to `wait_s` for the first of it. `without`: tenants
    that it has no room for."""
    claim = partial(_claim, context, activator, without or [])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s) as patience:
            while True:
                ring = context.bell.next_ring()
                found = await anyio.to_thread.run_sync(claim)
                if found or context.bell.closed or wait_s == 0:
                    patience.reschedule(None)
                    return DueCalls(calls=found)
                await ring.wait()
    return DueCalls(calls=await anyio.to_thread.run_sync(claim))


@router.post(DUE_PATH)
def take(context: Ctx, body: TakeRequest) -> Taken:
    """Take what is in a journal."""
    with context.store.write() as write:
        return Taken(yours=due.take(write, activator=body.activator, ids=body.ids))


@router.put(DUE_PATH)
def inherit(context: Ctx, body: Inheritance) -> Inherited:
    """Take calls over that an activator could not finish: others run them."""
    with context.store.write() as write:
        return Inherited(
            accepted=sum(due.inherit(write, held, activator=body.activator) for held in body.calls)
        )


def _claim(context: Context, activator: str, without: list[str]) -> list[dict[str, Any]]:
    with context.store.read() as sql:  # a look takes no lock, and mostly nothing is due
        if not due.has_any(sql, activator=activator, now=context.clock(), without=without):
            return []
    with context.store.write() as write:
        return due.claim(write, activator=activator, without=without)
