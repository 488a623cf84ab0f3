"""The API's reference as one plain page, made from the OpenAPI document: nothing is loaded from
elsewhere."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pilotlight.controller.context import Ctx
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.core.dashboard.dashboard_origin import DASHBOARD_PATH

_METHODS = ("get", "head", "post", "put", "patch", "delete")

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs(context: Ctx, request: Request) -> Response:
    """Every public route: what it does and takes. The document itself is at /openapi.json."""
    document: dict[str, Any] = request.app.openapi()
    info, origin = document["info"], context.config.settings.dashboard_origin
    home = (origin.url if origin is not None else "") + DASHBOARD_PATH
    return render(
        "reference.html",
        title=info["title"],
        summary=info["summary"],
        routes=routes(document),
        home=home,
    )


def routes(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The public operations by tag: method, path, summary, parameters."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path, operations in document["paths"].items():
        for method in _METHODS:
            if method in operations:
                operation = operations[method]
                names = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"]
                entry = {
                    "method": method.upper(),
                    "path": path,
                    "summary": operation.get("description", ""),
                    "parameters": names,
                }
                found.setdefault(operation.get("tags", ["other"])[0], []).append(entry)
    return found
