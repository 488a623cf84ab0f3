"""Signing in with a key, and out again."""

from __future__ import annotations

import secrets
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Form, Request
from fastapi.responses import RedirectResponse, Response

from pilotlight.controller import access, sessions
from pilotlight.controller.access import Principal
from pilotlight.controller.context import Context, Ctx
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.visit import HOME, LOGIN, MAX_NAME, Cookies, PageRoute, ended_of
from pilotlight.controller.dashboard.visit import Form as FormCookie
from pilotlight.errors import PilotlightError, Unauthenticated

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get(LOGIN)
async def login_form(context: Ctx, request: Request) -> Response:
    """Where a key is pasted."""
    try:
        _demand_private(context, request)
    except PilotlightError as e:
        return _login_page(request, status=e.status, error=str(e))
    return _login_page(request)


@router.post(LOGIN)
async def login(
    context: Ctx,
    request: Request,
    key: Annotated[str, Form(max_length=MAX_NAME)],
    form: Annotated[str, Form(max_length=MAX_NAME)] = "",
    cookie: FormCookie = "",
) -> Response:
    """Exchange a key for a session."""
    try:
        sessions.demand_same_site(request.headers, cookie=cookie, field=form)
        _demand_private(context, request)
        caller = await anyio.to_thread.run_sync(_admit, context, key)
    except PilotlightError as e:
        return _login_page(request, status=e.status, error=str(e))
    answer = RedirectResponse(HOME, status_code=303)
    _set(answer, request, sessions.COOKIE, sessions.begin(context.key, caller, now=context.clock()), max_age=int(sessions.SESSION_S))
    _set(answer, request, sessions.FORM_COOKIE, secrets.token_urlsafe(16), max_age=int(sessions.SESSION_S))
    return answer


@router.post("/dashboard/logout")
async def logout(
    context: Ctx,
    request: Request,
    form: Annotated[str, Form(max_length=MAX_NAME)] = "",
    cookie: FormCookie = "",
    session: Cookies = "",
) -> Response:
    """End the session, in every tab of it."""
    sessions.demand_same_site(request.headers, cookie=cookie, field=form)
    try:
        found, _, until = sessions.read(context.key, session)
        ended_of(request).add(found, until, context.clock())
    except Unauthenticated:
        pass  # there is none to end
    answer = RedirectResponse(LOGIN, status_code=303)
    answer.delete_cookie(sessions.COOKIE, path=HOME, httponly=True, samesite="strict")
    return answer


def _demand_private(context: Context, request: Request) -> None:
    sessions.demand_private(request.headers, request.url.scheme, allowed=context.config.settings.plain_http_sign_in)


def _login_page(request: Request, *, status: int = 200, error: str = "") -> Response:
    token = secrets.token_urlsafe(16)
    answer = render("login.html", status=status, error=error, form=token)
    _set(answer, request, sessions.FORM_COOKIE, token, max_age=None)
    return answer


def _set(answer: Response, request: Request, name: str, value: str, *, max_age: int | None) -> None:
    secure = sessions.is_encrypted(request.headers, request.url.scheme)
    answer.set_cookie(name, value, max_age=max_age, path=HOME, httponly=True, samesite="strict", secure=secure)


def _admit(context: Context, key: str) -> Principal:
    with context.store.read() as sql:
        caller = access.authenticate(sql, authorization=f"Bearer {key.strip()}", environment=None, now=context.clock())
    return sessions.demand_reach(caller)
