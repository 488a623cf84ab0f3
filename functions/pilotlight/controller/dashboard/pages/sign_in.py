"""Signing in with a key, a one-time code, or by an issuer, and signing out."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

import anyio.to_thread
from fastapi import Form, Query, Request
from fastapi.responses import RedirectResponse, Response

from pilotlight.controller.context import Context, Ctx
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import (
    LOGIN,
    MAX_NAME,
    Cookies,
    PageRoute,
    cookie_of,
    cookie_terms,
)
from pilotlight.controller.dashboard.page_context import Form as FormCookie
from pilotlight.controller.database import tables
from pilotlight.controller.database.audit_trail import client_address
from pilotlight.controller.identity import access_control, sessions
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.identity.sessions import CookieAttributes
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.server.request_id import request_id
from pilotlight.controller.sign_in import browser_sign_in, keys
from pilotlight.controller.sign_in.browser_sign_in import Callback
from pilotlight.controller.sign_in.issuers import Identity
from pilotlight.core.dashboard.dashboard_origin import DASHBOARD_PATH
from pilotlight.core.dashboard.visitor_cookie import MAX_COOKIE
from pilotlight.core.oidc.settings import CALLBACK_PATH
from pilotlight.errors import Forbidden, PilotlightError, Unauthenticated

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get(LOGIN)
async def login_form(context: Ctx, request: Request) -> Response:
    """Render the sign-in form."""
    try:
        _require_private(context, request)
    except PilotlightError as e:
        return _login_page(context, request, status=e.status, error=str(e))
    return _login_page(context, request)


@router.post(LOGIN)
async def login(
    *,
    context: Ctx,
    request: Request,
    cookie: FormCookie,
    key: Annotated[str, Form(max_length=MAX_NAME)] = "",
    code: Annotated[str, Form(max_length=MAX_NAME)] = "",
    form: Annotated[str, Form(max_length=MAX_NAME)] = "",
) -> Response:
    """Exchange a key, or a one-time code (`sign_in_codes`), for a session."""
    try:
        sessions.require_same_site(request.headers, cookie=cookie, field=form)
        _require_private(context, request)
        if code:
            key_id = context.codes.redeem(code, now=context.clock())
            caller = await anyio.to_thread.run_sync(_find_caller, context, key_id)
        else:
            caller = await anyio.to_thread.run_sync(_authenticate, context, key)
    except PilotlightError as e:
        return _login_page(context, request, status=e.status, error=str(e))
    answer = RedirectResponse(DASHBOARD_PATH, status_code=303)
    _start_session(context, request, answer, caller)
    return answer


@router.get("/dashboard/login/by/{issuer}")
async def begin_by_issuer(context: Ctx, request: Request, issuer: str) -> Response:
    """Send the browser to an issuer's page."""
    try:
        _require_private(context, request)
        if not sessions.is_same_site(request.headers):
            raise Forbidden("this sign-in was begun by another site: begin it here")
        context.issuers.client(issuer)  # it exists
        begun, page = await browser_sign_in.begin(
            context.issuers,
            issuer,
            redirect_url=context.config.redirect_url(issuer),
            now=context.clock(),
        )
    except PilotlightError as e:
        return _login_page(context, request, status=e.status, error=str(e))
    answer = RedirectResponse(page, status_code=303, headers={"cache-control": "no-store"})
    terms = cookie_terms(context, request)
    cookie = begun.seal(context.key.sign_ins)
    lasts = int(browser_sign_in.LASTS_S)
    # lax: the issuer's page sends the browser back
    _set(answer, terms, browser_sign_in.COOKIE, cookie, max_age=lasts, samesite="lax")
    return answer


@router.get(CALLBACK_PATH)
async def end_by_issuer(
    *,
    context: Ctx,
    request: Request,
    state: Annotated[str, Query(max_length=MAX_NAME)] = "",
    code: Annotated[str, Query(max_length=browser_sign_in.MAX_CODE)] = "",
    iss: Annotated[str, Query(max_length=MAX_COOKIE)] = "",
    error: Annotated[str, Query(max_length=MAX_COOKIE)] = "",
    error_description: Annotated[str, Query(max_length=MAX_COOKIE)] = "",
) -> Response:
    """Sign in a browser that an issuer sends back."""
    callback = Callback(
        state=state, code=code, issuer=iss, error=error, description=error_description
    )
    try:
        _require_private(context, request)
        caller = await _caller_of(context, request, callback)
    except PilotlightError as e:
        answer = _login_page(context, request, status=e.status, error=str(e))
    else:
        # A page, not a redirect: browsers send no strict cookie with a redirect that begins at
        # another site.
        answer = render("signed_in.html", location=DASHBOARD_PATH)
        _start_session(context, request, answer, caller)
    terms = cookie_terms(context, request)
    _set(answer, terms, browser_sign_in.COOKIE, "", max_age=0, samesite="lax")
    return answer


