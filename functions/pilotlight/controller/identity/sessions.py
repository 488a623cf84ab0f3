"""Dashboard sessions: a cookie, sealed with a key that only the controller has, that contains the
id of an API key and an expiry. Activators read a second part of it
(`pilotlight.core.dashboard.visitor_cookie`), which grants no access.

The server stores only the ids of sessions that were signed out of (table `ended_sessions`). Every
request looks up the key again, so revoking it ends its sessions too. Signing in always sets a new
cookie, whatever the browser sent: a cookie planted by an attacker is never adopted (session
fixation)."""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from starlette.datastructures import Headers

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity import access_control
from pilotlight.controller.identity.access_control import Principal
from pilotlight.core.crypto import DecryptionFailed, PlatformKey
from pilotlight.core.dashboard import visitor_cookie
from pilotlight.core.dashboard.dashboard_origin import DASHBOARD_PATH, DashboardOrigin
from pilotlight.errors import Forbidden, Unauthenticated
from pilotlight.spec.identifiers import Scope

COOKIE = visitor_cookie.COOKIE
FORM_COOKIE = "pilotlight_form"
SESSION_S = 12 * 3600.0
MAX_ENDED = 1000
"""Sign-outs stored per API key. The limit is per key, so that sign-outs of other keys stay
stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A signed-in session. `until`: wall clock, seconds since the epoch."""

    id: str
    caller: Principal
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CookieAttributes:
    """Names and attributes of the dashboard's cookies on a browser's connection (RFC 6265bis,
    4.1.3).

    Over TLS names have a prefix: a page without TLS, which an attacker on the network can forge,
    can neither set nor replace such cookies. The prefix is `__Secure-`, or `__Host-` if the
    dashboard has its own origin: then pages of sibling hosts cannot, either. A `__Host-` cookie
    must apply to all paths, so it is not for an origin that serves functions."""

    is_secure: bool
    is_host_only: bool

    @classmethod
    def of(
        cls, headers: Mapping[str, str], scheme: str, origin: DashboardOrigin | None
    ) -> CookieAttributes:
        """Return the attributes for a request. `origin`: the dashboard's own; if it is https,
        cookies are Secure even if a proxy does not report TLS."""
        is_secure = is_encrypted(headers, scheme) or (origin is not None and origin.is_encrypted)
        return cls(is_secure=is_secure, is_host_only=is_secure and origin is not None)

    def name(self, name: str) -> str:
        """Return the cookie's name with its prefix."""
        return (
            f"__Host-{name}"
            if self.is_host_only
            else f"__Secure-{name}"
            if self.is_secure
            else name
        )

    @property
    def path(self) -> str:
        """The paths to which the cookies apply."""
        return "/" if self.is_host_only else DASHBOARD_PATH


def end_session(write: Write, *, session: str, key: str, until: float) -> None:
    """Mark this session as ended until it would expire. At most MAX_ENDED are stored per API key;
    the oldest are deleted first."""
    table = tables.ended_sessions
    of_key = (
        sa.select(table.c.id)
        .where(table.c.key == key)
        .order_by(table.c.until.desc())
        .offset(MAX_ENDED - 1)
    )
    surplus = list(write.sql.execute(of_key).scalars())
    if surplus:
        write.sql.execute(sa.delete(table).where(table.c.id.in_(surplus)))
    write.sql.execute(
        write.insert(table).values(id=session, key=key, until=until).on_conflict_do_nothing()
    )


def ended_sessions_among(sql: sa.Connection, sessions: Collection[str]) -> set[str]:
    """Return those of `sessions` that were signed out of."""
    table = tables.ended_sessions
    return set(sql.execute(sa.select(table.c.id).where(table.c.id.in_(sessions))).scalars())


def purge(write: Write, *, now: float) -> None:
    """Delete sign-outs of sessions that have expired."""
    write.sql.execute(sa.delete(tables.ended_sessions).where(tables.ended_sessions.c.until <= now))


