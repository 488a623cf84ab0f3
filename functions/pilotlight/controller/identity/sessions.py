"""The dashboard's sessions: a cookie, sealed with a key that the controller alone has, that names
an API key and an end. Activators read a second part of it
(`pilotlight.core.dashboard.visitor_cookie`), which signs nobody in.

Nothing is kept on the server but the ids of sessions that were signed out of (table
`ended_sessions`). Every view looks the key up again, so revoking it ends its sessions too. A
session begins with a new cookie, whatever the browser sent: one that somebody else planted is never
taken over."""

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
"""Sign-outs of one API key that are remembered. The bound is of each key, so that sign-outs of
other keys stay remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Somebody who signed in. `until`: wall clock, seconds since the epoch."""

    id: str
    caller: Principal
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CookieAttributes:
    """How the dashboard's cookies are named and set on a browser's connection (RFC 6265bis, 4.1.3).

    Over TLS with a prefix: a page without TLS, which somebody on the network can forge, can neither
    set nor replace them. It is `__Secure-`, or `__Host-` where the dashboard has an origin of its
    own: then no page of a host beside it can, either. Such a cookie must hold for all paths, so it
    is not for an origin that serves functions."""

    is_secure: bool
    is_host_only: bool

    @classmethod
    def of(
        cls, headers: Mapping[str, str], scheme: str, origin: DashboardOrigin | None
    ) -> CookieAttributes:
        """Of a request. `origin`: the dashboard's own; if that is https, cookies are Secure
        although a proxy does not say so."""
        is_secure = is_encrypted(headers, scheme) or (origin is not None and origin.is_encrypted)
        return cls(is_secure=is_secure, is_host_only=is_secure and origin is not None)

    def name(self, name: str) -> str:
        """With its prefix."""
        return (
            f"__Host-{name}"
            if self.is_host_only
            else f"__Secure-{name}"
            if self.is_secure
            else name
        )

    @property
    def path(self) -> str:
        """For which paths they hold."""
        return "/" if self.is_host_only else DASHBOARD_PATH


def end_session(write: Write, *, session: str, key: str, until: float) -> None:
    """Take this session for ended until its own end. Of each API key at most MAX_ENDED are kept;
    the oldest go first."""
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
    """Those of `sessions` that were signed out of."""
    table = tables.ended_sessions
    return set(sql.execute(sa.select(table.c.id).where(table.c.id.in_(sessions))).scalars())


def purge(write: Write, *, now: float) -> None:
    """Forget sign-outs of sessions whose time is over."""
    write.sql.execute(sa.delete(tables.ended_sessions).where(tables.ended_sessions.c.until <= now))


def issue_cookie(key: PlatformKey, caller: Principal, *, now: float) -> str:
    """The cookie's value for a caller who just proved to hold a key."""
    until = now + SESSION_S
    session = key.sessions.seal(
        json.dumps({"id": secrets.token_hex(12), "key": caller.key, "until": until})
    )
    return visitor_cookie.join_cookie(session, key.activator.visitors, key=caller.key, until=until)


def authenticate_cookie(
    sql: sa.Connection, key: PlatformKey, cookie: str, *, environment: str | None, now: float
) -> Session:
    """The session behind a cookie. Raises Unauthenticated, or Forbidden where the key does not
    reach the dashboard."""
    session, key_id, until = parse_cookie(key, cookie)
    if until <= now or ended_sessions_among(sql, [session]):
        raise Unauthenticated("the session has ended: sign in again")
    caller = access_control.find_principal(
        sql, tables.api_keys.c.id == key_id, environment=environment, now=now
    )
    return Session(id=session, caller=require_dashboard_access(caller), until=until)


def parse_cookie(key: PlatformKey, cookie: str) -> tuple[str, str, float]:
    """(session's id, key's id, end) of a cookie that we sealed. Raises Unauthenticated."""
    try:
        session = json.loads(key.sessions.open(visitor_cookie.session_part(cookie)))
        return str(session["id"]), str(session["key"]), float(session["until"])
    except (DecryptionFailed, KeyError) as e:
        raise Unauthenticated("the session is not one of ours: sign in again") from e


def require_dashboard_access(caller: Principal) -> Principal:
    """The same caller, if its key may look at pages that show all of an environment. Raises
    Forbidden."""
    caller.require_scope(Scope.READ_BILLING)
    if caller.bound_app is not None:
        raise Forbidden(
            f"key {caller.key} reaches app {caller.bound_app!r} only, and pages show all of an "
            f"environment",
            app=caller.bound_app,
        )
    return caller


def require_same_site(headers: Mapping[str, str], *, cookie: str, field: str) -> None:
    """Raise Forbidden for a form that another site sent.

    `field` came with the form and must equal `cookie`, which is SameSite=Strict: a browser does not
    send it along with another site's form. Browsers that say where a form comes from (Fetch
    Metadata) are believed too; our own Host header would prove nothing, since it is the
    activator's."""
    elsewhere = headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")
    if elsewhere or not field or not hmac.compare_digest(cookie.encode(), field.encode()):
        raise Forbidden(
            "this form was sent from another site, or is older than this browser's session: load "
            "the page again"
        )


def is_encrypted(headers: Mapping[str, str], scheme: str) -> bool:
    """Whether the browser speaks TLS: to us, or to whoever passes its requests on and says so."""
    return headers.get("x-forwarded-proto", scheme).partition(",")[0].strip() == "https"


def require_private_connection(headers: Mapping[str, str], scheme: str, *, allowed: bool) -> None:
    """Raise Forbidden where a key would cross a network unencrypted: not TLS, and some hop is not
    this machine.

    `allowed`: the setting `plain_http_sign_in`. Hops are those of X-Forwarded-For: the last is the
    activator's word, and the ones before it can only make this stricter."""
    if allowed or is_encrypted(headers, scheme) or all(map(_is_here, _hops(headers))):
        return
    raise Forbidden(
        "signing in from another machine needs https: a key, and the session after it, could be "
        "read on the way. Put a TLS proxy in front "
        "(it must send X-Forwarded-Proto), tunnel with `ssh -L 8700:127.0.0.1:8700`, or set "
        "controller.plain_http_sign_in to true"
    )


def _hops(headers: Mapping[str, str]) -> Iterator[str]:
    # The activator adds a header of its own behind whatever came, and a mapping's `get` would see
    # the first one only.
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
