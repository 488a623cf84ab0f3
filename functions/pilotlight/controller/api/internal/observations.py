"""The route by which activators report observations of calls."""

from __future__ import annotations

import json
from typing import Any

import anyio.to_thread
from fastapi import Depends, Request

from pilotlight.controller.context import Context, Ctx, require_platform_token
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.slo import observations
from pilotlight.errors import InvalidInput
from pilotlight.protocol import OBSERVATIONS_PATH

internal = APIRouter(dependencies=[Depends(require_platform_token)], include_in_schema=False)


@internal.post(OBSERVATIONS_PATH)
async def take(context: Ctx, request: Request) -> dict[str, bool]:
    """Count an activator's observations. `accepted` is false for a report that was already
    counted."""
    return {"accepted": await anyio.to_thread.run_sync(_ingest, context, await request.body())}


def _ingest(context: Context, text: bytes) -> bool:
    try:
        body: Any = json.loads(text)
    except ValueError as e:
        raise InvalidInput(f"observations: the body is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise InvalidInput("observations: the body must be an object")
    with context.store.write() as write:
        return observations.ingest_observations(write, body)
