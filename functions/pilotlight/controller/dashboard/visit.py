"""A visit: who looks, at which environment, over which span. Every page begins with one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

import sqlalchemy as sa
from fastapi import Depends, Query, Request
from fastapi.responses import RedirectResponse, Response

from pilotlight.controller import sessions, tenants
from pilotlight.controller.access import PLATFORM_TENANT, Principal
from pilotlight.controller.context import Context, Ctx
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.figures import promises, spans
from pilotlight.controller.figures.spans import Span
from pilotlight.controller.lazy_routes import LazyRoute
from pilotlight.controller.sessions import CookieTerms, Session
from pilotlight.errors import PilotlightError, Unauthenticated
from pilotlight.quotas import Plan
from pilotlight.types import Scope
from pilotlight.visitors import MAX_COOKIE
from snapshotter.errors import SnapshotterError
from weight_cache.errors import WeightCacheError

LOGIN = "/dashboard/login"
MAX_NAME = 200
_Read = TypeVar("_Read")


def cookie_terms(context: Context, request: Request) -> CookieTerms:
    """How cookies are called on this browser's connection."""
    return CookieTerms.of(
        request.headers, request.url.scheme, context.config.settings.dashboard_origin
    )


def cookie_of(context: Context, request: Request, name: str, *, limit: int) -> str:
    """The browser's cookie of this name, as it is called on its connection; "" for none, and for
    one that is too long to be ours."""
    found = request.cookies.get(cookie_terms(context, request).name(name), "")
    return found if len(found) <= limit else ""


async def session_cookie(context: Ctx, request: Request) -> str:
    """The sealed session."""
    return cookie_of(context, request, sessions.COOKIE, limit=MAX_COOKIE)


async def form_cookie(context: Ctx, request: Request) -> str:
    """What forms of this browser must carry."""
    return cookie_of(context, request, sessions.FORM_COOKIE, limit=MAX_NAME)


Cookies = Annotated[str, Depends(session_cookie)]
Form = Annotated[str, Depends(form_cookie)]


@dataclass(frozen=True, kw_only=True)
class Visit:
    """What every page knows.

    Attributes:
        environments: those that the key may look at. plan: the tenant's, its overrides included.
        currency: of the tenant's price list; pages show costs in it unless another one is asked
        for. form: the token that forms carry. now: of this view, seconds since the epoch.
    """

    context: Context
    session: Session
    environments: tuple[str, ...]
    span: Span
    plan: Plan
    currency: str
    form: str
    path: str
    now: float

    @property
    def caller(self) -> Principal:
        """Whose key signed in."""
        return self.session.caller

    @property
    def environment(self) -> str:
        """The one that is looked at."""
        return self.caller.environment

    @cached_property
    def is_operator(self) -> bool:
        """Whether this is an administrator of the platform."""
        caller = self.caller
        return (
            caller.scope is Scope.ADMIN
            and caller.tenant_name == PLATFORM_TENANT
            and caller.bound_environment is None
        )

    @cached_property
    def sees_instances(self) -> bool:
        """Whether this key may look at what runs; one that reads bills may not."""
        return self.caller.scope.reaches(Scope.DEPLOY)

    @property
    def sees_tenant(self) -> bool:
        """Whether this key may look at what concerns the whole tenant: its invoices, its
        budgets."""
        return self.caller.bound_environment is None

    def link(self, path: str, **changes: str) -> str:
        """An address within the dashboard that keeps the environment and the span, unless `changes`
        says otherwise."""
        wanted = {"environment": self.environment, "span": self.span.name, **changes}
        if wanted["span"] == spans.DEFAULT:
            del wanted["span"]
        return f"{path}?{urlencode(wanted)}"

    async def read(self, question: Callable[[sa.Connection], _Read]) -> _Read:
        """The answer of the database, asked in a thread, in one consistent view."""

        def ask() -> _Read:
            with self.context.store.read() as sql:
                return question(sql)

        return await self.context.threads.run(self.caller.tenant, ask)


async def visit(
    *,
    request: Request,
    context: Ctx,
    session: Cookies,
    form: Form,
    environment: Annotated[str | None, Query(max_length=MAX_NAME)] = None,
    span: Annotated[str, Query(max_length=MAX_NAME)] = spans.DEFAULT,
) -> Visit:
    """The visit of a request. Raises Unauthenticated, Forbidden, NotFound."""
    now = context.clock()

    def look() -> Visit:
        with context.store.read() as sql:
            found = sessions.resume(
                sql, context.key, session, environment=environment or None, now=now
            )
            caller = found.caller
            known = [e["name"] for e in tenants.environments(sql, tenant=caller.tenant)]
            tenants.demand_environment(sql, tenant=caller.tenant, name=caller.environment)
            plan = promises.plan_of(sql, tenant=caller.tenant, plans=context.config.plans)
        return Visit(
            context=context,
            session=found,
            environments=tuple(e for e in known if caller.bound_environment in (None, e)),
            span=Span.of(span, now),
            plan=plan,
            currency=promises.rates_of(plan, context.config.prices).currency,
            form=form,
            path=request.url.path,
            now=now,
        )

    return await context.threads.look_up(look)


Visitor = Annotated[Visit, Depends(visit)]


class PageRoute(LazyRoute):
    """A page: who has not signed in is sent to do so, and errors are pages as well."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with errors answered for people."""
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
                    title=_TITLES.get(e.status, "That did not work"),
                    message=str(e),
                )

        return page


_TITLES = {
    400: "That is not a question we can answer",
    403: "Not with this key",
    404: "There is nothing here",
}


async def or_trouble(answer: Coroutine[Any, Any, _Read], default: _Read) -> tuple[_Read, str]:
    """What another process answers, or `default` and why: the page is worth having without it."""
    try:
        return await answer, ""
    except (SnapshotterError, WeightCacheError) as e:
        return default, str(e)
