"""All pages' routers; specific paths come before catch-all paths."""

from __future__ import annotations

from fastapi import APIRouter

from pilotlight.controller.dashboard import assets
from pilotlight.controller.dashboard.page_context import PageRoute, Visitor
from pilotlight.controller.dashboard.pages import (
    access,
    live_events,
    overview,
    platform,
    sign_in,
)
from pilotlight.controller.dashboard.pages.billing import budgets, invoices
from pilotlight.controller.dashboard.pages.calls import calls, invoke, logs, traces
from pilotlight.controller.dashboard.pages.functions import (
    apps,
    drift,
    experiments,
    function,
    models,
    objectives,
    releases,
)
from pilotlight.errors import NotFound

unknown_pages = APIRouter(include_in_schema=False, route_class=PageRoute)


@unknown_pages.get("/dashboard/{path:path}")
async def unknown_page(visit: Visitor) -> None:
    """Show that there is no such page. A browser gets a page, not a problem document."""
    raise NotFound(f"the dashboard has no page {visit.path}")


routers = (
    logs.events_router,
    *(
        part.router
        for part in (
            assets,
            sign_in,
            live_events,
            overview,
            function,
            apps,
            calls,
            invoke,
            logs,
            traces,
            budgets,
            releases,
            experiments,
            objectives,
            drift,
            models,
            invoices,
            access,
            platform,
        )
    ),
    unknown_pages,
)
