"""The dashboard: one page, rendered here, nothing loaded from elsewhere, no scripts."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
import jinja2
from fastapi import APIRouter, Cookie, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from pilotlight.controller import access, figures, sessions, tenants
from pilotlight.controller.access import Principal
from pilotlight.controller.context import Context, Ctx
from pilotlight.errors import PilotlightError, Unauthenticated
from pilotlight.types import Scope
from snapshotter.errors import SnapshotterError
from snapshotter.types import InstanceInfo

log = logging.getLogger(__name__)

PATH = "/dashboard"
LOGIN = "/dashboard/login"
MAX_KEY = 200
BAR_HEIGHT = 22

router = APIRouter(include_in_schema=False)
_pages = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=jinja2.StrictUndefined
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What one rendering of the page needs."""

    caller: Principal
    environments: list[str]
    functions: list[figures.FunctionFigures]
    total: int


@router.get(PATH)
async def page(
    context: Ctx,
    environment: str | None = None,
    session: Annotated[str, Cookie(alias=sessions.COOKIE)] = "",
    form: Annotated[str, Cookie(alias=sessions.FORM_COOKIE)] = "",
) -> Response:
    """The page, or the way to sign in."""
    try:
        view = await anyio.to_thread.run_sync(_look, context, session, environment)
    except Unauthenticated:
        return RedirectResponse(LOGIN, status_code=303)
    instances, trouble = await _instances(context, view.caller)
    for function in view.functions:
        function.instances = sum(1 for i in instances if (i.labels["app"], i.labels["function"]) == (function.app, function.name))
    return render("dashboard.html", view=view, instances=instances, trouble=trouble, **_totals(view), now=context.clock(), form=form)


@router.get(LOGIN)
async def login_form() -> Response:
    """Where a key is pasted."""
    return _login_page()


@router.post(LOGIN)
async def login(
    context: Ctx,
    request: Request,
    key: Annotated[str, Form(max_length=MAX_KEY)],
    form: Annotated[str, Form(max_length=MAX_KEY)] = "",
    cookie: Annotated[str, Cookie(alias=sessions.FORM_COOKIE)] = "",
) -> Response:
    """Exchange a key for a session."""
    sessions.demand_same_site(request.headers, cookie=cookie, field=form)
    try:
        caller = await anyio.to_thread.run_sync(_admit, context, key)
    except PilotlightError as e:
        return _login_page(status=e.status, error=str(e))
    answer = RedirectResponse(PATH, status_code=303)
    answer.set_cookie(
        sessions.COOKIE,
        sessions.begin(context.key, caller, now=context.clock()),
        max_age=int(sessions.SESSION_S),
        path=PATH,
        httponly=True,
        samesite="strict",
        secure=request.headers.get("x-forwarded-proto", request.url.scheme) == "https",
    )
    return answer


@router.post("/dashboard/logout")
async def logout(
    request: Request, form: Annotated[str, Form()] = "", cookie: Annotated[str, Cookie(alias=sessions.FORM_COOKIE)] = ""
) -> Response:
    """End the session in this browser."""
    sessions.demand_same_site(request.headers, cookie=cookie, field=form)
    answer = RedirectResponse(LOGIN, status_code=303)
    answer.delete_cookie(sessions.COOKIE, path=PATH, httponly=True, samesite="strict")
    return answer


def _login_page(*, status: int = 200, error: str = "") -> Response:
    token = secrets.token_urlsafe(16)
    answer = render("login.html", status=status, error=error, form=token)
    answer.set_cookie(sessions.FORM_COOKIE, token, path=PATH, httponly=True, samesite="strict")
    return answer


def _admit(context: Context, key: str) -> Principal:
    with context.store.read() as sql:
        caller = access.authenticate(sql, authorization=f"Bearer {key.strip()}", environment=None, now=context.clock())
    caller.demand(Scope.DEPLOY)
    return caller


def _look(context: Context, session: str, environment: str | None) -> _View:
    now = context.clock()
    with context.store.read() as sql:
        caller = sessions.resume(sql, context.key, session, environment=environment or None, now=now)
        known = [e["name"] for e in tenants.environments(sql, tenant=caller.tenant)]
        return _View(
            caller=caller,
            environments=[e for e in known if caller.bound_environment in (None, e)],
            functions=figures.functions(sql, tenant=caller.tenant, environment=caller.environment, now=now),
            total=figures.count(sql, tenant=caller.tenant, environment=caller.environment),
        )


async def _instances(context: Context, caller: Principal) -> tuple[list[InstanceInfo], str]:
    try:
        return await context.agent.instances({"tenant": caller.tenant, "environment": caller.environment}), ""
    except SnapshotterError as e:
        return [], str(e)  # the page is worth having without them, and says why they are missing


def _totals(view: _View) -> dict[str, Any]:
    shown = view.functions
    return {
        "calls": sum(f.calls for f in shown),
        "errors": sum(f.errors for f in shown),
        "cold": sum(f.cold_starts for f in shown),
        "cost": sum((f.cost for f in shown), Decimal(0)),
        "apps": len({f.app for f in shown}),
        "kinds": figures.START_KINDS,
    }


def render(name: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """A page of our own, with a policy that lets it load nothing and run nothing."""
    nonce = secrets.token_urlsafe(16)
    policy = f"default-src 'none'; style-src 'nonce-{nonce}'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return HTMLResponse(_pages.get_template(name).render(nonce=nonce, **values), status_code=status, headers=headers)


def money(amount: Decimal) -> str:
    """For people: six digits after the point, or the first two that are not zero; exact amounts are in the bill."""
    if amount == 0:
        return "0"
    return f"{amount:.2f}" if amount >= 1 else f"{amount:.{min(12, max(6, 1 - amount.adjusted()))}f}"


def milliseconds(value: int | None) -> str:
    """12 ms, 1.24 s, or a dash."""
    if value is None:
        return "-"
    return f"{value} ms" if value < 1000 else f"{value / 1000:.2f} s"


def bars(hourly: list[int]) -> list[tuple[int, float, float, int]]:
    """(hour, top, height, calls) of each bar, scaled to the highest; an hour with calls is never invisible."""
    highest = max(hourly) or 1
    heights = [max(1.5, BAR_HEIGHT * n / highest) if n else 0.0 for n in hourly]
    return [(hour, BAR_HEIGHT - h, h, n) for hour, (h, n) in enumerate(zip(heights, hourly, strict=True))]


def shares(starts: Mapping[str, int], width: float = 96.0) -> list[tuple[str, float, float, int]]:
    """(kind, left, width, calls) of the parts of one stacked bar."""
    total, left, parts = sum(starts.values()), 0.0, []
    for kind in figures.START_KINDS:
        if n := starts.get(kind, 0):
            part = width * n / total
            parts.append((kind, left, part, n))
            left += part
    return parts


_pages.filters.update(money=money, milliseconds=milliseconds, bars=bars, shares=shares)
