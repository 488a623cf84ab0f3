"""All pages' routers; specific paths come before catch-all paths."""

from __future__ import annotations

from pilotlight.controller.dashboard import assets
from pilotlight.controller.dashboard.pages import (
    access,
    apps,
    budgets,
    calls,
    experiments,
    function,
    invoices,
    invoke,
    live_events,
    logs,
    models,
    objectives,
    overview,
    platform,
    releases,
    signin,
    traces,
)

routers = (
    logs.events_router,
    *(
        part.router
        for part in (
            assets,
            signin,
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
            models,
            invoices,
            access,
            platform,
        )
    ),
)
