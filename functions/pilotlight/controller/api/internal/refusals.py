"""The route by which activators report what guards of language models refused, for the audit
log."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from pydantic import BaseModel, ConfigDict, Field

from pilotlight.controller.context import Ctx, require_platform_token
from pilotlight.controller.database import audit_trail
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.protocol import REFUSALS_PATH

internal = APIRouter(dependencies=[Depends(require_platform_token)], include_in_schema=False)

MAX_ENTRIES = 1000
ACTION = "guard.refuse"
Text = Annotated[str, Field(max_length=512)]


class Refusal(BaseModel):
    """Refusals of one kind: of a key, by a rule. `call` is the first of so many `calls`."""

    model_config = ConfigDict(extra="forbid")

    tenant: Text
    function: Text
    revision: Text
    key: Text
    stage: Text
    rule: Text
    call: Text
    calls: int = Field(ge=1)
    first_at: float
    last_at: float


class Refusals(BaseModel):
    """A report of an activator."""

    model_config = ConfigDict(extra="forbid")

    refusals: list[Refusal] = Field(max_length=MAX_ENTRIES)


@internal.post(REFUSALS_PATH)
def take(context: Ctx, body: Refusals) -> dict[str, int]:
    """Record refusals in the audit log of the function's tenant."""
    with context.store.write() as write:
        for one in body.refusals:
            audit_trail.record(
                write,
                tenant=one.tenant,
                actor=one.key or "anonymous",
                action=ACTION,
                subject=one.function,
                request=one.call,
                after=one.model_dump(
                    include={"revision", "stage", "rule", "calls", "first_at", "last_at"}
                ),
            )
    return {"accepted": len(body.refusals)}
