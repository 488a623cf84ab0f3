"""Live figures by server-sent events: one query per tick and environment, independent of the number
of viewers.

A viewer's stream ends with its session: after sign-out, on expiry, or when its key is revoked.
Events are small: figures by name, and the newest calls as rows of the page's table."""

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

from pilotlight.controller.analytics import recent_calls
from pilotlight.controller.context import Context
from pilotlight.controller.dashboard import live_summary
from pilotlight.controller.dashboard.html import fragment
from pilotlight.controller.dashboard.page_context import Visitor
from pilotlight.controller.dashboard.pages.overview import NEWEST
from pilotlight.controller.database import tables
from pilotlight.controller.identity import sessions
from pilotlight.controller.lazy_routes import APIRouter, LazyRoute
from pilotlight.core.threads import cancel_and_wait
from pilotlight.errors import TooManyRequests, Unauthenticated
from pilotlight.protocol import CONTENT_SSE

log = logging.getLogger(__name__)

TICK_S = 2.0
MAX_VIEWERS = 100
"""Streams at most: each uses one of the activator's connections to the controller."""
MAX_PER_TENANT = 25
RETRY_S = 5
EnvironmentKey = tuple[str, str, str]
"""(tenant, environment, currency): the viewers of one place receive the same events."""

OVER = b"event: over\ndata: {}\n\n"


class EventRoute(LazyRoute):
    """A route of events. Without a valid session it sends the event `over`, because browsers do not
    report a status to the page."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler with that response."""
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
    """One open stream. Owner: the event loop. `latest` is replaced, not queued: a slow viewer
    receives the newest event."""

    session: str
    key: str
    until: float
    latest: str | None = None
    is_over: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, text: str) -> None:
        """Send this event next."""
        self.latest = text
        self.changed.set()

    def end(self) -> None:
        """End the stream, because its session has ended."""
        self.is_over = True
        self.changed.set()

    async def wait_over(self) -> None:
        """Wait until the session has ended, without the figures."""
        while not self.is_over:
            await self.changed.wait()
            self.changed.clear()


class EventHub:
    """All viewers, and one task per place that has viewers. Owner: the event loop."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._viewers: dict[EnvironmentKey, list[Viewer]] = {}
        self._tasks: dict[EnvironmentKey, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return (
            f"<EventHub {len(self._viewers)} places, {sum(map(len, self._viewers.values()))} "
            f"viewers>"
        )

    def join(self, place: EnvironmentKey, viewer: Viewer) -> None:
        """Add a viewer of `place`. Raises TooManyRequests."""
        tenant_viewers = sum(
            len(viewers) for (tenant, _, _), viewers in self._viewers.items() if tenant == place[0]
        )
        if tenant_viewers >= MAX_PER_TENANT or sum(map(len, self._viewers.values())) >= MAX_VIEWERS:
            raise TooManyRequests(
                "too many pages show live figures: this page keeps the figures from loading",
                retry_after_s=60,
            )
        self._viewers.setdefault(place, []).append(viewer)
        if place not in self._tasks:
            self._tasks[place] = asyncio.create_task(
                self._show(place), name=f"live {place[0]}/{place[1]}"
            )

    def remove(self, place: EnvironmentKey, viewer: Viewer) -> None:
        """Remove a viewer, and the place's task with its last viewer."""
        self._viewers[place].remove(viewer)
        if not self._viewers[place]:
            del self._viewers[place]
            self._tasks.pop(place).cancel()

    async def _show(self, place: EnvironmentKey) -> None:
        while not self._context.notifier.closed:
            try:
                checked = [(viewer.session, viewer.key) for viewer in self._viewers[place]]
                valid, text = await anyio.to_thread.run_sync(self._query, place, checked)
            except SQLAlchemyError as e:
                # the next tick retries
                log.warning("event=live_failed tenant=%s error=%r", place[0], e)
            else:
                self._publish(place, valid, {session for session, _ in checked}, text)
            await self._tick()
        for viewer in self._viewers.get(place, ()):
            viewer.end()

    def _publish(
        self, place: EnvironmentKey, valid: set[str], checked: set[str], text: str
    ) -> None:
        now = self._context.clock()
        for viewer in self._viewers.get(place, ()):
            if viewer.session not in checked:
                continue  # joined meanwhile: checked at the next tick
            if viewer.session not in valid or viewer.until <= now:
                viewer.end()
            else:
                viewer.send(text)

    async def _tick(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                # the notifier also rings for deploys; only shutdown ends the wait early
                while not self._context.notifier.closed:
                    await self._context.notifier.next_change().wait()

    def _query(self, place: EnvironmentKey, checked: list[tuple[str, str]]) -> tuple[set[str], str]:
        """Return the valid ones among these sessions (id, key), and the event for all viewers."""
        tenant, environment, currency = place
        at = self._context.clock()
        with self._context.store.read() as sql:
            keys = _valid_keys(sql, {key for _, key in checked}, at)
            valid = {
                session for session, key in checked if key in keys
            } - sessions.ended_sessions_among(sql, [session for session, _ in checked])
            figures = live_summary.live_figures(
                sql, tenant=tenant, environment=environment, currency=currency, now=at
            )
            calls = recent_calls.read(
                sql, tenant=tenant, environment=environment, now=at, limit=NEWEST
            ).calls
        rows = fragment("_calls.html", "rows", calls, environment) if calls else ""
        return valid, json.dumps({"figures": figures, "calls": rows}, separators=(",", ":"))


def _valid_keys(sql: sa.Connection, keys: set[str], now: float) -> set[str]:
    table = tables.api_keys
    alive = table.c.revoked_at.is_(None) & (
        table.c.expires_at.is_(None) | (table.c.expires_at > now)
    )
    return set(sql.execute(sa.select(table.c.id).where(table.c.id.in_(keys), alive)).scalars())


class EventStream(StreamingResponse):
    """Events until the source ends or the viewer disconnects, even while no event is sent."""

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
        disconnecting = asyncio.create_task(self.listen_for_disconnect(receive), name="live viewer")
        try:
            await asyncio.wait((sending, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._on_end()
            await cancel_and_wait(sending, disconnecting)


def hub_of(request: Request, context: Context) -> EventHub:
    """Return the application's hub, created on first use."""
    state = request.app.state
    if not hasattr(state, "live"):
        state.live = EventHub(context)
    found: EventHub = state.live
    return found


@router.get("/dashboard/events")
async def events(visit: Visitor, request: Request) -> Response:
    """Stream the live figures of an environment. Raises TooManyRequests."""
    hub = hub_of(request, visit.context)
    viewer = Viewer(visit.session.id, visit.caller.key, visit.session.until)
    hub.join(visit.place, viewer)
    return EventStream(_stream(viewer), on_end=partial(hub.remove, visit.place, viewer))


async def _stream(viewer: Viewer) -> AsyncIterator[bytes]:
    sent = None
    yield f"retry: {RETRY_S * 1000}\n\n".encode()
    while True:
        await viewer.changed.wait()
        viewer.changed.clear()
        if viewer.is_over:
            yield OVER
            return
        # Send a comment if nothing has changed: it costs little and detects a lost connection.
        yield (
            b": \n\n"
            if viewer.latest == sent
            else f"event: figures\ndata: {viewer.latest}\n\n".encode()
        )
        sent = viewer.latest
