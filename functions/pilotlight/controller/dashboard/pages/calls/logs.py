"""The page of logs: the last lines of the environment's instances, then new ones as they are
written.

A stream holds one of the tenant's places for live pages and one of its places for followed logs at
the node agent, and ends with its session (`live_events`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response

from pilotlight.controller.analytics import function_stats
from pilotlight.controller.dashboard import log_lines, running_instances
from pilotlight.controller.dashboard.html import fragment, render
from pilotlight.controller.dashboard.log_lines import LogFilter
from pilotlight.controller.dashboard.page_context import MAX_NAME, PageContext, PageRoute, Visitor
from pilotlight.controller.dashboard.pages.live_events import (
    OVER,
    RETRY_S,
    EventRoute,
    EventStream,
    Viewer,
    hub_of,
)
from pilotlight.controller.lazy_routes import APIRouter
from snapshotter.errors import SnapshotterError

MAX_ROWS = 1000
"""Lines that an open page keeps."""
_Text = Annotated[str, Query(max_length=MAX_NAME)]

router = APIRouter(include_in_schema=False, route_class=PageRoute)
events_router = APIRouter(include_in_schema=False, route_class=EventRoute)


@router.get("/dashboard/logs")
async def page(
    visit: Visitor, function: _Text = "", instance: _Text = "", call: _Text = ""
) -> Response:
    """Render the last lines: of the environment, of a function (`app/name`), an instance, a
    call."""
    visit.require_deploy("logs require")
    wanted = LogFilter(function=function, instance=instance.strip(), call=call.strip())
    known = await visit.read(
        lambda sql: function_stats.names(
            sql, tenant=visit.caller.tenant, environment=visit.environment
        )
    )
    running = await running_instances.list_running(visit)
    lines, trouble = await log_lines.tail(visit, wanted)
    return render(
        "logs.html",
        visit=visit,
        wanted=wanted,
        known=known,
        instances=[str(one.id) for one in running.instances],
        lines=lines,
        trouble=trouble,
        max_rows=MAX_ROWS,
    )


@events_router.get("/dashboard/logs/events")
async def events(
    visit: Visitor, request: Request, function: _Text = "", instance: _Text = "", call: _Text = ""
) -> Response:
    """Stream new lines as rows of the page's table. Raises TooManyRequests, Forbidden."""
    visit.require_deploy("logs require")
    wanted = LogFilter(function=function, instance=instance, call=call)
    hub = hub_of(request, visit.context)
    viewer = Viewer(visit.session.id, visit.caller.key, visit.session.until)
    hub.join(visit.place, viewer)
    return EventStream(
        _stream(visit, wanted, viewer), on_end=partial(hub.remove, visit.place, viewer)
    )


async def _stream(
    visit: PageContext, wanted: LogFilter, viewer: Viewer
) -> AsyncGenerator[bytes, None]:
    """Yield events until the lines or the session end."""
    async with contextlib.aclosing(log_lines.follow(visit, wanted)) as groups:
        yield f"retry: {RETRY_S * 1000}\n\n".encode()
        is_first = True
        while True:
            reading = asyncio.ensure_future(anext(groups, None))
            ending = asyncio.create_task(viewer.wait_over(), name="log viewer's session")
            try:
                await asyncio.wait((reading, ending), return_when=asyncio.FIRST_COMPLETED)
                if viewer.is_over:
                    yield OVER
                    return
                lines = reading.result()
            except SnapshotterError as e:
                yield _event("trouble", {"text": str(e)})
                return  # the browser connects again after RETRY_S
            finally:
                reading.cancel()
                ending.cancel()
                await asyncio.wait((reading, ending))
            if lines is None:
                return
            rows = fragment("_logs.html", "rows", lines, visit.environment)
            yield _event("lines", {"rows": rows, "all": is_first})
            is_first = False


def _event(name: str, body: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(body, separators=(',', ':'))}\n\n".encode()
