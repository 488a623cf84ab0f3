"""Who changed what, when, and from where."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query

from pilotlight.controller import audit, tenants
from pilotlight.controller.api.models import Body
from pilotlight.controller.context import Admin, Ctx
from pilotlight.controller.lazy_routes import APIRouter

router = APIRouter(prefix="/v1", tags=["audit"])
Seconds = Annotated[float | None, Query(description="seconds since the epoch", allow_inf_nan=False)]
EVERY_TENANT = "*"


class AuditEntry(Body):
    """One change: who (`actor`, a key's id, or `platform`), what, from what, to what, and from
    where."""

    id: int
    at: float
    tenant: str
    tenant_name: str
    actor: str
    action: str
    subject: str
    before: Any
    after: Any
    request: str
    address: str


class AuditLog(Body):
    """Changes, newest first. `before_id` asks for the page after this one; null: there is none."""

    entries: list[AuditEntry]
    before_id: int | None


@router.get("/audit", response_model=AuditLog)
def audit_log(
    *,
    context: Ctx,
    caller: Admin,
    actor: Annotated[str | None, Query(description="a key's id, or `platform`")] = None,
    action: Annotated[
        str | None, Query(description="`key.create`, or `key.*` for all that begin so")
    ] = None,
    subject: Annotated[str | None, Query(description="what was changed")] = None,
    address: Annotated[str | None, Query(description="from where")] = None,
    since: Seconds = None,
    until: Seconds = None,
    tenant: Annotated[
        str | None,
        Query(description="of another tenant, or `*` of all; for administrators of the platform"),
    ] = None,
    before_id: Annotated[int | None, Query(ge=0, le=(1 << 63) - 1)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """Who changed what, newest first."""
    caller.demand_whole_tenant()
    if tenant not in (None, caller.tenant_name):
        caller.demand_platform()
    with context.store.read() as sql:
        whose = (
            caller.tenant
            if tenant is None
            else None
            if tenant == EVERY_TENANT
            else tenants.find(sql, name=tenant).id
        )
        wanted = audit.Wanted(
            tenant=whose,
            actor=actor,
            action=action,
            subject=subject,
            since=since,
            until=until,
            address=address,
            before_id=before_id,
        )
        found = audit.entries(sql, wanted, limit=limit)
    return {"entries": found, "before_id": found[-1]["id"] if len(found) == limit else None}
