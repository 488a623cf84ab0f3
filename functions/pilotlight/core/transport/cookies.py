"""Cookies of HTTP clients that serve more than one caller: such a client keeps none.

An httpx client keeps each `Set-Cookie` that it receives and sends it with its later requests. In a
client that forwards requests of several callers, that gives the session of one caller to all
others. Each caller's own `Cookie` header is a header like any other and passes through."""

from __future__ import annotations

from http.cookiejar import CookieJar, DefaultCookiePolicy


def no_cookies() -> CookieJar:
    """A jar that stores no cookie of any server, for the `cookies` argument of an httpx client."""
    return CookieJar(policy=DefaultCookiePolicy(allowed_domains=()))
