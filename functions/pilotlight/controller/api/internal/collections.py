"""Routes for operations on dicts and queues that activators pass on for functions."""

from __future__ import annotations

from fastapi import Depends, Request

from pilotlight.controller.api.artifacts.collections import (
    DictAnswer,
    DictOperation,
    QueueAnswer,
    QueueOperation,
    do_dict,
    do_queue,
)
from pilotlight.controller.collections.collections import CollectionScope
from pilotlight.controller.context import Ctx, require_platform_token
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.spec.collection import INTERNAL_COLLECTIONS, CollectionKind

router = APIRouter(
    prefix=f"{INTERNAL_COLLECTIONS}/{{tenant}}/{{environment}}",
    include_in_schema=False,
    dependencies=[Depends(require_platform_token)],
)


@router.post("/dicts/{name}")
async def dict_of_function(
    *, context: Ctx, tenant: str, environment: str, name: str, body: DictOperation
) -> DictAnswer:
    """Do an operation on a dict for one of the functions of that environment."""
    return await do_dict(context, _scope(tenant, environment, CollectionKind.DICT, name), body)


@router.post("/queues/{name}")
async def queue_of_function(
    *,
    context: Ctx,
    request: Request,
    tenant: str,
    environment: str,
    name: str,
    body: QueueOperation,
) -> QueueAnswer:
    """Do an operation on a queue for one of the functions of that environment."""
    scope = _scope(tenant, environment, CollectionKind.QUEUE, name)
    return await do_queue(context, scope, body, request)


def _scope(tenant: str, environment: str, kind: CollectionKind, name: str) -> CollectionScope:
    return CollectionScope(
        tenant=tenant, environment=environment, kind=kind, name=name, actor="function"
    )
