"""The dashboard's sessions: a cookie, sealed with the platform's key, that names an API key and an end.

Nothing is kept on the server; every view looks the key up again, so revoking it ends its sessions too.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping

import sqlalchemy as sa

from pilotlight.controller import access, tables
from pilotlight.controller.access import Principal
from pilotlight.errors import Forbidden, Unauthenticated
from pilotlight.seal import PlatformKey, SealBroken
from pilotlight.types import Scope

COOKIE = "pilotlight_session"
FORM_COOKIE = "pilotlight_form"
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


def demand_same_site(headers: Mapping[str, str], *, cookie: str, field: str) -> None:
    """Raise Forbidden for a form that another site sent.

    `field` came with the form and must equal `cookie`, which is SameSite=Strict: a browser does not send it along with
    another site's form. Browsers that say where a form comes from (Fetch Metadata) are believed too; our own Host header
    would prove nothing, since it is the activator's.
    """
    elsewhere = headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")
    if elsewhere or not field or not hmac.compare_digest(cookie.encode(), field.encode()):
        raise Forbidden("this form was sent from another site, or is older than this browser's session: load the page again")
