"""Cookies of web applications that share a host.

A browser sends a cookie to every path of its host, and to hosts beside it, unless the cookie says
otherwise (RFC 6265, sections 5.1.3 and 5.1.4). All functions, and often the dashboard, have one
host: a cookie for `/` would reach the functions of other tenants with the session that it stands
for, and a tenant could fill the requests of its visitors to all others with cookies of its own."""

from __future__ import annotations

import re

OURS = b"pilotlight_"
"""Part of the names of the dashboard's cookies: a page that sets one could sign its visitors in to
another account."""
_HOST_ONLY = b"__host-"
"""Prefix of a cookie whose path is `/`, in any case."""
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""Characters at which browsers end a cookie, or drop it."""


def confine(cookie: bytes, mount: bytes) -> bytes | None:
    """Return the value of a `Set-Cookie` header of the function at path `mount` so that a browser
    sends the cookie to this path and below it alone. None for a cookie that cannot be confined, and
    for one with a name of the dashboard's.

    The path of an application that knows its mount stays; another one is below the mount."""
    if OURS in cookie or _CONTROL.search(cookie) or cookie.lstrip().lower().startswith(_HOST_ONLY):
        return None
    path = b""
    kept: list[bytes] = []
    for attribute in cookie.split(b";"):
        name, _, value = attribute.partition(b"=")
        name = name.strip().lower()
        if kept and name == b"path":
            path = value.strip()
        elif not kept or name != b"domain":
            kept.append(attribute)
    return b"%b; Path=%b" % (b";".join(kept), _below(mount, path))


def without_ours(cookies: bytes) -> bytes:
    """Return the value of a `Cookie` header without the dashboard's cookies."""
    if OURS not in cookies:
        return cookies
    pairs = (pair.strip() for pair in cookies.split(b";"))
    return b"; ".join(pair for pair in pairs if OURS not in pair.partition(b"=")[0])


def _below(mount: bytes, path: bytes) -> bytes:
    if path == mount or path.startswith(mount + b"/"):
        return path
    return mount + path if path.startswith(b"/") and path != b"/" else mount
