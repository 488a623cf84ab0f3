"""Live figures by server-sent events: one question per tick and environment, however many look on.

A viewer's stream ends with its session: when that is signed out of, runs out, or loses its key.
What is sent is small: figures by name, and the newest calls as rows of the page's own table."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio.to_thread
import sqlalchemy as sa
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import Receive, Scope, Send

from pilotlight.controller import sessions, tables
from pilotlight.controller.context import Context
from pilotlight.controller.dashboard import now
from pilotlight.controller.dashboard.html import fragment
from pilotlight.controller.dashboard.overview import NEWEST
from pilotlight.controller.dashboard.visit import Visitor
from pilotlight.controller.figures import newest
from pilotlight.controller.lazy_routes import APIRouter, LazyRoute
from pilotlight.errors import TooManyRequests, Unauthenticated
from pilotlight.protocol import CONTENT_SSE
from weight_cache.threads import cancel_and_wait

log = logging.getLogger(__name__)

TICK_S = 2.0
MAX_VIEWERS = 100
"""Streams in all: each holds one of the activator's connections to us."""
MAX_PER_TENANT = 25
RETRY_S = 5
Place = tuple[str, str, str]
"""(tenant, environment, currency): what is shown together."""

OVER = b"event: over\ndata: {}\n\n"


class EventRoute(LazyRoute):
    """Events: who has no session, or none any more, is told that it is over; a browser does not
    tell a page of a status."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with that answer."""
        handle = super().get_route_handler()

        async def events(request: Request) -> Response:
            try:
                return await handle(request)
            except Unauthenticated:
                return Response(OVER, media_type=CONTENT_SSE, headers={"cache-control": "no-store"})

        return events


router = APIRouter(include_in_schema=False, route_class=EventRoute)


@dataclass(slots=True, eq=False)
class Viewer:
    """One open stream. Owner: the event loop. `latest` is replaced, never queued: who is slow sees
    the newest."""

    session: str
    key: str
    until: float
    latest: str | None = None
    is_over: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, text: str) -> None:
        """Show this next."""
        self.latest = text
        self.news.set()

    def end(self) -> None:
        """The session is over."""
        self.is_over = True
        self.news.set()


class Hub:
    """Everybody who looks on, and one task per place that has somebody. Owner: the event loop."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._viewers: dict[Place, list[Viewer]] = {}
        self._tasks: dict[Place, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Hub {len(self._viewers)} places, {sum(map(len, self._viewers.values()))} viewers>"

    def join(self, place: Place, viewer: Viewer) -> None:
        """Begin to show `place` to somebody. Raises TooManyRequests."""
        mine = sum(
            len(viewers) for (tenant, _, _), viewers in self._viewers.items() if tenant == place[0]
        )
        if mine >= MAX_PER_TENANT or sum(map(len, self._viewers.values())) >= MAX_VIEWERS:
            raise TooManyRequests(
                "too many pages look on live: this one shows what was when it was loaded",
                retry_after_s=60,
            )
        self._viewers.setdefault(place, []).append(viewer)
        if place not in self._tasks:
            self._tasks[place] = asyncio.create_task(
                self._show(place), name=f"live {place[0]}/{place[1]}"
            )

    def leave(self, place: Place, viewer: Viewer) -> None:
        """They left; with the last one goes the task."""
        self._viewers[place].remove(viewer)
        if not self._viewers[place]:
            del self._viewers[place]
            self._tasks.pop(place).cancel()

    async def _show(self, place: Place) -> None:
        while not self._context.bell.closed:
            try:
                asked = [(viewer.session, viewer.key) for viewer in self._viewers[place]]
                good, text = await anyio.to_thread.run_sync(self._look, place, asked)
            except SQLAlchemyError as e:
                # the next tick asks again
                log.warning("event=live_failed tenant=%s error=%r", place[0], e)
            else:
                self._tell(place, good, {session for session, _ in asked}, text)
            await self._tick()
        for viewer in self._viewers.get(place, ()):
            viewer.end()

    def _tell(self, place: Place, good: set[str], asked: set[str], text: str) -> None:
        now = self._context.clock()
        for viewer in self._viewers.get(place, ()):
            if viewer.session not in asked:
                continue  # joined meanwhile: the next tick looks
            if viewer.session not in good or viewer.until <= now:
                viewer.end()
            else:
                viewer.tell(text)

    async def _tick(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                # it rings for deploys, too; what ends the wait is the process's end
                while not self._context.bell.closed:
                    await self._context.bell.next_ring().wait()

    def _look(self, place: Place, asked: list[tuple[str, str]]) -> tuple[set[str], str]:
        """Those of the sessions (id, key) that are good still, and the event that everybody is
        shown."""
        tenant, environment, currency = place
        at = self._context.clock()
        with self._context.store.read() as sql:
            keys = _good(sql, {key for _, key in asked}, at)
            good = {session for session, key in asked if key in keys} - sessions.ended(
                sql, [session for session, _ in asked]
            )
            figures = now.figures(
                sql, tenant=tenant, environment=environment, currency=currency, now=at
            )
            calls = newest.read(
                sql, tenant=tenant, environment=environment, now=at, limit=NEWEST
            ).calls
        rows = fragment("_calls.html", "rows", calls, environment) if calls else ""
        return good, json.dumps({"figures": figures, "calls": rows}, separators=(",", ":"))


def _good(sql: sa.Connection, keys: set[str], now: float) -> set[str]:
    table = tables.api_keys
    alive = table.c.revoked_at.is_(None) & (
        table.c.expires_at.is_(None) | (table.c.expires_at > now)
    )
    return set(sql.execute(sa.select(table.c.id).where(table.c.id.in_(keys), alive)).scalars())


class _EventStream(StreamingResponse):
    """Events until the source ends or the viewer leaves, even while it is silent."""

    def __init__(self, events: AsyncIterator[bytes], *, on_end: Callable[[], None]) -> None:
        headers = {
            "cache-control": "no-store",
            "x-accel-buffering": "no",
            "x-content-type-options": "nosniff",
        }
        super().__init__(events, media_type=CONTENT_SSE, headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self.stream_response(send), name="live answer")
        leaving = asyncio.create_task(self.listen_for_disconnect(receive), name="live viewer")
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._on_end()
            await cancel_and_wait(sending, leaving)


def hub_of(request: Request, context: Context) -> Hub:
    """The one of this application."""
    state = request.app.state
    if not hasattr(state, "live"):
        state.live = Hub(context)
    found: Hub = state.live
    return found


@router.get("/dashboard/events")
async def events(visit: Visitor, request: Request) -> Response:
    """Live figures of an environment. Raises TooManyRequests."""
    hub = hub_of(request, visit.context)
    viewer = Viewer(visit.session.id, visit.caller.key, visit.session.until)
    place = (visit.caller.tenant, visit.environment, visit.currency)
    hub.join(place, viewer)
    return _EventStream(_stream(viewer), on_end=partial(hub.leave, place, viewer))


async def _stream(viewer: Viewer) -> AsyncIterator[bytes]:
    shown = None
    yield f"retry: {RETRY_S * 1000}\n\n".encode()
    while True:
        await viewer.news.wait()
        viewer.news.clear()
        if viewer.is_over:
            yield OVER
            return
        # A comment instead of what is on the page already: it costs nothing, and finds out whether
        # anybody is there.
        yield (
            b": \n\n"
            if viewer.latest == shown
            else f"event: figures\ndata: {viewer.latest}\n\n".encode()
        )
        shown = viewer.latest
