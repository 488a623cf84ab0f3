"""The context of a page view: the session, the environment and the span. Every page route depends
on it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

import sqlalchemy as sa
from fastapi import Depends, Query, Request
from fastapi.responses import RedirectResponse, Response

from pilotlight.controller.analytics import entitlements, time_range
from pilotlight.controller.analytics.time_range import TimeRange
from pilotlight.controller.context import Context, Ctx
from pilotlight.controller.dashboard import navigation
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.navigation import Section
from pilotlight.controller.identity import sessions, tenants
from pilotlight.controller.identity.access_control import PLATFORM_TENANT, Principal
from pilotlight.controller.identity.sessions import CookieAttributes, Session
from pilotlight.controller.lazy_routes import LazyRoute
from pilotlight.core.dashboard.visitor_cookie import MAX_COOKIE
from pilotlight.errors import Forbidden, PilotlightError, Unauthenticated
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.quotas import Plan
from snapshotter.errors import SnapshotterError
from weight_cache.errors import WeightCacheError

LOGIN = "/dashboard/login"
MAX_NAME = 200
_Read = TypeVar("_Read")


def cookie_terms(context: Context, request: Request) -> CookieAttributes:
    """Return the cookie names and attributes for this connection."""
    return CookieAttributes.of(
        request.headers, request.url.scheme, context.config.settings.dashboard_origin
    )


def cookie_of(context: Context, request: Request, name: str, *, limit: int) -> str:
    """Return the browser's cookie of this name; "" if there is none or it is too long to be
    valid."""
    found = request.cookies.get(cookie_terms(context, request).name(name), "")
    return found if len(found) <= limit else ""


async def session_cookie(context: Ctx, request: Request) -> str:
    """Return the sealed session."""
    return cookie_of(context, request, sessions.COOKIE, limit=MAX_COOKIE)


async def form_cookie(context: Ctx, request: Request) -> str:
    """Return the token that this browser's forms must send."""
    return cookie_of(context, request, sessions.FORM_COOKIE, limit=MAX_NAME)


Cookies = Annotated[str, Depends(session_cookie)]
Form = Annotated[str, Depends(form_cookie)]


@dataclass(frozen=True, kw_only=True)
class PageContext:
    """The context that every page has.

    Attributes:
        environments: those that the key may access.
        plan: the tenant's, including its overrides.
        currency: of the tenant's price list; pages show costs in it unless another one is
            requested.
        form: the token that forms send.
        now: time of this view, seconds since the epoch.
    """

    context: Context
    session: Session
    environments: tuple[str, ...]
    span: TimeRange
    plan: Plan
    currency: str
    form: str
    path: str
    now: float

    @property
    def caller(self) -> Principal:
        """The owner of the key that signed in."""
        return self.session.caller

    @property
    def environment(self) -> str:
        """The selected environment."""
        return self.caller.environment

    @property
    def where(self) -> dict[str, str]:
        """The tenant and the selected environment, as queries take them."""
        return {"tenant": self.caller.tenant, "environment": self.environment}

    @property
    def place(self) -> tuple[str, str, str]:
        """(tenant, environment, currency): viewers of one place share its live figures."""
        return self.caller.tenant, self.environment, self.currency

    @cached_property
    def is_operator(self) -> bool:
        """Whether the caller is a platform administrator."""
        caller = self.caller
        return (
            caller.scope is Scope.ADMIN
            and caller.tenant_name == PLATFORM_TENANT
            and caller.bound_environment is None
        )

    @cached_property
    def sees_instances(self) -> bool:
        """Whether the key may see instances; a key with scope read-billing may not."""
        return self.caller.scope.reaches(Scope.DEPLOY)

    def require_deploy(self, what: str) -> None:
        """Raise Forbidden unless the key may see instances. `what` begins the message: "apps
        require"."""
        if not self.sees_instances:
            raise Forbidden(f"{what} a key with scope 'deploy'", scope=Scope.DEPLOY.value)

    @property
    def sees_tenant(self) -> bool:
        """Whether the key may see data of the whole tenant: invoices and budgets."""
        return self.caller.bound_environment is None

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The sections and pages that the key may see."""
        return tuple(navigation.sections(self))

    def link(self, path: str, **changes: str) -> str:
        """Return a dashboard URL that keeps the environment and the span, except for `changes`."""
        parameters = {"environment": self.environment, "span": self.span.name, **changes}
        if parameters["span"] == time_range.DEFAULT:
            del parameters["span"]
        return f"{path}?{urlencode(parameters)}"

    async def read(self, query: Callable[[sa.Connection], _Read]) -> _Read:
        """Run a database query in a thread, in one consistent view, and return its result."""
        return await self.context.read(self.caller.tenant, query)


async def page_context(
    *,
    request: Request,
    context: Ctx,
    session: Cookies,
    form: Form,
    environment: Annotated[str | None, Query(max_length=MAX_NAME)] = None,
    span: Annotated[str, Query(max_length=MAX_NAME)] = time_range.DEFAULT,
) -> PageContext:
    """Return a request's context. Raises Unauthenticated, Forbidden, NotFound."""
    now = context.clock()

    def load() -> PageContext:
        with context.store.read() as sql:
            found = sessions.authenticate_cookie(
                sql, context.key, session, environment=environment or None, now=now
            )
            caller = found.caller
            known = [e["name"] for e in tenants.environments(sql, tenant=caller.tenant)]
            tenants.require_environment(sql, tenant=caller.tenant, name=caller.environment)
            plan = entitlements.plan_of(sql, tenant=caller.tenant, plans=context.config.plans)
        return PageContext(
            context=context,
            session=found,
            environments=tuple(e for e in known if caller.bound_environment in (None, e)),
            span=TimeRange.of(span, now),
            plan=plan,
            currency=entitlements.rates_of(plan, context.config.prices).currency,
            form=form,
            path=request.url.path,
            now=now,
        )

    return await context.threads.look_up(load)


Visitor = Annotated[PageContext, Depends(page_context)]


class PageRoute(LazyRoute):
    """A page route: redirects to the sign-in form without a session, and renders errors as
    pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler with errors rendered as pages."""
        handle = super().get_route_handler()

        async def page(request: Request) -> Response:
            try:
                return await handle(request)
            except Unauthenticated:
                return RedirectResponse(LOGIN, status_code=303)
            except PilotlightError as e:
                return render(
                    "error.html",
                    status=e.status,
                    title=_TITLES.get(e.status, "The request failed"),
                    message=str(e),
                )

        return page


_TITLES = {
    400: "Invalid request",
    403: "Access denied",
    404: "Not found",
}


async def or_error_banner(answer: Coroutine[Any, Any, _Read], default: _Read) -> tuple[_Read, str]:
    """Return another process's response, or `default` and the error: the page is useful without
    it."""
    try:
        return await answer, ""
    except (SnapshotterError, WeightCacheError) as e:
        return default, str(e)
