"""Posting of webhook messages: format, signature, and permitted addresses.

Messages follow the Standard Webhooks specification (standardwebhooks.com): `webhook-id` is the same
for every attempt, `webhook-signature` is `v1,` and the base64 of HMAC-SHA256 over
`<id>.<timestamp>.<body>` with the secret's bytes.

Tenants choose the URL, so with `controller.webhooks: public` it must not lead into the platform's
own network (server-side request forgery): https only, and *every* address that the name resolves to
must be public. The connection goes to an address that was checked, with the name for TLS, so a
different second DNS response changes nothing. Redirects are not followed."""

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

from pilotlight.core.transport.cookies import no_cookies
from pilotlight.errors import InvalidInput
from pilotlight.protocol import CONTENT_JSON

if TYPE_CHECKING:
    import httpx

PUBLIC, ANY = "public", "any"
ATTEMPT_S = 15.0
"""Timeout of an attempt, from the DNS lookup to the response's headers: the specification
recommends 15 to 30 s."""
MAX_URL = 2000
MAX_ADDRESSES = 3
"""Addresses of one name, tried one after the other: the first may belong to an address family
without a route from this machine."""
_SECRET_PREFIX = "whsec_"
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_TEREDO = ipaddress.ip_network("2001::/32")
Resolve = Callable[[str, int], Awaitable[list[str]]]


class AddressRefused(Exception):
    """Raised when the platform does not send to a webhook's address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookMessage:
    """A message. `id` identifies it for the receiver, `at` is when the event happened (seconds
    since the epoch)."""

    id: str
    type: str
    at: float
    data: Mapping[str, Any]

    def body(self) -> bytes:
        """Return the message as JSON; the same bytes for every attempt."""
        moment = dt.datetime.fromtimestamp(self.at, tz=dt.UTC).isoformat().replace("+00:00", "Z")
        document = {"type": self.type, "timestamp": moment, "data": self.data}
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptResult:
    """The result of an attempt.

    Attributes:
        status: status of the response; None: there was none.
        error: why the message was not delivered; None: it was accepted.
        is_gone: the receiver rejects further messages (410).
        retry_after_s: the delay that it requested, 0 if none.
    """

    status: int | None = None
    error: str | None = None
    is_gone: bool = False
    retry_after_s: float = 0.0


def sign(secret: str, *, id: str, timestamp: int, body: bytes) -> str:
    """Return the value of `webhook-signature`. Raises ValueError for a secret that is not `whsec_`
    and base64."""
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
    """Return all headers of an attempt at `now`."""
    timestamp = int(now)
    return {
        "content-type": CONTENT_JSON,
        "user-agent": f"pilotlight/{metadata.version('pilotlight')}",
        "webhook-id": message.id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(secret, id=message.id, timestamp=timestamp, body=body),
    }


def check_url(url: str, *, policy: str) -> str:
    """Return `url` if it is permitted for a webhook, as far as that can be checked without a DNS
    lookup. Raises InvalidInput."""
    try:
        _parsed(url, policy)
    except AddressRefused as e:
        raise InvalidInput(f"webhook: {e}", parameter="webhook") from e
    return url


def host_of(url: str) -> str:
    """Return a webhook's URL without its path, which often contains a credential."""
    import httpx

    parsed = httpx.URL(url)
    return f"{parsed.scheme}://{parsed.netloc.decode('ascii')}/…"


def is_public(address: str) -> bool:
    """Whether an IP address is public. An address that embeds another one is classified by that."""
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
    """Resolve a name to addresses, in the system's order. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class WebhookSender:
    """Posts messages, with one connection each. Owner: one event loop. A context manager, which
    closes connections on exit."""

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
        # Created for the first message: loading the machine's trusted certificates takes 30 ms.
        import httpx

        # No connection is kept: one to an address could serve another name on it, whose certificate
        # was never verified. And no proxy from the environment: it would resolve the name again,
        # without our check.
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
        """Make one attempt of at most `attempt_s`."""
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
            return AttemptResult(error=f"no response within {self._attempt_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as e:
            # ValueError: raised by TLS for names that it does not support
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
                # stream: the body is not needed, and could be endless
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
            # raised by the resolver's encoding for labels that are empty or too long
            raise AddressRefused(f"{host} is not a valid name: {e}") from e
        if self._policy == PUBLIC and not all(map(is_public, found)):
            raise AddressRefused(
                f"{host} resolves to an address that is not public: this platform does not send "
                "there"
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
            status=status, error="410: the receiver accepts no further messages", is_gone=True
        )
    why = (
        "redirects are not followed: use the final URL"
        if response.is_redirect
        else "expected a status of 200 to 299"
    )
    return AttemptResult(status=status, error=f"{status}: {why}", retry_after_s=retry_after_s)


def _parsed(url: str, policy: str) -> httpx.URL:
    import httpx

    try:
        parsed = httpx.URL(url)
        host = parsed.host  # decodes an internationalised name
    except (httpx.InvalidURL, UnicodeError) as e:
        raise AddressRefused(f"{url[:200]!r} is not a URL: {e}") from e
    schemes = ("https",) if policy == PUBLIC else ("https", "http")
    if len(url) > MAX_URL:
        raise AddressRefused(f"the URL has {len(url)} characters; the maximum is {MAX_URL}")
    if parsed.scheme not in schemes or not host:
        raise AddressRefused(
            f"{url[:200]!r}: use {' or '.join(f'{scheme}://…' for scheme in schemes)}"
        )
    if parsed.port is not None and not 0 < parsed.port < 65_536:
        raise AddressRefused(f"port {parsed.port} is not valid")
    if parsed.userinfo:
        raise AddressRefused(
            "a URL with a user or a password is shown in lists: put credentials into the path or "
            "the query"
        )
    if policy == PUBLIC and _is_private_literal(host):
        raise AddressRefused(f"{host} is not a public address: this platform does not send there")
    return parsed


def _is_private_literal(host: str) -> bool:
    try:
        return not is_public(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
