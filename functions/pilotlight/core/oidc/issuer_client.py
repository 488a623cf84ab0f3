"""A client of one issuer: its discovery document, its keys, and its token endpoint (OpenID Connect
Discovery 1.0; RFC 6749, 7636, 8628).

Everything that it fetches comes from the configured issuer, or from an https URL of that issuer's
discovery document; redirects are not followed, and answers have limits of size and time. Keys are
read again every REFRESH_S, and when a token names an unknown one, but not more often than every
RETRY_S: a flood of invented key ids costs one request. While the issuer does not answer, the keys
that it last had are trusted for KEEP_S."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_plus

import httpx

from pilotlight.core.oidc.errors import GrantRefused, IssuerUnreachable, TokenRefused
from pilotlight.core.oidc.settings import Issuer, is_endpoint
from pilotlight.core.oidc.tokens import IssuerKey, UnverifiedToken, find_key, read_keys
from pilotlight.core.transport.cookies import no_cookies

log = logging.getLogger(__name__)

REFRESH_S = 300.0
"""How long keys are used before they are read again: for so long tokens of a key that was removed
are accepted."""
RETRY_S = 30.0
"""Least time between two requests for keys."""
KEEP_S = 86_400.0
"""How long keys are trusted while the issuer does not answer."""
REDISCOVER_S = 3600.0
"""How long a discovery document is used before it is read again."""
ANSWER_S = 5.0
"""Time limit of a request, its answer included."""
MAX_ANSWER_BYTES = 256 * 1024
"""Longest answer of an issuer."""
_DISCOVERY = "/.well-known/openid-configuration"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """What the discovery document of an issuer says.

    Attributes:
        device_endpoint: None = it has no device flow.
        names_itself: whether it names itself when it sends a browser back (RFC 9207).
        wants_secret_in_form: whether a client sends its secret in the form, instead of in the
            `Authorization` header.
    """

    keys_url: str
    authorization_endpoint: str
    token_endpoint: str
    device_endpoint: str | None
    names_itself: bool
    wants_secret_in_form: bool


class IssuerClient:
    """The client of one issuer. Owner: the event loop; keys change in one synchronous step."""

    def __init__(
        self,
        issuer: Issuer,
        *,
        secret: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`secret`: of the client at the issuer; None = a public client. `clock`: monotonic
        seconds."""
        self.issuer = issuer
        self._secret = secret
        self._clock = clock
        self._http: httpx.AsyncClient | None = None
        self._provider: Provider | None = None
        self._keys: tuple[IssuerKey, ...] = ()
        self._trusted: frozenset[str] = frozenset()
        self._discovered_at = self._read_at = self._tried_at = -math.inf
        self._error = "it was not asked yet"
        self._refreshing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<IssuerClient {self.issuer.name} {len(self._keys)} keys>"

    async def aclose(self) -> None:
        """Close its connections."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        if self._http is not None:
            await self._http.aclose()

    # -- keys --------------------------------------------------------------------------------------
    def trusts(self, thumbprint: str) -> bool:
        """Whether the issuer still has this key, as far as is known."""
        return thumbprint in self._trusted and self._clock() - self._read_at < KEEP_S

    async def key_of(self, token: UnverifiedToken) -> IssuerKey:
        """Return the issuer's key that a token names. Raises TokenRefused if it has none,
        IssuerUnreachable if its keys are not known."""
        await self.refresh_if_due()
        key = self._find(token)
        if key is None and self._may_ask():
            await self._refresh()
            key = self._find(token)
        if self._clock() - self._read_at >= KEEP_S:
            raise self._unreachable()
        if key is None:
            raise TokenRefused("the token's key is none of the issuer's")
        return key

    async def refresh_if_due(self) -> None:
        """Read the keys again if they are older than REFRESH_S. A failure is logged; who
        needs the keys gets its reason."""
        if self._clock() - self._read_at >= REFRESH_S and self._may_ask():
            await self._refresh()

    async def keep_fresh(self) -> None:
        """Read the keys again from time to time, until cancelled."""
        while True:
            await self.refresh_if_due()
            await asyncio.sleep(RETRY_S)

    def _find(self, token: UnverifiedToken) -> IssuerKey | None:
        return find_key(self._keys, token)

    def _may_ask(self) -> bool:
        return self._refreshing is not None or self._clock() - self._tried_at >= RETRY_S

    async def _refresh(self) -> None:
        """Read the keys once, for all who wait for them."""
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._read(), name="issuer keys")
            self._refreshing.add_done_callback(self._on_read)
        await asyncio.shield(self._refreshing)

    def _on_read(self, task: asyncio.Task[None]) -> None:
        self._refreshing = None

    async def _read(self) -> None:
        self._tried_at = self._clock()
        try:
            if self._provider is None or self._clock() - self._discovered_at >= REDISCOVER_S:
                self._provider = await self._discover()
                self._discovered_at = self._clock()
            body = await self._request("GET", self._provider.keys_url)
            keys = await asyncio.to_thread(read_keys, body)
        except IssuerUnreachable as e:
            self._error = str(e)
            log.warning("event=issuer_unreachable issuer=%s error=%s", self.issuer.name, e)
            return
        self._keys, self._read_at, self._error = keys, self._clock(), ""
        self._trusted = frozenset(key.thumbprint for key in keys)

    def _unreachable(self) -> IssuerUnreachable:
        return IssuerUnreachable(
            f"issuer {self.issuer.name!r} ({self.issuer.issuer}) cannot be asked: {self._error}"
        )

    # -- endpoints ---------------------------------------------------------------------------------
    async def provider(self) -> Provider:
        """Return the issuer's endpoints. Raises IssuerUnreachable."""
        await self.refresh_if_due()
        if self._provider is None:
            raise self._unreachable()
        return self._provider

    async def request_token(self, form: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the token endpoint's answer. Raises GrantRefused, IssuerUnreachable."""
        return await self._post((await self.provider()).token_endpoint, form)

    async def request_device_code(self, form: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the answer of the device authorization endpoint (RFC 8628, section 3.2). Raises
        GrantRefused, IssuerUnreachable."""
        endpoint = (await self.provider()).device_endpoint
        if endpoint is None:
            raise GrantRefused("unsupported", f"issuer {self.issuer.name!r} has no device flow")
        return await self._post(endpoint, form)

    async def _post(self, url: str, form: Mapping[str, str]) -> Mapping[str, Any]:
        provider, client_id = await self.provider(), self.issuer.client_id or ""
        headers, fields = {}, {**form, "client_id": client_id}
        if self._secret is not None and provider.wants_secret_in_form:
            fields["client_secret"] = self._secret
        elif self._secret is not None:
            pair = f"{quote_plus(client_id)}:{quote_plus(self._secret)}"
            headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        return _object(await self._request("POST", url, headers=headers, form=fields))

    async def _discover(self) -> Provider:
        url = self.issuer.issuer.rstrip("/") + _DISCOVERY
        document = _object(await self._request("GET", url))
        named = str(document.get("issuer"))
        if named != self.issuer.issuer:
            raise IssuerUnreachable(f"its discovery document is of another issuer, {named[:200]!r}")
        endpoints = {
            name: document.get(name)
            for name in ("jwks_uri", "authorization_endpoint", "token_endpoint")
        }
        # an issuer of tokens for programs alone has no other endpoints
        needed = endpoints if self.issuer.client_id else ["jwks_uri"]
        device = document.get("device_authorization_endpoint")
        for name in needed:
            if not is_endpoint(endpoints[name], of=self.issuer):
                raise IssuerUnreachable(f"its discovery document has no https URL in {name}")
        methods = document.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        return Provider(
            keys_url=str(endpoints["jwks_uri"]),
            authorization_endpoint=str(endpoints["authorization_endpoint"]),
            token_endpoint=str(endpoints["token_endpoint"]),
            device_endpoint=device if is_endpoint(device, of=self.issuer) else None,
            names_itself=document.get("authorization_response_iss_parameter_supported") is True,
            wants_secret_in_form="client_secret_basic" not in methods
            and "client_secret_post" in methods,
        )

    async def _request(
        self,
        verb: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        form: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the body of a successful answer. Raises IssuerUnreachable, GrantRefused."""
        if self._http is None:
            self._http = httpx.AsyncClient(
                follow_redirects=False, timeout=ANSWER_S, cookies=no_cookies()
            )
        sent = {"accept": "application/json", "accept-encoding": "identity", **(headers or {})}
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                self._http.stream(verb, url, headers=sent, data=form) as response,
            ):
                body = await _bounded(response)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as e:
            raise IssuerUnreachable(f"{url}: {type(e).__name__} {e}".rstrip()) from e
        if response.status_code == 200:
            return body
        if form is not None and response.status_code in (400, 401, 403):
            raise _refusal(body)
        raise IssuerUnreachable(f"{url} answered {response.status_code}")


async def _bounded(response: httpx.Response) -> bytes:
    """Return a body of at most MAX_ANSWER_BYTES. Raises IssuerUnreachable."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise IssuerUnreachable(f"{response.url} answered with a coding that was not accepted")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise IssuerUnreachable(f"{response.url} answered more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise IssuerUnreachable("it answered something else than JSON") from e
    if not isinstance(found, dict):
        raise IssuerUnreachable("it answered something else than an object")
    return found


def _refusal(body: bytes) -> GrantRefused:
    try:
        document = _object(body)
    except IssuerUnreachable:
        document = {}
    return GrantRefused(
        str(document.get("error", "refused"))[:100],
        str(document.get("error_description", ""))[:300],
    )
