"""The origins whose web pages may call a public function: `cors=["https://app.example"]`.

An origin is compared as text with the header `Origin`, so it is written as browsers send it
(RFC 6454, section 6.2): `scheme://host` or `scheme://host:port`, in lower case, without a default
port and without a path."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pilotlight.errors import InvalidInput

ANY_ORIGIN = "*"
MAX_ORIGINS = 32
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_HOST = rf"({_LABEL}(\.{_LABEL})*|\[[0-9a-f:.]+\])"
_ORIGIN = re.compile(rf"https?://(?=[^/]{{1,260}}\Z){_HOST}(:[1-9][0-9]{{0,4}})?")
_DEFAULT_PORT = re.compile(r"http://.*:80|https://.*:443")


def check_origins(origins: tuple[str, ...]) -> None:
    """Raise InvalidInput unless every entry is an origin, or the only one is "*"."""
    if len(origins) > MAX_ORIGINS:
        raise InvalidInput(f"cors: {len(origins)} origins, at most {MAX_ORIGINS}", parameter="cors")
    if ANY_ORIGIN in origins and len(origins) > 1:
        raise InvalidInput(
            'cors: "*" permits every origin: name no others beside it', parameter="cors"
        )
    for origin in origins:
        if origin == ANY_ORIGIN:
            continue
        if not _ORIGIN.fullmatch(origin) or _DEFAULT_PORT.fullmatch(origin):
            raise InvalidInput(
                f"cors: {origin[:80]!r} is not an origin: write https://host or https://host:port "
                f"in lower case, without a path and without the default port",
                parameter="cors",
            )


def common_origins(policies: Iterable[tuple[str, ...]]) -> frozenset[str]:
    """Return the origins that every one of these policies permits."""
    common: frozenset[str] | None = None
    for policy in policies:
        origins = frozenset(policy)
        if common is None or ANY_ORIGIN in common:
            common = origins
        elif ANY_ORIGIN not in origins:
            common &= origins
    return common or frozenset()
