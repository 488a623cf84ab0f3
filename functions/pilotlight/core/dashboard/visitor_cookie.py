"""The part of the dashboard's cookie that activators read: with which key somebody signed in, and
until when.

A cookie is `<session>~<visitor>`. The session is sealed with a key that the controller alone has,
and is what signs somebody in. The visitor's part is sealed with the activators' key `visitors`: it
says whose share of the connections to the controller a browser counts in, and lets nobody in. A
session that was signed out of keeps its share until its own end; a key that was revoked has none.
"""

from __future__ import annotations

import json

from pilotlight.core.crypto import DecryptionFailed, Sealer

COOKIE = "pilotlight_session"
MAX_COOKIE = 4096
"""Ours are far shorter; what is longer is not looked at."""
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
    4.2.1); None where nobody signed in."""
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
