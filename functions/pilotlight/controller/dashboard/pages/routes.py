"""All pages' routers; specific paths come before catch-all paths."""

from __future__ import annotations

from pilotlight.controller.dashboard import assets
from pilotlight.controller.dashboard.pages import (
    budgets,
    calls,
    experiments,
    function,
    invoices,
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
            calls,
            logs,
            traces,
            budgets,
            releases,
            experiments,
            objectives,
            models,
            invoices,
            platform,
        )
    ),
)
