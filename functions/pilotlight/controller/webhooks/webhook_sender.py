"""Posting to webhooks: what is sent, how it is signed, and where it may go.

Messages follow the Standard Webhooks specification (standardwebhooks.com): `webhook-id` is the same
for every attempt, `webhook-signature` is `v1,` and the base64 of HMAC-SHA256 over
`<id>.<timestamp>.<body>` with the secret's bytes.

A URL is a tenant's choice, so with `controller.webhooks: public` it must not lead into the
platform's own network (server-side request forgery): https only, and *every* address that the name
resolves to must be one of the public internet. The connection goes to an address that was checked,
with the name for TLS, so a second answer of the name server changes nothing. Redirects are not
followed."""

from __future__ import annotations

import asyncio
import base64
import binascii
import datetime as dt
import hashlib
import hmac
import ipaddress
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pilotlight.core.cookies import no_cookies
from pilotlight.errors import InvalidInput
from pilotlight.protocol import CONTENT_JSON

if TYPE_CHECKING:
    import httpx

PUBLIC, ANY = "public", "any"
ATTEMPT_S = 15.0
"""For all of an attempt, from the name's look-up to the answer's head: the specification recommends
15 to 30 s."""
MAX_URL = 2000
MAX_ADDRESSES = 3
"""Of one name, tried one after the other: the first may be of a family that has no route from
here."""
_SECRET_PREFIX = "whsec_"
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_TEREDO = ipaddress.ip_network("2001::/32")
Resolve = Callable[[str, int], Awaitable[list[str]]]


class AddressRefused(Exception):
    """Raised when a webhook's address is none that this platform sends to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookMessage:
    """What is told. `id` names it for the receiver, `at` is when it happened (seconds since the
    epoch)."""

    id: str
    type: str
    at: float
    data: Mapping[str, Any]

    def body(self) -> bytes:
        """As JSON; the same bytes whenever it is sent."""
        moment = dt.datetime.fromtimestamp(self.at, tz=dt.UTC).isoformat().replace("+00:00", "Z")
        document = {"type": self.type, "timestamp": moment, "data": self.data}
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptResult:
    """What an attempt came to.

    Attributes:
        status: of the answer; None: there was none.
        error: why it does not count as delivered; None: it was taken.
        is_gone: the receiver said that it wants no more (410).
        retry_after_s: what it asked for, 0 if nothing.
    """

    status: int | None = None
    error: str | None = None
    is_gone: bool = False
    retry_after_s: float = 0.0


def sign(secret: str, *, id: str, timestamp: int, body: bytes) -> str:
    """The value of `webhook-signature`. Raises ValueError for a secret that is not `whsec_` and
    base64."""
    kind, prefix, text = secret.rpartition(_SECRET_PREFIX)
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error as e:
        raise ValueError("a webhook's secret must be whsec_ and base64") from e
    if kind or not prefix or not key:
        raise ValueError("a webhook's secret must be whsec_ and base64")
    digest = hmac.new(key, f"{id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()


def headers(message: WebhookMessage, body: bytes, *, secret: str, now: float) -> dict[str, str]:
    """All headers of an attempt at `now`."""
    timestamp = int(now)
    return {
        "content-type": CONTENT_JSON,
        "user-agent": f"pilotlight/{metadata.version('pilotlight')}",
        "webhook-id": message.id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(secret, id=message.id, timestamp=timestamp, body=body),
    }


def check_url(url: str, *, policy: str) -> str:
    """Return `url` if a webhook may have it, as far as that can be said without a look-up. Raises
    InvalidInput."""
    try:
        _parsed(url, policy)
    except AddressRefused as e:
        raise InvalidInput(f"webhook: {e}", parameter="webhook") from e
    return url


def host_of(url: str) -> str:
    """A webhook's URL for those who may not have it whole: its path is often what opens it."""
    import httpx

    parsed = httpx.URL(url)
    return f"{parsed.scheme}://{parsed.netloc.decode('ascii')}/…"


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet. Addresses that carry another one are
    judged by that."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not ip.is_multicast
    inner = ip.ipv4_mapped or ip.sixtofour
    if inner is None and ip in _NAT64:
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if inner is not None:
        return is_public(str(inner))
    return ip in _GLOBAL_UNICAST and ip.is_global and ip not in _TEREDO


