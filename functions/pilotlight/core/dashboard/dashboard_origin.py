"""The separate origin of the dashboard: setting `controller.dashboard_url`.

The controller validates the setting and derives its cookie names from it; the activator routes by
it; the command line prints it. A browser sends cookies to every port of a host (RFC 6265, section
8.5), so the two origins must differ in their hosts, and a request belongs to the dashboard's origin
by the host of its `Host` header alone, regardless of the port."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pilotlight.core.settings import SettingsInvalid, load_section_key
from pilotlight.core.transport.listeners import is_loopback

DASHBOARD_PATH = "/dashboard"
DASHBOARD_STATIC_PATH = "/dashboard/static/"
"""Style sheets and scripts: public, without cookies, also loaded by the API reference."""
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardOrigin:
    """A web origin (RFC 6454) in its serialized form.

    Attributes:
        url: `scheme://host` or `scheme://host:port`, in lower case, without a default port.
        host: the host, an IPv6 address without brackets.
    """

    url: str
    host: str

    @classmethod
    def parse(cls, url: str) -> DashboardOrigin:
        """Parse an origin. Raises ValueError with a message that begins with the setting's key."""
        wrong = f"dashboard_url = {url!r}: write https://host or https://host:port"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as e:
            raise ValueError(f"{wrong}; {e}") from e
        if parts.scheme not in _DEFAULT_PORTS:
            raise ValueError(f"{wrong} (http is for a single machine only)")
        if parts.username is not None or parts.path not in ("", "/") or "?" in url or "#" in url:
            raise ValueError(f"{wrong}, without a user, a path, a query or a fragment")
        host = parts.hostname or ""
        if not _is_host(host):
            raise ValueError(f"{wrong}; {host!r} is not a host name or an IP address")
        shown = f"[{host}]" if ":" in host else host
        is_default = port is None or port == _DEFAULT_PORTS[parts.scheme]
        return cls(url=f"{parts.scheme}://{shown}" + ("" if is_default else f":{port}"), host=host)

    @property
    def is_encrypted(self) -> bool:
        """Whether browsers connect with TLS."""
        return self.url.startswith("https:")

    def owns(self, host_header: bytes) -> bool:
        """Whether a request with this `Host` header is for this origin."""
        return parse_host(host_header.decode("latin-1")) == self.host


def parse_host(authority: str) -> str:
    """The host of `host:port`, in lower case, without brackets and without a trailing dot."""
    authority = authority.strip().lower()
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0].removesuffix(".")


def read_dashboard_origin(file: Path | None) -> DashboardOrigin | None:
    """Read `controller.dashboard_url` from platform.yaml, for every process that needs it; None =
    the dashboard uses the same origin as the API.

    Raises SettingsInvalid if it is not an origin, or has the host of `activator.listen`, where
    functions are served."""
    given: Any = load_section_key("controller", "dashboard_url", file)
    if given is None:
        return None
    try:
        origin = DashboardOrigin.parse(str(given))
    except ValueError as e:
        raise SettingsInvalid(f"{file}: controller.{e}") from e
    listen = parse_host(str(load_section_key("activator", "listen", file) or "127.0.0.1:8700"))
    if origin.host == listen or (is_loopback(origin.host) and is_loopback(listen)):
        raise SettingsInvalid(
            f"{file}: controller.dashboard_url = {given!r}: functions are served at this host "
            f"(activator.listen): use another host, "
            "since browsers send cookies to every port of a host; on this machine "
            "use http://dashboard.localhost:<port>"
        )
    return origin


def _is_host(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).compressed == host
    except ValueError:
        return len(host) <= 253 and _HOST_NAME.fullmatch(host) is not None