async def _caller_of(context: Context, request: Request, callback: Callback) -> Principal:
    cookie = cookie_of(context, request, browser_sign_in.COOKIE, limit=MAX_COOKIE)
    begun = browser_sign_in.open_cookie(cookie, context.key.sign_ins, now=context.clock())
    identity = await browser_sign_in.end(
        context.issuers, begun, callback, address=client_address(), now=context.clock()
    )
    return await anyio.to_thread.run_sync(_create_key, context, identity, request_id(request))


def _create_key(context: Context, identity: Identity, request: str) -> Principal:
    with context.store.write() as write:
        return keys.create_for_dashboard(write, identity, request=request)


def _start_session(context: Context, request: Request, answer: Response, caller: Principal) -> None:
    """Set a new session's cookies."""
    terms, lasts = cookie_terms(context, request), int(sessions.SESSION_S)
    cookie = sessions.issue_cookie(context.key, caller, now=context.clock())
    _set(answer, terms, sessions.COOKIE, cookie, max_age=lasts)
    _set(answer, terms, sessions.FORM_COOKIE, secrets.token_urlsafe(16), max_age=lasts)


@router.post("/dashboard/logout")
async def logout(
    context: Ctx,
    request: Request,
    cookie: FormCookie,
    session: Cookies,
    form: Annotated[str, Form(max_length=MAX_NAME)] = "",
) -> Response:
    """End the session, in all its tabs."""
    sessions.require_same_site(request.headers, cookie=cookie, field=form)
    try:
        found, key, until = sessions.parse_cookie(context.key, session)
        if until > context.clock():
            await anyio.to_thread.run_sync(_end, context, found, key, until)
    except Unauthenticated:
        pass  # there is no session to end
    answer = RedirectResponse(LOGIN, status_code=303)
    _set(answer, cookie_terms(context, request), sessions.COOKIE, "", max_age=0)
    return answer


def _require_private(context: Context, request: Request) -> None:
    sessions.require_private_connection(
        request.headers, request.url.scheme, allowed=context.config.settings.plain_http_sign_in
    )


def _login_page(
    context: Context, request: Request, *, status: int = 200, error: str = ""
) -> Response:
    token = secrets.token_urlsafe(16)
    # A link of another site must not sign a visitor in to its author's account.
    takes_codes = sessions.is_same_site(request.headers)
    answer = render(
        "login.html",
        status=status,
        error=error,
        form=token,
        takes_codes=takes_codes,
        issuers=context.issuers.names,
    )
    _set(answer, cookie_terms(context, request), sessions.FORM_COOKIE, token, max_age=None)
    return answer


def _set(
    answer: Response,
    terms: CookieAttributes,
    name: str,
    value: str,
    *,
    max_age: int | None,
    samesite: Literal["strict", "lax"] = "strict",
) -> None:
    answer.set_cookie(
        terms.name(name),
        value,
        max_age=max_age,
        path=terms.path,
        httponly=True,
        samesite=samesite,
        secure=terms.is_secure,
    )


def _end(context: Context, session: str, key: str, until: float) -> None:
    with context.store.write() as write:
        sessions.end_session(write, session=session, key=key, until=until)
        keys.end_dashboards(write, key)


def _find_caller(context: Context, key_id: str) -> Principal:
    with context.store.read() as sql:
        caller = access_control.find_principal(
            sql, tables.api_keys.c.id == key_id, environment=None, now=context.clock()
        )
    return sessions.require_dashboard_access(caller)


def _authenticate(context: Context, key: str) -> Principal:
    with context.store.read() as sql:
        caller = access_control.authenticate(
            sql, authorization=f"Bearer {key.strip()}", environment=None, now=context.clock()
        )
    return sessions.require_dashboard_access(caller)
