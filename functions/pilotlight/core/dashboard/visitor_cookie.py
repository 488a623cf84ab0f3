"""The part of the dashboard's cookie that activators read: the API key of the session, and its
expiry.

A cookie is `<session>~<visitor>`. The session part is sealed with a key that only the controller
has, and authenticates the user. The visitor part is sealed with the activators' key `visitors`: it
attributes a browser's connections to the controller to an API key's share, and does not
authenticate. After a sign-out the share remains until the session expires; a revoked key has none.
"""

from __future__ import annotations

import json

from pilotlight.core.crypto import DecryptionFailed, Sealer

COOKIE = "pilotlight_session"
MAX_COOKIE = 4096
"""Ours are far shorter; longer cookies are ignored."""
_SEPARATOR = "~"
_NAMES = (COOKIE, f"__Secure-{COOKIE}", f"__Host-{COOKIE}")


def join_cookie(session: str, visitors: Sealer, *, key: str, until: float) -> str:
    """A cookie's value. `until`: wall clock, seconds since the epoch."""
    return (
        session + _SEPARATOR + visitors.seal(json.dumps({"key": key, "until": until})).rstrip("=")
    )


def session_part(cookie: str) -> str:
    """The controller's part of a cookie's value."""
    return cookie.partition(_SEPARATOR)[0]


def api_key_from_cookies(visitors: Sealer, cookies: str, *, now: float) -> str | None:
    """The id of the API key behind the dashboard's cookie in a `Cookie` header (RFC 6265, section
    4.2.1); None without a valid session."""
    for pair in cookies.split(";"):
        name, _, value = pair.strip().partition("=")
        if name in _NAMES and len(value) <= MAX_COOKIE:
            try:
                visitor = json.loads(
                    visitors.open(value.strip('"').partition(_SEPARATOR)[2] + "==")
                )
            except DecryptionFailed:
                continue
            return str(visitor["key"]) if now < visitor["until"] else None
    return None