def issue_cookie(key: PlatformKey, caller: Principal, *, now: float) -> str:
    """Return the cookie's value for a caller who has just presented a valid key."""
    until = now + SESSION_S
    session = key.sessions.seal(
        json.dumps({"id": secrets.token_hex(12), "key": caller.key, "until": until})
    )
    return visitor_cookie.join_cookie(session, key.activator.visitors, key=caller.key, until=until)


def authenticate_cookie(
    sql: sa.Connection, key: PlatformKey, cookie: str, *, environment: str | None, now: float
) -> Session:
    """Return the session of a cookie. Raises Unauthenticated, or Forbidden if the key may not
    access the dashboard."""
    session, key_id, until = parse_cookie(key, cookie)
    if until <= now or ended_sessions_among(sql, [session]):
        raise Unauthenticated("the session has ended: sign in again")
    caller = access_control.find_principal(
        sql, tables.api_keys.c.id == key_id, environment=environment, now=now
    )
    return Session(id=session, caller=require_dashboard_access(caller), until=until)


def parse_cookie(key: PlatformKey, cookie: str) -> tuple[str, str, float]:
    """Return (session's id, key's id, expiry) of a cookie that we sealed. Raises
    Unauthenticated."""
    try:
        session = json.loads(key.sessions.open(visitor_cookie.session_part(cookie)))
        return str(session["id"]), str(session["key"]), float(session["until"])
    except (DecryptionFailed, KeyError) as e:
        raise Unauthenticated("the session cookie is not valid: sign in again") from e


def require_dashboard_access(caller: Principal) -> Principal:
    """Return the caller if its key may view pages that show a whole environment. Raises
    Forbidden."""
    caller.require_scope(Scope.READ_BILLING)
    if caller.bound_app is not None:
        raise Forbidden(
            f"key {caller.key} may only access app {caller.bound_app!r}, and pages show the whole "
            "environment",
            app=caller.bound_app,
        )
    return caller


def require_same_site(headers: Mapping[str, str], *, cookie: str, field: str) -> None:
    """Raise Forbidden for a form that another site sent (CSRF).

    `field` came with the form and must equal `cookie`, which is SameSite=Strict: a browser does not
    send it with another site's form. The origin that browsers report (Fetch Metadata) is checked
    too; our own Host header would prove nothing, since the activator sets it."""
    if (
        not is_same_site(headers)
        or not field
        or not hmac.compare_digest(cookie.encode(), field.encode())
    ):
        raise Forbidden(
            "this form was sent from another site, or is older than this browser's session: reload "
            "the page"
        )


def is_same_site(headers: Mapping[str, str]) -> bool:
    """Whether the request comes from our own page, or from the browser's user; True if the browser
    does not say (Fetch Metadata)."""
    return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")


def is_encrypted(headers: Mapping[str, str], scheme: str) -> bool:
    """Whether the browser uses TLS: directly, or according to the proxy that forwards its
    requests."""
    return headers.get("x-forwarded-proto", scheme).partition(",")[0].strip() == "https"


def require_private_connection(headers: Mapping[str, str], scheme: str, *, allowed: bool) -> None:
    """Raise Forbidden if a key would cross a network unencrypted: without TLS, and with a hop on
    another machine.

    `allowed`: the setting `plain_http_sign_in`. Hops are those of X-Forwarded-For: the activator
    writes the last, and earlier ones can only make the check stricter."""
    if allowed or is_encrypted(headers, scheme) or all(map(_is_here, _hops(headers))):
        return
    raise Forbidden(
        "signing in from another machine requires https: the key and the session could be read on "
        "the network. Use a TLS proxy (it must send X-Forwarded-Proto), tunnel with `ssh -L "
        "8700:127.0.0.1:8700`, or set controller.plain_http_sign_in to true"
    )


def _hops(headers: Mapping[str, str]) -> Iterator[str]:
    # The activator appends its own header to those that it received, and a mapping's `get` would
    # return only the first.
    every = (
        headers.getlist("x-forwarded-for")
        if isinstance(headers, Headers)
        else [headers.get("x-forwarded-for", "")]
    )
    return (hop.strip() for hop in ",".join(every).split(",") if hop.strip())


def _is_here(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False
