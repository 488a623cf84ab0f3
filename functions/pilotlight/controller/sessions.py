"""The dashboard's sessions: a cookie, sealed with the platform's key, that names an API key and an end.

Nothing is kept on the server; every view looks the key up again, so revoking it ends its sessions too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from urllib.parse import urlsplit

import sqlalchemy as sa

from pilotlight.controller import access, tables
from pilotlight.controller.access import Principal
from pilotlight.errors import Forbidden, Unauthenticated
from pilotlight.seal import PlatformKey, SealBroken
from pilotlight.types import Scope

COOKIE = "pilotlight_session"
SESSION_S = 12 * 3600.0


def begin(key: PlatformKey, caller: Principal, *, now: float) -> str:
    """The cookie's value for a caller who just proved to hold a key."""
    return key.seal(json.dumps({"key": caller.key, "until": now + SESSION_S}))


def resume(sql: sa.Connection, key: PlatformKey, cookie: str, *, environment: str | None, now: float) -> Principal:
    """The caller behind a cookie. Raises Unauthenticated, or Forbidden where the key does not reach the dashboard."""
    try:
        session = json.loads(key.open(cookie))
    except SealBroken as e:
        raise Unauthenticated("the session is not one of ours: sign in again") from e
    if session["until"] <= now:
        raise Unauthenticated("the session has ended: sign in again")
    caller = access.find(sql, tables.api_keys.c.id == session["key"], environment=environment, now=now)
    caller.demand(Scope.DEPLOY)
    return caller


def demand_same_site(headers: Mapping[str, str]) -> None:
    """Raise Forbidden for a form that another site sent (Fetch Metadata; Origin where a browser does not send it)."""
    site = headers.get("sec-fetch-site")
    origin = headers.get("origin")
    if site is not None:
        foreign = site not in ("same-origin", "none")
    else:
        foreign = origin is not None and urlsplit(origin).netloc != headers.get("host")
    if foreign:
        raise Forbidden("this form was sent from another site")
