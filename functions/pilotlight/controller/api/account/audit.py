"""Routes for reading the audit log."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import Admin, Ctx
from pilotlight.controller.database import audit_trail
from pilotlight.controller.identity import tenants
from pilotlight.controller.lazy_routes import APIRouter

router = APIRouter(prefix="/v1", tags=["audit"])
Seconds = Annotated[float | None, Query(description="seconds since the epoch", allow_inf_nan=False)]
EVERY_TENANT = "*"


class AuditEntry(Body):
    """One change: the actor (`actor`, a key's id, or `platform`), the action, its subject, the
    values before and after, and the request's source address."""

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
    """Changes, newest first. Pass `before_id` to request the next page; null: this is the last
    page."""

    entries: list[AuditEntry]
    before_id: int | None


@router.get("/audit", response_model=AuditLog)
def audit_log(
    *,
    context: Ctx,
    caller: Admin,
    actor: Annotated[str | None, Query(description="a key's id, or `platform`")] = None,
    action: Annotated[
        str | None, Query(description="`key.create`, or `key.*` for every action with this prefix")
    ] = None,
    subject: Annotated[str | None, Query(description="the changed object")] = None,
    address: Annotated[str | None, Query(description="source address of the request")] = None,
    since: Seconds = None,
    until: Seconds = None,
    tenant: Annotated[
        str | None,
        Query(description="another tenant, or `*` for all; platform administrators only"),
    ] = None,
    before_id: Annotated[int | None, Query(ge=0, le=(1 << 63) - 1)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """List changes, newest first."""
    caller.require_whole_tenant()
    if tenant not in (None, caller.tenant_name):
        caller.require_platform()
    with context.store.read() as sql:
        tenant_id = (
            caller.tenant
            if tenant is None
            else None
            if tenant == EVERY_TENANT
            else tenants.find(sql, name=tenant).id
        )
        filters = audit_trail.AuditQuery(
            tenant=tenant_id,
            actor=actor,
            action=action,
            subject=subject,
            since=since,
            until=until,
            address=address,
            before_id=before_id,
        )
        found = audit_trail.entries(sql, filters, limit=limit)
    return {"entries": found, "before_id": found[-1]["id"] if len(found) == limit else None}
