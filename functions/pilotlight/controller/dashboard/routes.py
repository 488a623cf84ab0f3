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
    overview,
    platform,
    releases,
    signin,
)

router = APIRouter(include_in_schema=False)
for part in (assets, signin, live, overview, function, calls, budgets, releases, experiments, invoices, platform):
    router.include_router(part.router)
