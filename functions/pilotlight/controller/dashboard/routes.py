"""Every page's router, the named ones before those that take what is left."""

from __future__ import annotations

from pilotlight.controller.dashboard import (
    assets,
    budgets,
    calls,
    experiments,
    function,
    invoices,
    live,
    models,
    objectives,
    overview,
    platform,
    releases,
    signin,
    traces,
)

routers = tuple(
    part.router
    for part in (
        assets,
        signin,
        live,
        overview,
        function,
        calls,
        traces,
        budgets,
        releases,
        experiments,
        objectives,
        models,
        invoices,
        platform,
    )
)
