"""Pages for platform administrators: nodes, tenants' shares, all instances, snapshots, and
weights by tier."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pilotlight.controller.analytics import tenant_shares
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import (
    PageContext,
    PageRoute,
    Visitor,
    or_error_banner,
)
from pilotlight.controller.lazy_routes import APIRouter
from snapshotter.types import InstanceInfo

KEPT_S = 60.0
"""How long the node's capabilities are cached, in seconds: the node checks them on each request,
which is too slow for a page."""
MOST = 200

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/dashboard/platform")
async def page(visit: Visitor, request: Request) -> Response:
    """Render the nodes and each tenant's share. Raises Forbidden unless the caller is the
    operator."""
    visit.caller.require_platform()
    tenants = await visit.read(
        lambda sql: tenant_shares.read(
            sql, span=visit.span, plans=visit.context.config.plans, currency=visit.currency
        )
    )
    instances, trouble = await or_error_banner(visit.context.agent.instances(), [])
    node, node_trouble = await _node(visit, request)
    by_tenant: dict[str, list[InstanceInfo]] = {}
    for instance in instances:
        by_tenant.setdefault(instance.labels.get("tenant", ""), []).append(instance)
    return render(
        "platform.html",
        visit=visit,
        tenants=tenants,
        by_tenant=by_tenant,
        trouble=trouble or node_trouble,
        node=node,
        weights=sum(t.plan.weight for t in tenants),
        busy_s=sum(t.utilisation.busy_s + t.utilisation.idle_s for t in tenants),
    )


@router.get("/dashboard/platform/instances")
async def instances(visit: Visitor) -> Response:
    """Render all tenants' instances, and the resident Templates."""
    visit.caller.require_platform()
    names = await visit.read(tenant_shares.names)
    found, trouble = await or_error_banner(visit.context.agent.instances(), [])
    templates, _ = await or_error_banner(visit.context.agent.templates(), [])
    found = sorted(found, key=lambda i: (names.get(i.labels.get("tenant", ""), ""), -i.started_at))
    return render(
        "platform_instances.html",
        visit=visit,
        names=names,
        instances=found[:MOST],
        count=len(found),
        templates=templates[:MOST],
        trouble=trouble,
    )


@router.get("/dashboard/platform/storage")
async def storage(visit: Visitor) -> Response:
    """Render the snapshots on the node, and models by the storage tier that serves them."""
    visit.caller.require_platform()
    names, known = await visit.read(
        lambda sql: (tenant_shares.names(sql), tenant_shares.models(sql))
    )
    snapshots, trouble = await or_error_banner(visit.context.agent.snapshots(), [])
    models, cache_trouble = await or_error_banner(visit.context.cache.models(), [])
    store, _ = await or_error_banner(visit.context.cache.stat(), None)
    models = sorted(models, key=lambda m: -m.last_used_at)[:MOST]
    predictions = await asyncio.gather(
        *(or_error_banner(visit.context.cache.predict(model.manifest), None) for model in models)
    )
    tiers = [
        ("origin" if p is None else str(p.tier), p.seconds if p else None) for p, _ in predictions
    ]
    return render(
        "platform_storage.html",
        visit=visit,
        names=names,
        known=known,
        trouble=trouble,
        cache_trouble=cache_trouble,
        store=store,
        snapshots=sorted(snapshots, key=lambda s: -s.last_used_at)[:MOST],
        models=list(zip(models, tiers, strict=True)),
    )


async def _node(visit: PageContext, request: Request) -> tuple[Mapping[str, Any], str]:
    """Return the machine's capabilities, at most a minute old."""
    cached: tuple[float, Mapping[str, Any]] | None = getattr(request.app.state, "node", None)
    if cached is not None and 0 <= visit.now - cached[0] < KEPT_S:
        return cached[1], ""
    capabilities, trouble = await or_error_banner(visit.context.agent.capabilities(), {})
    if not trouble:
        request.app.state.node = (visit.now, capabilities)
    return capabilities, trouble
