"""Every page in one router, the named ones before those that take what is left."""

from __future__ import annotations

from fastapi import APIRouter

from pilotlight.controller.dashboard import (
    assets,
    budgets,
    calls,
    experiments,
    function,
    invoices,
    live,
    objectives,
    overview,
    platform,
    releases,
    signin,
    traces,
)

router = APIRouter(include_in_schema=False)
for part in (assets, signin, live, overview, function, calls, traces, budgets, releases, experiments, objectives, invoices, platform):
    router.include_router(part.router)
