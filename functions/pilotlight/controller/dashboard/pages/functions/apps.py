"""Pages of apps: what is deployed, since when and by whom, and how each function is called."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Path
from fastapi.responses import Response

from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import MAX_NAME, PageContext, PageRoute, Visitor
from pilotlight.controller.database import bulk, tables
from pilotlight.controller.deployments import app_registry
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.release import app_history
from pilotlight.spec.engines import is_language_model
from pilotlight.spec.function import FunctionKind

MAX_APPS = 200
MAX_EXAMPLE = 300
"""Characters of a declared example that are shown."""
DEPLOYMENTS = 50
"""Newest deployments of an app that its page shows."""
_Name = Annotated[str, Path(max_length=MAX_NAME)]

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One callable of a function: HTTP method, path at the platform's URL, and the body of a
    request, if it has one."""

    verb: str
    path: str
    body: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppRow:
    """An app, and its newest deployment (None if its entry was deleted)."""

    app: Mapping[str, Any]
    newest: Mapping[str, Any] | None


@router.get("/dashboard/apps")
async def listing(visit: Visitor) -> Response:
    """Render the environment's apps with their newest deployment."""
    visit.require_deploy("apps require")
    rows, people = await visit.read(lambda sql: _load(sql, visit))
    return render("apps.html", visit=visit, rows=rows, people=people)


@router.get("/dashboard/apps/{app}")
async def one(visit: Visitor, app: _Name) -> Response:
    """Render an app: addresses of its functions, and its deployments. Raises NotFound."""
    visit.require_deploy("apps require")
    found, entries, people = await visit.read(lambda sql: _one(sql, visit, app))
    return render(
        "app.html",
        visit=visit,
        found=found,
        functions=[(one, list(addresses(app, one["spec"]))) for one in found["functions"]],
        entries=entries,
        people=people,
        shares_origin=visit.context.config.settings.dashboard_origin is None,
    )


def _load(sql: sa.Connection, visit: PageContext) -> tuple[list[AppRow], dict[str, str]]:
    found = app_registry.apps(sql, **visit.where)[:MAX_APPS]
    table = tables.deployments
    columns = ("app", "action", "message", "created_at", "created_by")
    query = sa.select(*(table.c[name] for name in columns)).where(
        table.c.tenant == visit.caller.tenant,
        table.c.environment == visit.environment,
        bulk.is_one_of(
            sql, (table.c.app, table.c.version), [(a["name"], a["version"]) for a in found]
        ),
    )
    newest = {str(row["app"]): dict(row) for row in sql.execute(query).mappings()}
    rows = [AppRow(app=app, newest=newest.get(app["name"])) for app in found]
    return rows, key_names(sql, visit, (row["created_by"] for row in newest.values()))


def _one(
    sql: sa.Connection, visit: PageContext, app: str
) -> tuple[dict[str, Any], Sequence[Mapping[str, Any]], dict[str, str]]:
    found = app_registry.app(sql, **visit.where, name=app)
    entries = app_history.entries(sql, **visit.where, app=app, limit=DEPLOYMENTS)
    return found, entries, key_names(sql, visit, (entry["created_by"] for entry in entries))


def key_names(sql: sa.Connection, visit: PageContext, ids: Iterable[str]) -> dict[str, str]:
    """Return the names of the tenant's keys among `ids`."""
    table = tables.api_keys
    query = sa.select(table.c.id, table.c.name).where(
        table.c.tenant == visit.caller.tenant, table.c.id.in_(set(ids))
    )
    return {row.id: row.name for row in sql.execute(query) if row.name}


def addresses(app: str, spec: Mapping[str, Any]) -> Iterator[Address]:
    """Yield how a function is called."""
    name = spec["name"]
    match spec.get("kind"):
        case FunctionKind.ASGI:
            yield Address(verb="GET", path=f"/fn/{app}/{name}/")
            if is_language_model(spec):
                body = (
                    f'{{"model": "{app}/{name}", "messages": [{{"role": "user", "content": "…"}}]}}'
                )
                yield Address(verb="POST", path="/v1/chat/completions", body=body)
        case FunctionKind.ENGINE:
            is_embedding = (spec.get("engine") or {}).get("task") == "embed"
            verb = "embeddings" if is_embedding else "chat/completions"
            body = (
                '"input": "…"' if is_embedding else '"messages": [{"role": "user", "content": "…"}]'
            )
            yield Address(
                verb="POST", path=f"/v1/{verb}", body=f'{{"model": "{app}/{name}", {body}}}'
            )
        case _:
            for method in spec.get("methods", ()):
                path = f"{name}.{method['name']}" if method.get("name") else name
                yield Address(
                    verb="POST",
                    path=f"/v1/functions/{app}/{path}:invoke",
                    body=example_body(method),
                )


def example_body(method: Mapping[str, Any]) -> str:
    """Return a JSON body for a method: its declared example if that is short, else its parameters'
    names."""
    if method.get("example") is not None:
        text = json.dumps(method["example"], ensure_ascii=False)
        if len(text) <= MAX_EXAMPLE:
            return text
    named = (f'"{name}": …' for name in method.get("parameters", ()))
    return f"{{{', '.join(named)}}}"