async def resolve(host: str, port: int) -> list[str]:
    """Addresses of a name, in the system's order. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class WebhookSender:
    """Posts messages, one connection each. Owner: one event loop. A context manager: leaving it
    closes its connections."""

    def __init__(
        self,
        *,
        policy: str,
        resolve: Resolve = resolve,
        verify: ssl.SSLContext | None = None,
        attempt_s: float = ATTEMPT_S,
    ) -> None:
        self._policy = policy
        self._resolve = resolve
        self._attempt_s = attempt_s
        self._verify = verify

    @cached_property
    def _http(self) -> httpx.AsyncClient:
        # Made for the first message: reading the certificates that the machine trusts takes 30 ms.
        import httpx

        # No connection is kept: one to an address could serve another name there, whose certificate
        # was never looked at. And no proxy of the environment: it would resolve the name again, out
        # of our sight.
        return httpx.AsyncClient(
            verify=self._verify or ssl.create_default_context(),
            trust_env=False,
            follow_redirects=False,
            timeout=self._attempt_s,
            limits=httpx.Limits(max_keepalive_connections=0),
            cookies=no_cookies(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if "_http" in self.__dict__:
            await self._http.aclose()

    async def post(
        self, message: WebhookMessage, *, url: str, secret: str, now: float
    ) -> AttemptResult:
        """One attempt, of at most `attempt_s`."""
        import httpx

        body = message.body()
        try:
            async with asyncio.timeout(self._attempt_s):
                return await self._post(
                    _parsed(url, self._policy), body, headers(message, body, secret=secret, now=now)
                )
        except AddressRefused as e:
            return AttemptResult(error=str(e))
        except TimeoutError:
            return AttemptResult(error=f"no answer within {self._attempt_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as e:
            # ValueError: what TLS says of names that it cannot ask for
            return AttemptResult(error=f"{type(e).__name__}: {e}" if str(e) else type(e).__name__)

    async def _post(self, url: httpx.URL, body: bytes, fields: Mapping[str, str]) -> AttemptResult:
        import httpx

        host = url.raw_host.decode("ascii")
        addresses = await self._addresses(host, url.port or (443 if url.scheme == "https" else 80))
        fields = {**fields, "host": url.netloc.decode("ascii")}
        for last, address in enumerate(addresses, start=1):
            request = self._http.build_request(
                "POST", url.copy_with(host=address), content=body, headers=fields
            )
            request.extensions["sni_hostname"] = host
            try:
                # the body is nobody's concern, and could be endless
                response = await self._http.send(request, stream=True)
            except httpx.ConnectError:
                if last == len(addresses):
                    raise
                continue
            await response.aclose()
            return _outcome(response)
        raise AddressRefused(f"{host} has no address")

    async def _addresses(self, host: str, port: int) -> list[str]:
        try:
            found = await self._resolve(host, port)
        except OSError as e:
            raise AddressRefused(f"{host} cannot be resolved: {e.strerror or e}") from e
        except UnicodeError as e:
            # what the resolver's own encoding says of labels that are empty or too long
            raise AddressRefused(f"{host} is no name: {e}") from e
        if self._policy == PUBLIC and not all(map(is_public, found)):
            raise AddressRefused(
                f"{host} resolves to an address that is not of the public internet: this platform "
                f"does not send there"
            )
        return found[:MAX_ADDRESSES]


def _outcome(response: httpx.Response) -> AttemptResult:
    status = response.status_code
    if response.is_success:
        return AttemptResult(status=status)
    asked = response.headers.get("retry-after", "")
    retry_after_s = float(asked) if asked.isascii() and asked.isdigit() and len(asked) < 8 else 0.0
    if status == 410:
        return AttemptResult(
            status=status, error="410: the receiver wants no more of these", is_gone=True
        )
    why = (
        "redirects are not followed: name the address itself"
        if response.is_redirect
        else "an answer of 200 to 299 was expected"
    )
    return AttemptResult(status=status, error=f"{status}: {why}", retry_after_s=retry_after_s)


def _parsed(url: str, policy: str) -> httpx.URL:
    import httpx

    try:
        parsed = httpx.URL(url)
        host = parsed.host  # decodes what looks like an internationalised name
    except (httpx.InvalidURL, UnicodeError) as e:
        raise AddressRefused(f"{url[:200]!r} is not a URL: {e}") from e
    schemes = ("https",) if policy == PUBLIC else ("https", "http")
    if len(url) > MAX_URL:
        raise AddressRefused(f"a URL of {len(url)} characters: at most {MAX_URL}")
    if parsed.scheme not in schemes or not host:
        raise AddressRefused(
            f"{url[:200]!r}: write {' or '.join(f'{scheme}://…' for scheme in schemes)}"
        )
    if parsed.port is not None and not 0 < parsed.port < 65_536:
        raise AddressRefused(f"there is no port {parsed.port}")
    if parsed.userinfo:
        raise AddressRefused(
            "a URL with a user or a password in it is shown in lists: put what is secret into the "
            "path or the query"
        )
    if policy == PUBLIC and _is_private_literal(host):
        raise AddressRefused(
            f"{host} is not an address of the public internet: this platform does not send there"
        )
    return parsed


def _is_private_literal(host: str) -> bool:
    try:
        return not is_public(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
